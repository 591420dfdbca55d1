"""Which way of keeping together pays, found while training goes on: what `sync="auto"` means.

Training starts decoupled: everybody averages with everybody, hidden behind computing. That is as
slow as the slowest pipeline of each step. If one is slow for good, `balanced` gives it fewer
micro-batches, and nothing else changes. If it is another one each time, only groups help
(`adaptive`, `age`), at the price of models that differ for a while. What the other ways would take
is foreseen from what pipelines took in the last steps (`foreseen.py`). The way in use is measured,
so that a move which does not pay is noticed and undone, and not tried again for a while.

Nothing here has a clock or knows other workers. One worker is told the times of all pipelines, at
steps that all agree on, and the others do what it says, as with `fusion/tuner.py`.

Source: none. The price of groups is that of Luo et al., "Prague", ASPLOS 2020, section 7.3.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from polyrhythm.errors import PolicyError
from polyrhythm.sync.foreseen import (
    BALANCED,
    DECOUPLED,
    GROUPS,
    WAYS,
    Estimate,
    Shape,
    Times,
    Took,
    Wire,
    average_of,
    balanced,
    calm,
    decoupled,
    in_groups,
    joined,
    noise,
    rows,
    with_late_links,
)
from polyrhythm.types import Seconds

# What a way must gain over simpler ones, as a share of the step, to be moved to. To stay there it
# must gain anything at all: in between nothing changes, so that noise does not flap.
WORTH = 0.05  # as the dealer of `balanced` asks
WORTH_OVER_BALANCED = 0.1  # who is slow for good would be behind in every group
# Steps of groups teach less: a Transformer's were 4 times as fast, and the same loss was there 3.9
# times as soon.
EFFICIENCY = 3.9 / 4
SURE = 2.0  # standard errors
NUM_WINDOWS = 4  # looked at together, if the newest says too little
SOON = 2  # windows: a move that is undone within them did not pay
LONGEST_BAN = 64  # windows; it doubles each time that a way did not pay


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How to keep together from the next step on, and why."""

    way: str
    moves: bool
    why: str
    predicted: Mapping[str, Seconds]  # a step, by way; the one in use as it was measured


