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
from polyrhythm.sync.replay import (
    BALANCED,
    DECOUPLED,
    GROUPS,
    SYNC_MODES,
    Estimate,
    JobShape,
    LinkCost,
    StepTiming,
    StepTimings,
    align_steps,
    average_time,
    balanced,
    combine,
    decoupled,
    in_groups,
    lower_quartile,
    standard_error,
    with_slow_links,
)
from polyrhythm.types import Seconds

# What a way must gain over simpler ones, as a share of the step, to be moved to. To stay there it
# must gain anything at all: in between nothing changes, so that noise does not flap.
MIN_GAIN = 0.05  # as the dealer of `balanced` asks
MIN_GAIN_OVER_BALANCED = 0.1  # who is slow for good would be behind in every group
# Steps of groups teach less: a Transformer's were 4 times as fast, and the same loss was there 3.9
# times as soon.
EFFICIENCY = 3.9 / 4
NUM_STANDARD_ERRORS = 2.0  # standard errors
NUM_WINDOWS = 4  # looked at together, if the newest says too little
UNDO_WINDOWS = 2  # windows: a move that is undone within them did not pay
MAX_BAN_WINDOWS = 64  # windows; it doubles each time that a way did not pay


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchDecision:
    """How to keep together from the next step on, and why."""

    sync_mode: str
    switches: bool
    why: str
    predicted: Mapping[str, Seconds]  # a step, by way; the one in use as it was measured


