"""Slowness: how long one device is held back before an action, as a scenario's `slow` entries say.

A real worker sleeps for the delay and a simulator adds it to its clock: both ask this object, once
for each action. What holds at the start of an action holds for all of it; delays of entries that
overlap add up, so factors 2 and 3 together take 1 + 1 + 2 = 4 times as long.
"""

import math
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from polyrhythm.describe.scenario import Scenario, Slow
from polyrhythm.describe.trace import Trace
from polyrhythm.describe.units import show
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Seconds

_NO_TRACES: Mapping[str, Trace] = MappingProxyType({})


def load_traces(scenario: Scenario) -> dict[str, Trace]:
    """Every trace that the scenario plays, by the name it is given there."""
    names = dict.fromkeys(slow.trace for slow in scenario.slow if slow.trace is not None)
    return {name: Trace.load(name) for name in names}


@dataclass(slots=True)
class _Playback:
    """A worker's series in a trace, with its length on the scenario's clock."""

    trace: Trace
    worker: int
    start: Seconds
    duration: Seconds
    has_ended: bool = False

    def slowdown(self, now: Seconds, luck: float) -> float:
        part = (now - self.start) / self.duration
        if part >= 1 and not self.has_ended:
            self.has_ended = True
            warnings.warn(
                f"the trace {self.trace.name!r} has ended after {show(self.duration, Seconds)}: "
                "held at its last value",
                stacklevel=4,  # whoever asked for the delay
            )
        return self.trace.slowdown(self.worker, part, luck)


@dataclass(slots=True)
class _Entry:
    """One `slow` entry as it befalls one device."""

    slow: Slow
    chance: random.Random
    playback: _Playback | None

    def delay(self, now: Seconds, work: Seconds, forward_and_backward: Seconds) -> Seconds:
        slow = self.slow
        # Drawn for every action, in the entry's time or not: then the k-th action has the k-th
        # draw, and a start that falls between two other actions moves nobody's luck.
        luck = self.chance.random()
        if not slow.start <= now < (math.inf if slow.until is None else slow.until):
            return 0.0
        if slow.factor is not None:
            return (slow.factor - 1) * work
        if self.playback is not None:
            return (self.playback.slowdown(now, luck) - 1) * work
        assert slow.probability is not None, "Slow has exactly one way"
        assert slow.sleep_factor is not None, "Slow refuses half a random sleep"
        return slow.sleep_factor * forward_and_backward if luck < slow.probability else 0.0


@dataclass(slots=True)
class Slowness:
    """What holds one device back. It has a state: the next draw of each entry."""

    _entries: tuple[_Entry, ...] = ()

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        device: str,
        *,
        index: int | None = None,
        traces: Mapping[str, Trace] = _NO_TRACES,
    ) -> "Slowness":
        """The slowness of `device`, the `index`-th of its cluster; `traces`: see `load_traces`.

        Only an entry with a trace needs them, the index unless it has a `trace_worker`.
        """
        entries = []
        for i, slow in enumerate(scenario.slow):
            if slow.applies_to(device):
                # Random hashes a text by itself, unlike `hash`: the same draws in every process.
                chance = random.Random(f"{scenario.seed}/{i}/{device}")
                try:
                    entries.append(_Entry(slow, chance, _playback(slow, index, traces)))
                except DescriptionError as error:
                    raise error.at(f"slow[{i}]") from None
        return cls(tuple(entries))

    def delay(self, now: Seconds, work: Seconds, forward_and_backward: Seconds) -> Seconds:
        """How long to hold back an action that starts at `now` and takes `work` at full speed.

        Call it once for each action, in order: each call draws anew.
        """
        total = 0.0
        for entry in self._entries:
            total += entry.delay(now, work, forward_and_backward)
        return total


def _playback(slow: Slow, index: int | None, traces: Mapping[str, Trace]) -> _Playback | None:
    if slow.trace is None:
        return None
    return _Playback(*find_playback(slow, index, traces))


def find_playback(
    slow: Slow, index: int | None, traces: Mapping[str, Trace]
) -> tuple[Trace, int, Seconds, Seconds]:
    """The trace of an entry that has one, whose series, from when on, and for how long."""
    assert slow.trace is not None, "it has one"
    if slow.trace not in traces:
        raise DescriptionError(
            f"the trace {slow.trace!r} is not at hand",
            expected="every trace of the scenario",
            fix="pass traces=load_traces(scenario)",
        )
    trace = traces[slow.trace]
    duration = trace.duration if slow.trace_duration is None else slow.trace_duration
    if duration is None:
        raise DescriptionError(
            f"nobody knows how long the trace {slow.trace!r} was",
            expected="a time for the whole recording",
            fix='add trace_duration = "10min", or how long the run will be',
        )
    return trace, _worker(slow, index, trace), slow.start, duration


def _worker(slow: Slow, index: int | None, trace: Trace) -> int:
    """Whose series is played: as the entry says, else by the device's place in its cluster."""
    num_workers = len(trace.workers)
    if slow.trace_worker is None:
        if index is None:
            raise DescriptionError(
                f"no worker of the trace {slow.trace!r} is chosen",
                expected="trace_worker, or the device's place in its cluster",
                fix="pass index, or add trace_worker = 0",
            )
        return index % num_workers  # a larger cluster plays some series more than once
    if slow.trace_worker >= num_workers:
        raise DescriptionError(
            f"trace_worker is {slow.trace_worker}",
            expected=f"0 to {num_workers - 1}: the trace {slow.trace!r} has {num_workers} workers",
            fix="correct it, or leave it out to deal the workers to the devices in order",
        )
    return slow.trace_worker