class Auto:
    """Told of every window of steps, it says when to move to which way."""

    def __init__(self, shape: Shape, *, num_steps: int = 20, num_discarded: int = 2) -> None:
        """`num_steps` global ones are a window; the first ones after a move are not counted."""
        if not 0 <= num_discarded <= num_steps - 2:
            raise PolicyError(
                f"num_steps={num_steps} num_discarded={num_discarded}",
                expected="0 or more steps to discard, and two or more that are left",
                fix="use 20 and 2, the defaults",
            )
        self.shape, self.num_steps = shape, num_steps
        self.way = DECOUPLED
        self._num_discarded, self._is_new = num_discarded, True
        self._windows: deque[Mapping[str, Estimate]] = deque(maxlen=NUM_WINDOWS)  # since a move
        self._newest: list[list[Took]] = []
        self._wire, self._hidden = Wire(), 0.0
        self._num_windows = 0
        self._before, self._moved_at = DECOUPLED, -math.inf
        self._num_failures = dict.fromkeys(WAYS, 0)
        self._banned_until = dict.fromkeys(WAYS, 0)

    def after_window(self, times: Times) -> Decision:
        """What all pipelines took since the last time comes in."""
        self._check(times)
        self._num_windows += 1
        newest = self._counted(times)
        if self.shape.num_pipelines == 1:
            return self._stays("one pipeline waits for nobody")
        if [] in newest:
            return self._stays(f"pipeline {newest.index([])} has yet to end a step")
        self._is_new = False
        self._newest = newest
        self._learn_links(newest)
        estimates = self._estimates(newest)
        self._windows.append(estimates)
        way = self._best(estimates)
        if WAYS.index(way) > WAYS.index(self.way):
            way = self._surely()
        found = {name: one.seconds for name, one in estimates.items()}
        if way == self.way:
            return self._stays(_why_not(way, found), found)
        here = f"a step takes {found[self.way]:.3g} s {self.way}, and {found[way]:.3g} s {way}"
        why = f"{_seen(self.shape, newest)}; {here}"
        left = self.way
        if self._move(way):
            why += f"; {left} did not pay, and is not tried again for a while"
        return Decision(way=way, moves=True, why=why, predicted=found)

    def _stays(self, why: str, found: Mapping[str, Seconds] | None = None) -> Decision:
        return Decision(way=self.way, moves=False, why=why, predicted=found or {})

    def _surely(self) -> str:
        """A way that is worth it beyond the noise of the newest window, or with some before it."""
        some = list[Mapping[str, Estimate]]()
        for window in reversed(self._windows):
            if window.keys() != self._windows[-1].keys():
                break
            some.append(window)
            together = {name: joined([one[name] for one in some]) for name in window}
            way = self._best(together, sure=SURE)
            if WAYS.index(way) > WAYS.index(self.way):
                return way
        return self.way

    def _best(self, estimates: Mapping[str, Estimate], sure: float = 0.0) -> str:
        """From the simplest way on, each that is worth it takes the place of those before."""
        best, *others = estimates
        for way in others:
            before, after = estimates[best], estimates[way]
            gained = min(_worth(best, before) - _worth(way, after), before.waiting)
            needed = 0.0
            if way != self.way:
                worth = WORTH_OVER_BALANCED if best == BALANCED else WORTH
                needed = worth * before.seconds + (sure * noise(before, after) if sure else 0.0)
            if gained > needed:
                best = way
        return best

    def _estimates(self, times: Times) -> dict[str, Estimate]:
        """Of all ways that may pay now, the simplest first."""
        shape, units = self.shape, self.shape.units(times)
        ways = [way for way in WAYS if way == self.way or self._is_allowed(way)]
        found = dict[str, Estimate]()
        if DECOUPLED in ways:
            average = self._wire.of_all(shape.num_pipelines)
            found[DECOUPLED] = decoupled(shape, units, max(0.0, average - self._hidden))
        if BALANCED in ways:
            dealt = balanced(shape, units, self._wire)
            if self.way == BALANCED or dealt.seconds < math.inf:
                found[BALANCED] = dealt
        if self.way in found:
            found[self.way] = self._measured_in_lockstep(times, found[self.way])
        if found and all(one.waiting < WORTH * one.seconds for one in found.values()):
            ways = [way for way in ways if way == self.way]  # groups have little to gain
        late = with_late_links(shape, times, self._wire, lockstep=self.way not in GROUPS)
        groups = {way: in_groups(shape, way, late, self._wire) for way in GROUPS if way in ways}
        if self.way in groups:
            rates = (_microbatches(one) / _lasted(one) for one in times)
            seconds = sum(shape.shares) / sum(rates)
            # What else is slow here would be slow in other groups, too.
            factor = seconds / groups[self.way].seconds
            groups = {way: one.times(factor) for way, one in groups.items()}
        return found | groups

    def _is_allowed(self, way: str) -> bool:
        return way in self.shape.ways and self._num_windows >= self._banned_until[way]

    def _measured_in_lockstep(self, times: Times, replayed: Estimate) -> Estimate:
        steps = list(zip(*times, strict=True))
        lasted = [fmean(took.compute + took.waited for took in step) for step in steps]
        waiting = replayed.waiting
        if self.way == DECOUPLED:
            exposed = [min(took.waited for took in step) for step in steps]
            waiting += fmean(exposed) - calm(exposed)  # for slow links, now and then
        return Estimate.of(lasted, waiting)

    def _learn_links(self, times: Times) -> None:
        number = self.shape.num_pipelines
        if self.way in GROUPS:
            some = [took for one in times for took in one if took.num_members > 1]
            if some:
                usual = Wire(
                    calm([took.averaging / Wire(1.0).cost(took.num_members) for took in some])
                )
                self._wire = Wire(usual.calm, sum(map(usual.late, some)) * number / len(some))
            return
        steps = list(zip(*times, strict=True))
        averages = [average_of(step) for step in steps]
        if self.way == DECOUPLED:
            self._hidden = fmean(averages) - fmean(min(t.waited for t in step) for step in steps)
        usually = calm(averages)
        self._wire = Wire(usually / Wire(1.0).cost(number), fmean(averages) - usually)

    def _counted(self, times: Times) -> list[list[Took]]:
        """Without the first steps after a move; of one without any, what it took before."""
        found = [list(one[-NUM_WINDOWS * self.num_steps :]) for one in times]
        if self._is_new:
            found = [one[min(self._num_discarded, max(len(one) - 1, 0)) :] for one in found]
        if self._newest:
            found = [one or before for one, before in zip(found, self._newest, strict=True)]
        return found

    def _move(self, way: str) -> bool:
        """Whether that undoes a move which did not pay, and is not tried again for some time."""
        now = self._num_windows
        is_undone = way == self._before and now - self._moved_at <= SOON
        for left in GROUPS if self.way in GROUPS else (self.way,):
            self._num_failures[left] = self._num_failures[left] + 1 if is_undone else 0
            if is_undone:
                ban = min(2 ** self._num_failures[left], LONGEST_BAN)
                self._banned_until[left] = now + SOON + ban
        self._before, self._moved_at = self.way, now
        self.way, self._is_new = way, True
        self._windows.clear()
        return is_undone

    def _check(self, times: Times) -> None:
        counts = [len(one) for one in times]
        is_uneven = self.way not in GROUPS and len(set(counts)) > 1
        if len(counts) != self.shape.num_pipelines or is_uneven:
            raise PolicyError(
                f"times of {counts} steps under {self.way}",
                expected=f"of {self.shape.num_pipelines} pipelines, in lockstep equally many each",
                fix="share them at a step that all agree on",
            )
        for pipeline, one in enumerate(times):
            for took in one:
                is_time = all(0 <= t < math.inf for t in took[:3]) and took.compute > 0
                if not is_time or min(took.num_microbatches, took.num_members) < 1:
                    raise PolicyError(
                        f"pipeline {pipeline}: {took}",
                        expected="seconds of 0 or more, with some computing, and counts above 0",
                        fix="measure with a clock that does not go back, steps with work only",
                    )