class AutoSwitch:
    """Told of every window of steps, it says when to move to which way."""

    def __init__(self, shape: JobShape, *, num_steps: int = 20, num_discarded: int = 2) -> None:
        """`num_steps` global ones are a window; the first ones after a move are not counted."""
        if not 0 <= num_discarded <= num_steps - 2:
            raise PolicyError(
                f"num_steps={num_steps} num_discarded={num_discarded}",
                expected="0 or more steps to discard, and two or more that are left",
                fix="use 20 and 2, the defaults",
            )
        self.shape, self.num_steps = shape, num_steps
        self.sync_mode = DECOUPLED
        self._num_discarded, self._is_new = num_discarded, True
        self._windows: deque[Mapping[str, Estimate]] = deque(maxlen=NUM_WINDOWS)  # since a move
        self._newest: list[list[StepTiming]] = []
        self._link_cost, self._hidden = LinkCost(), 0.0
        self._num_windows = 0
        self._before, self._switched_at = DECOUPLED, -math.inf
        self._num_failures = dict.fromkeys(SYNC_MODES, 0)
        self._banned_until = dict.fromkeys(SYNC_MODES, 0)

    def after_window(self, times: StepTimings) -> SwitchDecision:
        """What all pipelines took since the last time comes in."""
        self._check(times)
        self._num_windows += 1
        newest = self._counted(times)
        if self.shape.num_pipelines == 1:
            return self._stay("one pipeline waits for nobody")
        if [] in newest:
            return self._stay(f"pipeline {newest.index([])} has yet to end a step")
        self._is_new = False
        self._newest = newest
        self._learn_links(newest)
        estimates = self._estimates(newest)
        self._windows.append(estimates)
        sync_mode = self._best(estimates)
        if SYNC_MODES.index(sync_mode) > SYNC_MODES.index(self.sync_mode):
            sync_mode = self._significant_best()
        found = {name: one.seconds for name, one in estimates.items()}
        if sync_mode == self.sync_mode:
            return self._stay(_why_stay(sync_mode, found), found)
        here = f"a step takes {found[self.sync_mode]:.3g} s {self.sync_mode}, and {found[sync_mode]:.3g} s {sync_mode}"
        why = f"{_describe_slowness(self.shape, newest)}; {here}"
        left = self.sync_mode
        if self._switch(sync_mode):
            why += f"; {left} did not pay, and is not tried again for a while"
        return SwitchDecision(sync_mode=sync_mode, switches=True, why=why, predicted=found)

    def _stay(self, why: str, found: Mapping[str, Seconds] | None = None) -> SwitchDecision:
        return SwitchDecision(
            sync_mode=self.sync_mode, switches=False, why=why, predicted=found or {}
        )

    def _significant_best(self) -> str:
        """A way that is worth it beyond the noise of the newest window, or with some before it."""
        some = list[Mapping[str, Estimate]]()
        for window in reversed(self._windows):
            if window.keys() != self._windows[-1].keys():
                break
            some.append(window)
            together = {name: combine([one[name] for one in some]) for name in window}
            sync_mode = self._best(together, sure=NUM_STANDARD_ERRORS)
            if SYNC_MODES.index(sync_mode) > SYNC_MODES.index(self.sync_mode):
                return sync_mode
        return self.sync_mode

    def _best(self, estimates: Mapping[str, Estimate], sure: float = 0.0) -> str:
        """From the simplest way on, each that is worth it takes the place of those before."""
        best, *others = estimates
        for sync_mode in others:
            before, after = estimates[best], estimates[sync_mode]
            gained = min(
                _effective_seconds(best, before) - _effective_seconds(sync_mode, after),
                before.waiting,
            )
            needed = 0.0
            if sync_mode != self.sync_mode:
                worth = MIN_GAIN_OVER_BALANCED if best == BALANCED else MIN_GAIN
                needed = worth * before.seconds + (
                    sure * standard_error(before, after) if sure else 0.0
                )
            if gained > needed:
                best = sync_mode
        return best

    def _estimates(self, times: StepTimings) -> dict[str, Estimate]:
        """Of all ways that may pay now, the simplest first."""
        shape, units = self.shape, self.shape.units(times)
        sync_modes = [
            sync_mode
            for sync_mode in SYNC_MODES
            if sync_mode == self.sync_mode or self._is_allowed(sync_mode)
        ]
        found = dict[str, Estimate]()
        if DECOUPLED in sync_modes:
            average = self._link_cost.of_all(shape.num_pipelines)
            found[DECOUPLED] = decoupled(shape, units, max(0.0, average - self._hidden))
        if BALANCED in sync_modes:
            dealt = balanced(shape, units, self._link_cost)
            if self.sync_mode == BALANCED or dealt.seconds < math.inf:
                found[BALANCED] = dealt
        if self.sync_mode in found:
            found[self.sync_mode] = self._measured_in_lockstep(times, found[self.sync_mode])
        if found and all(one.waiting < MIN_GAIN * one.seconds for one in found.values()):
            sync_modes = [
                sync_mode for sync_mode in sync_modes if sync_mode == self.sync_mode
            ]  # groups have little to gain
        late = with_slow_links(shape, times, self._link_cost, lockstep=self.sync_mode not in GROUPS)
        groups = {
            sync_mode: in_groups(shape, sync_mode, late, self._link_cost)
            for sync_mode in GROUPS
            if sync_mode in sync_modes
        }
        if self.sync_mode in groups:
            rates = (_microbatches(one) / _lasted(one) for one in times)
            seconds = sum(shape.shares) / sum(rates)
            # What else is slow here would be slow in other groups, too.
            factor = seconds / groups[self.sync_mode].seconds
            groups = {sync_mode: one.scaled(factor) for sync_mode, one in groups.items()}
        return found | groups

    def _is_allowed(self, sync_mode: str) -> bool:
        return (
            sync_mode in self.shape.sync_modes
            and self._num_windows >= self._banned_until[sync_mode]
        )

    def _measured_in_lockstep(self, times: StepTimings, replayed: Estimate) -> Estimate:
        steps = list(zip(*times, strict=True))
        lasted = [fmean(took.compute + took.waited for took in step) for step in steps]
        waiting = replayed.waiting
        if self.sync_mode == DECOUPLED:
            exposed = [min(took.waited for took in step) for step in steps]
            waiting += fmean(exposed) - lower_quartile(exposed)  # for slow links, now and then
        return Estimate.of(lasted, waiting)

    def _learn_links(self, times: StepTimings) -> None:
        number = self.shape.num_pipelines
        if self.sync_mode in GROUPS:
            some = [took for one in times for took in one if took.num_members > 1]
            if some:
                usual = LinkCost(
                    lower_quartile(
                        [took.averaging / LinkCost(1.0).cost(took.num_members) for took in some]
                    )
                )
                self._link_cost = LinkCost(
                    usual.base, sum(map(usual.excess_per_member, some)) * number / len(some)
                )
            return
        steps = list(zip(*times, strict=True))
        averages = [average_time(step) for step in steps]
        if self.sync_mode == DECOUPLED:
            self._hidden = fmean(averages) - fmean(min(t.waited for t in step) for step in steps)
        usually = lower_quartile(averages)
        self._link_cost = LinkCost(usually / LinkCost(1.0).cost(number), fmean(averages) - usually)

    def _counted(self, times: StepTimings) -> list[list[StepTiming]]:
        """Without the first steps after a move; of one without any, what it took before."""
        found = [list(one[-NUM_WINDOWS * self.num_steps :]) for one in times]
        if self._is_new:
            found = [one[min(self._num_discarded, max(len(one) - 1, 0)) :] for one in found]
        if self._newest:
            found = [one or before for one, before in zip(found, self._newest, strict=True)]
        return found

    def _switch(self, sync_mode: str) -> bool:
        """Whether that undoes a move which did not pay, and is not tried again for some time."""
        now = self._num_windows
        is_undone = sync_mode == self._before and now - self._switched_at <= UNDO_WINDOWS
        for left in GROUPS if self.sync_mode in GROUPS else (self.sync_mode,):
            self._num_failures[left] = self._num_failures[left] + 1 if is_undone else 0
            if is_undone:
                ban = min(2 ** self._num_failures[left], MAX_BAN_WINDOWS)
                self._banned_until[left] = now + UNDO_WINDOWS + ban
        self._before, self._switched_at = self.sync_mode, now
        self.sync_mode, self._is_new = sync_mode, True
        self._windows.clear()
        return is_undone

    def _check(self, times: StepTimings) -> None:
        counts = [len(one) for one in times]
        is_uneven = self.sync_mode not in GROUPS and len(set(counts)) > 1
        if len(counts) != self.shape.num_pipelines or is_uneven:
            raise PolicyError(
                f"times of {counts} steps under {self.sync_mode}",
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


def _effective_seconds(sync_mode: str, estimate: Estimate) -> Seconds:
    """Of a step that teaches as much as one of all together."""
    return estimate.seconds / (EFFICIENCY if sync_mode in GROUPS else 1.0)


def _describe_slowness(shape: JobShape, times: StepTimings) -> str:
    """What is the matter with pipelines, in words."""
    units = shape.units(times)
    side_by_side, means = align_steps(units), [fmean(one) for one in units]
    lost = fmean((max(row) - fmean(row)) / max(row) for row in side_by_side)
    if lost < MIN_GAIN:
        return f"pipelines are about equally fast: waiting for the last one costs {lost:.0%}"
    slowest = max(range(len(means)), key=means.__getitem__)
    is_last = fmean(row[slowest] == max(row) for row in side_by_side)
    waiting = f"waiting for the last pipeline of each step costs {lost:.0%}"
    if is_last <= 0.5:
        return f"{waiting}, and it is not always the same"
    slower = means[slowest] / median(means)
    return f"{waiting}, mostly for pipeline {slowest}, which takes {slower:.3g} times as long"


def _why_stay(sync_mode: str, found: Mapping[str, Seconds]) -> str:
    here = f"a step takes {found[sync_mode]:.3g} s"
    others = {other: seconds for other, seconds in found.items() if other != sync_mode}
    if not others:
        return f"{here}, and nothing else may pay now"
    best = min(others, key=others.__getitem__)
    return f"{here}, and {others[best]:.3g} s {best}, which is not worth a move"


def _microbatches(steps: Sequence[StepTiming]) -> int:
    return sum(took.num_microbatches for took in steps)


def _lasted(steps: Sequence[StepTiming]) -> Seconds:
    return sum(took.compute + took.waited for took in steps)
