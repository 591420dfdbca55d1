"""Find the provably best layout, if devices are of few classes.

Devices of a class can be swapped without a change of any link. A type of stage is its count of each
class: four classes of 16 devices make 165 types of 8 devices, instead of 4 * 10^9 stages. A
depth-first search appends one type after another and backtracks when its lower bound - the slowest
stage so far, the hops so far, and the cheapest hop for each that is missing - is no better than the
best known layout. With a good initial layout it ends at once or within seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import LayoutCost, Matrix, PairTimes
from polyrhythm.types import Seconds

MAX_TYPES = 200
MAX_NODES = 20_000_000  # of the search tree: about a second


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The result of an exact search below a known cost."""

    better: LayoutCost | None
    complete: bool  # True: no layout is better than `better`, or than the known one


def search_exactly(
    times: PairTimes, *, below: Seconds = np.inf, max_nodes: int = MAX_NODES
) -> ExactResult:
    """Search for the best layout that costs less than `below`; stop if there are too many types."""
    from polyrhythm.plan.dtfm.exact_tree import Choices, explore  # compiled: imported when needed
    from polyrhythm.plan.dtfm.path import layout_of_groups

    classes = device_classes(times)
    if num_stage_types(classes.counts, times.num_pipelines) > MAX_TYPES:
        return ExactResult(better=None, complete=False)
    types = stage_types(classes.counts, times.num_pipelines)
    hops = _type_hops(types, classes, times.num_pipelines)
    choices = Choices(types, type_sync(types, classes), hops, classes.counts)
    sequence, complete = explore(
        choices, num_stages=times.num_stages, below=below, max_nodes=max_nodes
    )
    better = None
    if sequence[0] >= 0:
        better = layout_of_groups(assign_devices(types[sequence], classes), times)
    return ExactResult(better=better, complete=complete)


def _type_hops(types: NDArray[np.int64], classes: DeviceClasses, size: int) -> Matrix:
    """Eq. 3 for each two types; inf for a type of which there cannot be two stages."""
    from polyrhythm.plan.dtfm.matching import all_hops, bottleneck

    every_class = np.arange(len(classes.counts))
    groups = np.array([np.repeat(every_class, counts) for counts in types]).reshape(-1, size)
    hops = all_hops(groups, classes.hop)
    for index, group in enumerate(groups):
        twice = (2 * types[index] <= classes.counts).all()
        within = classes.hop[np.ix_(group, group)]
        hops[index, index] = bottleneck(within)[0] if twice else np.inf
    return hops
