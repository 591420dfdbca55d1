"""Automatic choice of the sync mode during training: `sync="auto"`.

Training starts in `decoupled`: all pipelines average in every step, hidden behind compute. That is
as slow as the slowest pipeline of each step. If one pipeline is always slow, `balanced` gives it
fewer micro-batches, and nothing else changes. If the straggler changes from step to step, only
groups help (`adaptive`, `age`), at the price of models that differ for a while. The step time in
the other modes is estimated by replaying the last measured steps (`replay.py`). The mode in use is
measured, so that a switch which does not pay is undone, and not tried again for a while.

A switch away from `decoupled` needs a large gain in several windows, one after the other, and
several machines: processes that share cores slow each other, and would do so in every mode.

There is no clock and no communication here. One worker gets the times of all pipelines, at steps
that all agree on, and the others follow its decision, as with `fusion/tuner.py`.

Source: none. The price of groups is that of Luo et al., "Prague", ASPLOS 2020, section 7.3.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from polyrhythm.errors import PolicyError
from polyrhythm.sync.modes import AUTO_MODES, SYNC_MODES, SyncMode
from polyrhythm.sync.replay import (
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
    with_slow_links,
)
from polyrhythm.types import Seconds

# Gain over simpler modes, as a fraction of the step, that a switch needs in each of NUM_WINDOWS
# windows: time is weighed here, not the loss, which a step in groups may reduce less. To stay, any
# gain above 0 is enough: this hysteresis keeps noise from switching back and forth.
MIN_GAIN = 0.25
NUM_WINDOWS = 3
MIN_SLOWNESS = 0.05  # below this fraction of a step, pipelines are called equally fast
# Steps in groups reduce the loss less: a Transformer's were 4 times as fast, and reached the same
# loss 3.9 times as soon.
EFFICIENCY = 3.9 / 4
UNDO_WINDOWS = 2  # a switch that is undone within these windows did not pay
MAX_BAN_WINDOWS = 64  # the ban doubles each time that a mode did not pay, up to this


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchDecision:
    """The sync mode from the next step on, and why."""

    sync_mode: str
    switches: bool
    why: str
    predicted: Mapping[str, Seconds]  # step time by mode; measured for the mode in use


class AutoSwitch:
    """Decides after every window of steps which sync mode to use."""

    def __init__(self, shape: JobShape, *, num_steps: int = 20, num_discarded: int = 2) -> None:
        """A window has `num_steps` global steps; discard the first ones after a switch."""
        if not 0 <= num_discarded <= num_steps - 2:
            raise PolicyError(
                f"num_steps={num_steps} num_discarded={num_discarded}",
                expected="0 or more steps to discard, and two or more others",
                fix="use 20 and 2, the defaults",
            )
        self.shape, self.num_steps = shape, num_steps
        self.sync_mode = AUTO_MODES[0]
        self._num_discarded, self._is_new = num_discarded, True
        self._windows: deque[Mapping[str, Estimate]] = deque(maxlen=NUM_WINDOWS)  # since a switch
        self._newest: list[list[StepTiming]] = []
        self._link_cost, self._hidden = LinkCost(), 0.0
        self._num_windows = 0
        self._before, self._switched_at = self.sync_mode, -math.inf
        self._num_failures = dict.fromkeys(AUTO_MODES, 0)
        self._banned_until = dict.fromkeys(AUTO_MODES, 0)

    @property
    def _mode(self) -> SyncMode:
        """The mode in use."""
        return SYNC_MODES[self.sync_mode]

    def after_window(self, times: StepTimings) -> SwitchDecision:
        """Decide from the step timings of all pipelines since the last call."""
        self._check(times)
        self._num_windows += 1
        newest = self._counted(times)
        if self.shape.num_pipelines == 1:
            return self._stay("a single pipeline waits for no other")
        if self.shape.is_one_machine:
            return self._stay("all pipelines are on one machine, and slow each other in any mode")
        if [] in newest:
            return self._stay(f"pipeline {newest.index([])} has not ended a step yet")
        self._is_new = False
        self._newest = newest
        self._learn_links(newest)
        estimates = self._estimates(newest)
        self._windows.append(estimates)
        sync_mode = self._best(estimates)
        if AUTO_MODES.index(sync_mode) > AUTO_MODES.index(self.sync_mode):
            sync_mode = self._lasting_best()
        seconds = {name: estimate.seconds for name, estimate in estimates.items()}
        if sync_mode == self.sync_mode:
            return self._stay(_why_stay(sync_mode, seconds), seconds)
        previous = self.sync_mode
        why = (
            f"{_describe_slowness(self.shape, newest)}; "
            f"a step takes {seconds[previous]:.3g} s {previous}, "
            f"and {seconds[sync_mode]:.3g} s {sync_mode}"
        )
        if self._switch(sync_mode):
            why += f"; {previous} did not pay, and is not tried again for a while"
        return SwitchDecision(sync_mode=sync_mode, switches=True, why=why, predicted=seconds)

    def keep(self, pipelines: Sequence[int]) -> None:
        """Forget all other pipelines, which are lost; these are numbered anew from 0."""
        self.shape = self.shape.among(pipelines)
        self._windows.clear()  # estimates for all of them
        if self._newest:
            self._newest = [self._newest[pipeline] for pipeline in pipelines]

    def _stay(self, why: str, predicted: Mapping[str, Seconds] | None = None) -> SwitchDecision:
        return SwitchDecision(
            sync_mode=self.sync_mode, switches=False, why=why, predicted=predicted or {}
        )

    def _lasting_best(self) -> str:
        """The best of the modes that have gained enough in each of the last windows."""
        if len(self._windows) < NUM_WINDOWS:
            return self.sync_mode
        lasting = {
            name: combine([window[name] for window in self._windows])
            for name in self._windows[-1]
            if name == self.sync_mode
            or all(name in window and self._gains(window, name) for window in self._windows)
        }
        return self._best(lasting)

    def _gains(self, estimates: Mapping[str, Estimate], sync_mode: str) -> bool:
        """Whether a mode gains enough over the mode in use."""
        current = {name: estimates[name] for name in (self.sync_mode, sync_mode)}
        return self._best(current) == sync_mode

    def _best(self, estimates: Mapping[str, Estimate]) -> str:
        """Start with the simplest mode; each further mode that gains enough replaces it."""
        best, *others = estimates
        for sync_mode in others:
            before, after = estimates[best], estimates[sync_mode]
            gain = min(
                _effective_seconds(best, before) - _effective_seconds(sync_mode, after),
                before.waiting,
            )
            needed = 0.0 if sync_mode == self.sync_mode else MIN_GAIN * before.seconds
            if gain > needed:
                best = sync_mode
        return best

    def _estimates(self, times: StepTimings) -> dict[str, Estimate]:
        """Estimates of all modes that may pay now, the simplest first."""
        shape, units = self.shape, self.shape.units(times)
        modes = [
            SYNC_MODES[sync_mode]
            for sync_mode in AUTO_MODES
            if sync_mode == self.sync_mode
            or (
                sync_mode in shape.sync_modes and self._num_windows >= self._banned_until[sync_mode]
            )
        ]
        lockstep = dict[str, Estimate]()
        for mode in modes:
            if mode.decoupled:
                average = self._link_cost.global_cost(shape.num_pipelines)
                lockstep[mode.name] = decoupled(shape, units, max(0.0, average - self._hidden))
            elif mode.balances_microbatches:
                estimate = balanced(shape, units, self._link_cost)
                if mode is self._mode or estimate.seconds < math.inf:
                    lockstep[mode.name] = estimate
        if self.sync_mode in lockstep:
            lockstep[self.sync_mode] = self._measured_in_lockstep(times, lockstep[self.sync_mode])
        if lockstep and all(e.waiting < MIN_SLOWNESS * e.seconds for e in lockstep.values()):
            modes = [mode for mode in modes if mode is self._mode]  # groups have little to gain
        slowed = with_slow_links(shape, times, self._link_cost, lockstep=self._mode.lockstep)
        groups = {
            mode.name: in_groups(shape, mode.name, slowed, self._link_cost)
            for mode in modes
            if not mode.lockstep
        }
        if self.sync_mode in groups:
            rates = (
                sum(t.num_microbatches for t in steps) / sum(t.compute + t.waited for t in steps)
                for steps in times
            )
            seconds = sum(shape.shares) / sum(rates)
            # Time that the replay does not explain would be spent in other groups, too.
            factor = seconds / groups[self.sync_mode].seconds
            groups = {sync_mode: e.scaled(factor) for sync_mode, e in groups.items()}
        return lockstep | groups

    def _measured_in_lockstep(self, times: StepTimings, replayed: Estimate) -> Estimate:
        steps = list(zip(*times, strict=True))
        durations = [fmean(timing.compute + timing.waited for timing in step) for step in steps]
        waiting = replayed.waiting
        if self._mode.decoupled:
            exposed = [min(timing.waited for timing in step) for step in steps]
            waiting += fmean(exposed) - lower_quartile(exposed)  # for links that are slow at times
        return Estimate.from_durations(durations, waiting)

    def _learn_links(self, times: StepTimings) -> None:
        num_pipelines = self.shape.num_pipelines
        if not self._mode.lockstep:
            averages = [timing for steps in times for timing in steps if timing.num_members > 1]
            if averages:
                costs = [t.averaging / LinkCost(1.0).cost(t.num_members) for t in averages]
                usual = LinkCost(lower_quartile(costs))
                excess = sum(map(usual.excess_per_member, averages))
                self._link_cost = LinkCost(usual.base, excess * num_pipelines / len(averages))
            return
        steps = list(zip(*times, strict=True))
        seconds = [average_time(step) for step in steps]
        if self._mode.decoupled:
            self._hidden = fmean(seconds) - fmean(min(t.waited for t in step) for step in steps)
        usually = lower_quartile(seconds)
        base = usually / LinkCost(1.0).cost(num_pipelines)
        self._link_cost = LinkCost(base, fmean(seconds) - usually)

    def _counted(self, times: StepTimings) -> list[list[StepTiming]]:
        """Drop the first steps after a switch; reuse the last window of an idle pipeline."""
        counted = [list(steps[-NUM_WINDOWS * self.num_steps :]) for steps in times]
        if self._is_new:
            discarded = self._num_discarded
            counted = [steps[min(discarded, max(len(steps) - 1, 0)) :] for steps in counted]
        if self._newest:
            counted = [steps or last for steps, last in zip(counted, self._newest, strict=True)]
        return counted

    def _switch(self, sync_mode: str) -> bool:
        """Switch; return whether that undoes a switch which did not pay, and ban its mode."""
        now = self._num_windows
        is_undone = sync_mode == self._before and now - self._switched_at <= UNDO_WINDOWS
        in_groups = [name for name in AUTO_MODES if not SYNC_MODES[name].lockstep]
        for mode in (self.sync_mode,) if self._mode.lockstep else in_groups:
            self._num_failures[mode] = self._num_failures[mode] + 1 if is_undone else 0
            if is_undone:
                ban = min(2 ** self._num_failures[mode], MAX_BAN_WINDOWS)
                self._banned_until[mode] = now + UNDO_WINDOWS + ban
        self._before, self._switched_at = self.sync_mode, now
        self.sync_mode, self._is_new = sync_mode, True
        self._windows.clear()
        return is_undone

    def _check(self, times: StepTimings) -> None:
        counts = [len(steps) for steps in times]
        is_uneven = self._mode.lockstep and len(set(counts)) > 1
        if len(counts) != self.shape.num_pipelines or is_uneven:
            raise PolicyError(
                f"timings of {counts} steps in mode {self.sync_mode}",
                expected=f"{self.shape.num_pipelines} pipelines, with equal counts in lockstep",
                fix="exchange them at a step that all agree on",
            )
        for pipeline, steps in enumerate(times):
            for timing in steps:
                is_time = all(0 <= t < math.inf for t in timing[:3]) and timing.compute > 0
                if not is_time or min(timing.num_microbatches, timing.num_members) < 1:
                    raise PolicyError(
                        f"pipeline {pipeline}: {timing}",
                        expected="seconds of 0 or more, with compute and counts above 0",
                        fix="measure with a monotonic clock, and only steps with work",
                    )


def _effective_seconds(sync_mode: str, estimate: Estimate) -> Seconds:
    """Step time, scaled to equal progress: a step in groups reduces the loss less."""
    return estimate.seconds / (1.0 if SYNC_MODES[sync_mode].lockstep else EFFICIENCY)


def _describe_slowness(shape: JobShape, times: StepTimings) -> str:
    """Describe how pipelines wait for stragglers."""
    units = shape.units(times)
    rows, means = align_steps(units), [fmean(steps) for steps in units]
    lost = fmean((max(row) - fmean(row)) / max(row) for row in rows)
    if lost < MIN_SLOWNESS:
        return f"pipelines are about equally fast: waiting for the last one costs {lost:.0%}"
    slowest = max(range(len(means)), key=means.__getitem__)
    fraction_last = fmean(row[slowest] == max(row) for row in rows)
    waiting = f"waiting for the last pipeline of each step costs {lost:.0%}"
    if fraction_last <= 0.5:
        return f"{waiting}, and it is not always the same"
    slower = means[slowest] / median(means)
    return f"{waiting}, mostly for pipeline {slowest}, which takes {slower:.3g} times as long"


def _why_stay(sync_mode: str, seconds: Mapping[str, Seconds]) -> str:
    current = f"a step takes {seconds[sync_mode]:.3g} s"
    others = {other: value for other, value in seconds.items() if other != sync_mode}
    if not others:
        return f"{current}, and no other mode may pay now"
    best = min(others, key=others.__getitem__)
    return f"{current}, and {others[best]:.3g} s {best}, which is not worth a switch"
