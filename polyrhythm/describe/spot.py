"""Spot instances: when somebody's machines came and went, as a scenario for another cluster.

A recording has nodes with names, each of which came and went, or only how many there were. Either
way it is a number of places that nodes take and leave, and a device of the cluster stands in each:
it is killed when the node in its place is taken, and joins when another one comes. Recorded nodes
seldom come back themselves; their successors do, and for a job that is the same.

What is not recorded is decided evenly, so that a cluster smaller than the recording sees its share:
where only numbers are known, those leave first that have been there longest, and a node that comes
takes the place that has been empty longest.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from polyrhythm.describe.bundled import bundled, locate
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.read import read
from polyrhythm.describe.scenario import Join, Kill, Scenario
from polyrhythm.describe.units import check_amount, show
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Seconds

_FOLDER = "spot_traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotTrace:
    """Either `nodes`, or `times` and `counts`."""

    name: str
    source: str = ""  # who recorded this, and what was changed since
    licence: str = ""
    duration: Seconds | None = None  # of the recording; None: until the last that happened
    nodes: tuple[tuple[Seconds, ...], ...] = ()  # [node] = when it came, went, came again, ...
    times: tuple[Seconds, ...] = ()  # from when on there were ...
    counts: tuple[int, ...] = ()  # ... so many

    def __post_init__(self) -> None:
        if bool(self.nodes) == bool(self.times) or len(self.times) != len(self.counts):
            raise DescriptionError(
                f"spot trace {self.name!r} has {len(self.nodes)} nodes, {len(self.times)} times "
                f"and {len(self.counts)} counts",
                expected="nodes, or times and as many counts",
                fix="give when each node came and went, or else how many there were and when",
            )
        for place, times in enumerate(self.nodes):
            _check_times(f"nodes[{place}]", times)
        if self.times:
            _check_times("times", self.times)
            if self.times[0] != 0:
                raise DescriptionError(
                    f"times[0] is {show(self.times[0], Seconds)}",
                    expected="0: how many there were at the beginning",
                    fix="subtract the first time from all of them",
                )
        for place, count in enumerate(self.counts):
            check_amount(f"counts[{place}]", count)
        if self.duration is not None and self.duration < self._last:
            raise DescriptionError(
                f"duration is {show(self.duration, Seconds)}, and something happened at "
                f"{show(self._last, Seconds)}",
                expected="a recording that lasts until the last that happened, at least",
                fix="correct duration, or leave it out",
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
        """[place] = when it was taken, left, taken again, ..."""
        intervals = [
            interval for times in self.nodes or self._node_times() for interval in _intervals(times)
        ]
        places: list[list[Seconds]] = []
        empty: deque[int] = deque()  # the longest first
        taken: dict[int, int] = {}  # life -> place
        # At one moment who comes is first: a device cannot be killed and join at the same time.
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
        """As many nodes as are counted; those leave that have been there longest."""
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
    """Kill and join the devices of a cluster as the nodes of a recording came and went.

    The whole recording is squeezed or stretched into `duration`, if one is given; after its end
    everybody stays as they are. The first place is the first device's, and so on: devices beyond
    the places are never taken.
    """
    trace = source if isinstance(source, SpotTrace) else SpotTrace.load(source)
    if duration is not None:
        check_amount("duration", duration, Seconds, zero=False)
    pace = 1.0 if duration is None or trace.length == 0 else duration / trace.length
    kills, joins = [], []
    for device, times in zip(cluster.devices, trace.places, strict=False):
        for turn, time in enumerate(times):
            if turn % 2:
                kills.append(Kill(device=device.name, at=time * pace))
            elif time > 0:  # else it is there from the start
                joins.append(Join(device=device.name, at=time * pace))
    return Scenario(
        name=trace.name,
        kill=tuple(sorted(kills, key=lambda event: event.at)),
        join=tuple(sorted(joins, key=lambda event: event.at)),
    )


def bundled_spot_traces() -> tuple[str, ...]:
    """The names of the recordings of spot instances that come with Polyrhythm."""
    return bundled(_FOLDER)


def _intervals(
    times: tuple[Seconds, ...] | list[Seconds],
) -> Iterator[tuple[Seconds, Seconds | None]]:
    """From when to when a node was there; None for one that stayed."""
    for turn in range(0, len(times), 2):
        yield times[turn], times[turn + 1] if turn + 1 < len(times) else None


def _check_times(name: str, times: tuple[Seconds, ...]) -> None:
    if not times:
        raise DescriptionError(
            f"{name} is empty", expected="the time at which it came", fix="remove the empty list"
        )
    for turn, time in enumerate(times):
        check_amount(f"{name}[{turn}]", time, Seconds)
    for first, second in pairwise(times):
        if first >= second:
            raise DescriptionError(
                f"{name}: {show(first, Seconds)}, then {show(second, Seconds)}",
                expected="each time after the one before",
                fix="sort them, and give one that came and went at once no place",
            )
