"""Slowness: the delay of one device before each action, from a scenario's `slow` entries.

A real worker sleeps for the delay and a simulator adds it to its clock; both call `delay` once per
action. The state at the start of an action holds for all of it; delays of overlapping entries add
up, so factors 2 and 3 together take 1 + 1 + 2 = 4 times as long.
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
    """Load all traces of the scenario, by the names that it uses."""
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
                stacklevel=4,  # the caller of Slowness.delay
            )
        return self.trace.slowdown(self.worker, part, luck)


@dataclass(slots=True)
class _Entry:
    """One `slow` entry applied to one device."""

    slow: Slow
    chance: random.Random
    playback: _Playback | None

    def delay(self, now: Seconds, work: Seconds, forward_and_backward: Seconds) -> Seconds:
        slow = self.slow
        # Drawn for every action, also outside the entry's time: then the k-th action has the k-th
        # draw, and a slightly different start changes no other draws.
        luck = self.chance.random()
        if not slow.start <= now < (math.inf if slow.until is None else slow.until):
            return 0.0
        if slow.factor is not None:
            return (slow.factor - 1) * work
        if self.playback is not None:
            return (self.playback.slowdown(now, luck) - 1) * work
        assert slow.probability is not None, "Slow has exactly one way"
        assert slow.sleep_factor is not None, "Slow refuses one of the two alone"
        return slow.sleep_factor * forward_and_backward if luck < slow.probability else 0.0


@dataclass(slots=True)
class Slowness:
    """The slowness of one device; stateful: each entry has a random generator."""

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
        """Return the slowness of `device`, the `index`-th of its cluster; `traces`: `load_traces`.

        Only entries with a trace need `traces`, and those without `trace_worker` the index.
        """
        entries = []
        for i, slow in enumerate(scenario.slow):
            if slow.applies_to(device):
                # Random's own hash of a string is equal in all processes, unlike `hash`.
                chance = random.Random(f"{scenario.seed}/{i}/{device}")
                playback = None
                if slow.trace is not None:
                    try:
                        playback = _Playback(*find_playback(slow, index, traces))
                    except DescriptionError as error:
                        raise error.at(f"slow[{i}]") from None
                entries.append(_Entry(slow, chance, playback))
        return cls(tuple(entries))

    def delay(self, now: Seconds, work: Seconds, forward_and_backward: Seconds) -> Seconds:
        """Return the delay of an action that starts at `now` and takes `work` at full speed.

        Call it once for each action, in order: each call advances the random draws.
        """
        total = 0.0
        for entry in self._entries:
            total += entry.delay(now, work, forward_and_backward)
        return total


def find_playback(
    slow: Slow, index: int | None, traces: Mapping[str, Trace]
) -> tuple[Trace, int, Seconds, Seconds]:
    """Return an entry's trace, the worker whose series is played, its start and duration."""
    assert slow.trace is not None, "it has one"
    if slow.trace not in traces:
        raise DescriptionError(
            f"the trace {slow.trace!r} is not loaded",
            expected="every trace of the scenario",
            fix="pass traces=load_traces(scenario)",
        )
    trace = traces[slow.trace]
    duration = trace.duration if slow.trace_duration is None else slow.trace_duration
    if duration is None:
        raise DescriptionError(
            f"the length of the trace {slow.trace!r} is unknown",
            expected="a time for the whole recording",
            fix='add trace_duration = "10min", or how long the run will be',
        )
    return trace, _worker(slow, index, trace), slow.start, duration


def _worker(slow: Slow, index: int | None, trace: Trace) -> int:
    """Return the worker whose series is played: the entry's, or by the device's index."""
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
            fix="correct it, or omit it to assign workers to devices in order",
        )
    return slow.trace_worker
