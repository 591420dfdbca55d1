"""Spot instances: recorded arrivals and preemptions of machines as a scenario for another cluster.

A recording has the times of each node, or only the number of nodes over time. Both are converted to
slots that nodes occupy and leave (`places`). A device of the cluster stands for each slot: it is
killed when the node in its slot is preempted, and joins when another node occupies the slot.
Recorded nodes seldom return; their successors do, which is the same for a job.

Unrecorded choices are spread evenly, so that a cluster smaller than the recording sees its share of
events: if only counts are known, the oldest nodes leave first, and a new node takes the slot that
has been empty longest.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

from polyrhythm.describe.bundled_files import bundled, locate
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.read import read
from polyrhythm.describe.scenario import Join, Kill, Scenario
from polyrhythm.describe.units import check_amount, show
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Seconds

_FOLDER = "spot_traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotTrace:
    """A recording: either `nodes`, or `times` and `counts`."""

    name: str
    source: str = ""  # who recorded this, and what was changed since
    licence: str = ""
    duration: Seconds | None = None  # of the recording; None: until its last event
    nodes: tuple[tuple[Seconds, ...], ...] = ()  # [node] = times of arrival, loss, arrival, ...
    times: tuple[Seconds, ...] = ()  # times at which the count changed
    counts: tuple[int, ...] = ()  # number of nodes from each of `times` on

    def __post_init__(self) -> None:
        if bool(self.nodes) == bool(self.times) or len(self.times) != len(self.counts):
            raise DescriptionError(
                f"spot trace {self.name!r} has {len(self.nodes)} nodes, {len(self.times)} times "
                f"and {len(self.counts)} counts",
                expected="nodes, or times and as many counts",
                fix="give each node's times, or the counts and their times",
            )
        for place, times in enumerate(self.nodes):
            _check_times(f"nodes[{place}]", times)
        if self.times:
            _check_times("times", self.times)
            if self.times[0] != 0:
                raise DescriptionError(
                    f"times[0] is {show(self.times[0], Seconds)}",
                    expected="0: the count at the beginning",
                    fix="subtract the first time from all of them",
                )
        for place, count in enumerate(self.counts):
            check_amount(f"counts[{place}]", count)
        if self.duration is not None and self.duration < self._last:
            raise DescriptionError(
                f"duration is {show(self.duration, Seconds)}, and something happened at "
                f"{show(self._last, Seconds)}",
                expected="a duration that includes the last event",
                fix="correct duration, or omit it",
            )

    @classmethod
    def load(cls, source: str | Path) -> "SpotTrace":
        """Read a .toml or .json file, or one of `bundled_spot_traces()` by its name."""
        with locate("spot trace", source, _FOLDER) as path:
            return read(path, cls)

    @property
    def length(self) -> Seconds:
        return self._last if self.duration is None else self.duration

    @property
    def places(self) -> tuple[tuple[Seconds, ...], ...]:
        """[slot] = times at which it was occupied, left, occupied again, ..."""
        intervals = [  # start and end of each presence of a node; no end if it stayed
            interval
            for times in self.nodes or self._node_times()
            for interval in zip_longest(times[::2], times[1::2])
        ]
        places: list[list[Seconds]] = []
        empty: deque[int] = deque()  # longest empty first
        taken: dict[int, int] = {}  # lifetime -> slot
        # Of simultaneous events, arrivals first: a device cannot be killed and join at one time.
        coming = [(start, False, interval) for interval, (start, _) in enumerate(intervals)]
        going = [
            (end, True, interval) for interval, (_, end) in enumerate(intervals) if end is not None
        ]
        for time, is_going, interval in sorted([*coming, *going]):
            if is_going:
                place = taken.pop(interval)
                empty.append(place)
            elif empty:
                place = taken[interval] = empty.popleft()
            else:
                place = taken[interval] = len(places)
                places.append([])
            places[place].append(time)
        return tuple(map(tuple, places))

    @property
    def _last(self) -> Seconds:
        return max((*self.times, *(times[-1] for times in self.nodes)))

    def _node_times(self) -> list[list[Seconds]]:
        """Return nodes that match the counts; the oldest nodes leave first."""
        nodes: list[list[Seconds]] = []
        there: deque[list[Seconds]] = deque()
        for time, count in zip(self.times, self.counts, strict=True):
            while len(there) > count:
                there.popleft().append(time)
            while len(there) < count:
                there.append([time])
                nodes.append(there[-1])
        return nodes


def spot_scenario(
    source: str | Path | SpotTrace, cluster: Cluster, *, duration: Seconds | None = None
) -> Scenario:
    """Return a scenario that kills and joins devices as the recorded nodes came and went.

    The whole recording is scaled to `duration`, if given; after its end nothing changes. The n-th
    device has the n-th slot; devices beyond the slots are never killed.
    """
    trace = source if isinstance(source, SpotTrace) else SpotTrace.load(source)
    check_amount("duration", duration, Seconds, zero=False)
    pace = 1.0 if duration is None or trace.length == 0 else duration / trace.length
    kills, joins = [], []
    for device, times in zip(cluster.devices, trace.places, strict=False):
        for index, time in enumerate(times):
            if index % 2:
                kills.append(Kill(device=device.name, at=time * pace))
            elif time > 0:  # at time 0 it is present from the start
                joins.append(Join(device=device.name, at=time * pace))
    return Scenario(
        name=trace.name,
        kill=tuple(sorted(kills, key=lambda event: event.at)),
        join=tuple(sorted(joins, key=lambda event: event.at)),
    )


def bundled_spot_traces() -> tuple[str, ...]:
    """Return the names of the bundled recordings of spot instances."""
    return bundled(_FOLDER)


def _check_times(name: str, times: tuple[Seconds, ...]) -> None:
    if not times:
        raise DescriptionError(
            f"{name} is empty", expected="the time at which it came", fix="remove the empty list"
        )
    for index, time in enumerate(times):
        check_amount(f"{name}[{index}]", time, Seconds)
    for first, second in pairwise(times):
        if first >= second:
            raise DescriptionError(
                f"{name}: {show(first, Seconds)}, then {show(second, Seconds)}",
                expected="each time after the one before",
                fix="sort them, and remove a node that came and went at the same time",
            )
