"""Group interchangeable devices into classes, and stages into types: the count of each class.

Two devices are interchangeable if swapping them changes no link. Devices of one region mostly are,
and then only the count of each class in a stage matters. Four classes of 16 devices and stages of 8
make 165 types of stage, instead of 4 * 10^9 stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import Matrix, PairTimes

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceClasses:
    members: tuple[tuple[int, ...], ...]  # of each class, its devices
    sync: Matrix  # between a device of one class and another of the same or another class
    hop: Matrix

    @property
    def counts(self) -> _Ints:
        return np.array([len(devices) for devices in self.members])


def device_classes(times: PairTimes) -> DeviceClasses:
    """Return the fewest classes; with all links different, one per device."""
    members: list[list[int]] = []
    for device in range(times.num_devices):
        for others in members:
            if _alike(device, others[0], times):
                others.append(device)
                break
        else:
            members.append([device])
    first = [devices[0] for devices in members]
    last = [devices[-1] for devices in members]  # a class of one has no link inside: 0, unused
    return DeviceClasses(
        members=tuple(map(tuple, members)),
        sync=times.sync[np.ix_(first, last)],
        hop=times.hop[np.ix_(first, last)],
    )


def num_stage_types(counts: _Ints, size: int) -> int:
    """Return the number of ways to choose `size` devices from these counts."""
    choices = [1] + [0] * size
    for count in counts.tolist():
        choices = [sum(choices[max(0, taken - count) : taken + 1]) for taken in range(size + 1)]
    return choices[size]


def stage_types(counts: _Ints, size: int) -> _Ints:
    """Return all types, one row each: the count of each class."""
    return np.array(list(_taken(counts.tolist(), size)), np.int64).reshape(-1, len(counts))


def type_sync(types: _Ints, classes: DeviceClasses) -> Matrix:
    """Eq. 2 for each type."""
    rows = types @ classes.sync - np.diag(classes.sync)  # a device sends nothing to itself
    slowest: Matrix = np.where(types > 0, rows, 0.0).max(axis=1)
    return slowest


def assign_devices(sequence: _Ints, classes: DeviceClasses) -> _Ints:
    """Return stages of these types with concrete devices."""
    left = [list(devices) for devices in classes.members]
    return np.array(
        [
            [left[index].pop() for index, count in enumerate(stage) for _ in range(count)]
            for stage in sequence.tolist()
        ]
    )


def _alike(a: int, b: int, times: PairTimes) -> bool:
    rest = np.ones(times.num_devices, dtype=bool)
    rest[[a, b]] = False
    return all(np.array_equal(of[a, rest], of[b, rest]) for of in (times.sync, times.hop))


def _taken(counts: list[int], size: int) -> Iterator[list[int]]:
    if not counts:
        if size == 0:
            yield []
        return
    for first in range(min(counts[0], size) + 1):
        for rest in _taken(counts[1:], size - first):
            yield [first, *rest]