def _worth(way: str, estimate: Estimate) -> Seconds:
    """Of a step that teaches as much as one of all together."""
    return estimate.seconds / (EFFICIENCY if way in GROUPS else 1.0)


def _seen(shape: Shape, times: Times) -> str:
    """What is the matter with pipelines, in words."""
    units = shape.units(times)
    side_by_side, means = rows(units), [fmean(one) for one in units]
    lost = fmean((max(row) - fmean(row)) / max(row) for row in side_by_side)
    if lost < WORTH:
        return f"pipelines are about equally fast: waiting for the last one costs {lost:.0%}"
    slowest = max(range(len(means)), key=means.__getitem__)
    is_last = fmean(row[slowest] == max(row) for row in side_by_side)
    waiting = f"waiting for the last pipeline of each step costs {lost:.0%}"
    if is_last <= 0.5:
        return f"{waiting}, and it is not always the same"
    slower = means[slowest] / median(means)
    return f"{waiting}, mostly for pipeline {slowest}, which takes {slower:.3g} times as long"


def _why_not(way: str, found: Mapping[str, Seconds]) -> str:
    here = f"a step takes {found[way]:.3g} s"
    others = {other: seconds for other, seconds in found.items() if other != way}
    if not others:
        return f"{here}, and nothing else may pay now"
    best = min(others, key=others.__getitem__)
    return f"{here}, and {others[best]:.3g} s {best}, which is not worth a move"


def _microbatches(steps: Sequence[Took]) -> int:
    return sum(took.num_microbatches for took in steps)


def _lasted(steps: Sequence[Took]) -> Seconds:
    return sum(took.compute + took.waited for took in steps)
