"""Choose the schedule while the job runs: predict every candidate, switch only if it pays off.

`decide` maps measured times to the candidate to run next. The tuner starts with 1F1B, without
knowledge of the network. Among the candidates whose predicted step is within a tolerance of the
shortest, it prefers the one with the least memory. It switches when the current one is clearly
slower; merely to save memory, only after two such decisions in a row.

Every rank runs its own tuner on the same numbers and reaches the same decision.

Source: Yang et al., "Ada-Grouper", arXiv:2303.01675, sections 4.2, 4.3 and 5.4. Departures: times
come from real steps, so nothing is suspended to profile; hysteresis; a larger micro-batch is not
taken to be better. The paper keeps, for each k, the largest size that fits; but fewer micro-batches
fill and drain the pipeline worse, so here every size is predicted (`largest_only` is the paper's).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from polyrhythm.cost.memory import MemoryBudget
from polyrhythm.cost.pipeline import PipelineTimes, length
from polyrhythm.errors import ScheduleError
from polyrhythm.schedule import reasons
from polyrhythm.schedule.candidates import ScheduleCandidate, shortlist, spec_for_limits
from polyrhythm.schedule.limits import one_f_one_b_limits
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Seconds

_CHANGED = 0.2  # of a mean transfer time
_MATTERS = 0.02  # of the slowest stage's work: changes of faster links are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDecision:
    """The candidate to run from the next step on, and the reason."""

    candidate: ScheduleCandidate
    predicted: Seconds  # step time of the chosen candidate
    current_predicted: Seconds  # step time of the candidate in use until now
    switched: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    candidate: ScheduleCandidate
    predicted: Seconds
    memory: int  # bytes of all stages; samples in flight if bytes are unknown

    @property
    def weight(self) -> tuple[int, Seconds, str]:
        return self.memory, self.predicted, str(self.candidate)


@dataclass(slots=True)
class Freshness:
    """Choose the micro-batch size to measure next: each once, and again when the network changed.

    Times of one size do not predict another, so a size is a candidate only after a step with it.
    Such a step costs time. It is repeated for a size only if its times are old and the size in use,
    which is measured continuously, shows that transfers have changed since.
    """

    stale_after: int  # decisions
    _decisions: int = field(default=0, init=False)
    _seen: dict[int, PipelineTimes] = field(default_factory=dict, init=False)
    _seen_at: dict[int, int] = field(default_factory=dict, init=False)
    # By size: the mean transfers of every size when this one was measured.
    _then: dict[int, dict[int, tuple[Seconds, ...]]] = field(default_factory=dict, init=False)

    def record(self, times: Mapping[int, PipelineTimes]) -> None:
        """Record the times of a decision; those that differ from the last were measured again."""
        self._decisions += 1
        transfers = {size: measured.transfers for size, measured in times.items()}
        for size, measured in times.items():
            if self._seen.get(size) != measured:
                self._seen[size] = measured
                self._seen_at[size] = self._decisions
                self._then[size] = dict(transfers)
        for then in self._then.values():  # a size measured later is compared from now on
            for size, transfer in transfers.items():
                then.setdefault(size, transfer)

    def wanted(
        self, sizes: Sequence[int], times: Mapping[int, PipelineTimes], in_use: int
    ) -> int | None:
        """Return the first of `sizes` without times, or with old times that are likely wrong."""
        for size in sizes:
            if size not in times:
                return size
        return next((size for size in sizes if size != in_use and self._is_old(size, in_use)), None)

    def _is_old(self, size: int, in_use: int) -> bool:
        if in_use not in self._seen or size not in self._seen:
            return False
        if self._decisions - self._seen_at[size] <= self.stale_after:
            return False
        measured = self._seen[in_use]
        pairs = zip(self._then[size][in_use], measured.transfers, strict=True)
        return any(
            abs(now - then) > _CHANGED * then and max(now, then) > _MATTERS * measured.period
            for then, now in pairs
        )


@dataclass(slots=True, kw_only=True)
class ScheduleTuner:
    num_stages: int
    batch_size: int  # samples of one pipeline per step
    microbatch_sizes: tuple[int, ...]  # each divides the batch; the first is used at the start
    budget: MemoryBudget | None = None  # may be replaced as more is known; None for no limit
    tolerance: float = 0.02  # this much longer than the shortest is as good
    gain: float = 0.03  # this much longer than the best is worth a switch
    stale_after: int = 20  # decisions after which a size may be measured again
    largest_only: bool = False
    current: ScheduleCandidate = field(init=False)
    # Preferred by the last decision.
    _lighter: ScheduleCandidate | None = field(default=None, init=False)
    _freshness: Freshness = field(init=False)

    def __post_init__(self) -> None:
        _check_sizes(self.microbatch_sizes, self.batch_size)
        self._freshness = Freshness(self.stale_after)
        trials = [self.trial(size) for size in self._fitting_sizes()]
        plain = [trial for trial in trials if trial.spec == ScheduleSpec("1f1b")]
        self.current = (plain or trials)[0]

    def trial(self, microbatch_size: int) -> ScheduleCandidate:
        """Return the candidate that measures a size: 1F1B, or its limits as far as they fit."""
        room = accumulate(self._max_in_flight(microbatch_size), min)
        limits = tuple(map(min, one_f_one_b_limits(self.num_stages), room))
        return self._candidate(
            spec_for_limits(limits, self.batch_size // microbatch_size), microbatch_size
        )

    def size_to_measure(self, times: Mapping[int, PipelineTimes]) -> int | None:
        """Return the micro-batch size to measure in the next step, if any."""
        return self._freshness.wanted(self._fitting_sizes(), times, self.current.microbatch_size)

    def decide(self, times: Mapping[int, PipelineTimes]) -> ScheduleDecision:
        """Return the next candidate, from the times of all micro-batch sizes measured so far.

        Sizes without times are not candidates. Raises PlanError if no size fits the budget.
        """
        if self.current.microbatch_size not in times:
            raise ScheduleError(
                f"no times of micro-batches of {self.current.microbatch_size}, which are in use",
                expected="the times of at least one step",
                fix="decide after the first step",
            )
        self._freshness.record(times)
        until_now = self._predicted(self.current, times)
        pool = self._pool(times)
        enough = min(scored.predicted for scored in pool) * (1 + self.tolerance)
        good = [scored for scored in pool if scored.predicted <= enough]
        best = min(good, key=lambda scored: scored.weight)
        if not self._fits(self.current):
            assert self.budget is not None, "without a budget everything fits"
            return self._switch(best, until_now, reasons.too_large(self.current, self.budget))
        if until_now > best.predicted * (1 + self.gain):
            measured = times[best.candidate.microbatch_size]
            why = reasons.faster(best.candidate, self.current, best.predicted, until_now, measured)
            return self._switch(best, until_now, why)
        if (saving := self._saving(best, good)) is not None:
            why = reasons.lighter(saving.candidate, self.current, saving.predicted, until_now)
            return self._switch(saving, until_now, why)
        return ScheduleDecision(
            candidate=self.current,
            predicted=until_now,
            current_predicted=until_now,
            switched=False,
            why=reasons.staying(best.candidate, self.current, best.predicted, until_now),
        )

    def _saving(self, best: _Scored, good: list[_Scored]) -> _Scored | None:
        """Return a good candidate with less memory, if the last decision also preferred it."""
        memory = self._memory(self.current)
        again = [s for s in good if s.candidate == self._lighter and s.memory < memory]
        if again:
            return again[0]
        self._lighter = best.candidate if best.memory < memory else None
        return None

    def _switch(self, to: _Scored, until_now: Seconds, reason: str) -> ScheduleDecision:
        self.current, self._lighter = to.candidate, None
        return ScheduleDecision(
            candidate=to.candidate,
            predicted=to.predicted,
            current_predicted=until_now,
            switched=True,
            why=reason,
        )

    def _pool(self, times: Mapping[int, PipelineTimes]) -> list[_Scored]:
        """Return all candidates; never empty."""
        kept = [c for c in (self.current, self._lighter) if c is not None and self._fits(c)]
        kept_scored = [self._scored(c, self._predicted(c, times)) for c in kept]
        # If no size that fits was measured yet: start again, without a prediction.
        return [*self._listed(times), *kept_scored] or [
            self._scored(self.trial(self._fitting_sizes()[0]), math.inf)
        ]

    def _listed(self, times: Mapping[int, PipelineTimes]) -> Iterator[_Scored]:
        """Return the candidates of all sizes that fit and were measured."""
        sizes = [size for size in self._fitting_sizes() if size in times]
        for size in sizes:
            specs = shortlist(
                times[size],
                num_microbatches=self.batch_size // size,
                max_in_flight=self._max_in_flight(size),
                tolerance=self.tolerance,
            )
            larger = [s for s in sizes if s > size] if self.largest_only else []
            for spec, predicted in specs.items():
                if not any(self._fits(self._candidate(spec, s)) for s in larger):
                    yield self._scored(self._candidate(spec, size), predicted)

    def _candidate(self, spec: ScheduleSpec, microbatch_size: int) -> ScheduleCandidate:
        return ScheduleCandidate.of(
            spec,
            num_stages=self.num_stages,
            microbatch_size=microbatch_size,
            num_microbatches=self.batch_size // microbatch_size,
        )

    def _scored(self, candidate: ScheduleCandidate, predicted: Seconds) -> _Scored:
        return _Scored(candidate=candidate, predicted=predicted, memory=self._memory(candidate))

    def _memory(self, candidate: ScheduleCandidate) -> int:
        if self.budget is None:
            return candidate.microbatch_size * sum(candidate.in_flight)
        return sum(self.budget.needed(candidate.microbatch_size, candidate.in_flight))

    def _predicted(
        self, candidate: ScheduleCandidate, times: Mapping[int, PipelineTimes]
    ) -> Seconds:
        measured = times.get(candidate.microbatch_size)
        return math.inf if measured is None else length(candidate.build(), measured)

    def _max_in_flight(self, microbatch_size: int) -> tuple[int, ...]:
        num_microbatches = self.batch_size // microbatch_size
        if self.budget is None:
            return (num_microbatches,) * self.num_stages
        return self.budget.max_in_flight(microbatch_size, num_microbatches)

    def _fits(self, candidate: ScheduleCandidate) -> bool:
        max_in_flight = self._max_in_flight(candidate.microbatch_size)
        return all(
            held <= room for held, room in zip(candidate.in_flight, max_in_flight, strict=True)
        )

    def _fitting_sizes(self) -> list[int]:
        """Return the sizes of which every stage holds at least one micro-batch; raise if none."""
        sizes = [size for size in self.microbatch_sizes if min(self._max_in_flight(size)) > 0]
        if not sizes:
            assert self.budget is not None, "without a budget everything fits"
            raise reasons.nothing_fits(self.budget, min(self.microbatch_sizes))
        return sizes


def _check_sizes(sizes: tuple[int, ...], batch_size: int) -> None:
    written = ", ".join(map(str, sizes))
    if not sizes or min(sizes) < 1 or len(set(sizes)) != len(sizes):
        raise ScheduleError(
            f"micro-batch sizes {written or 'none'}",
            expected="one or more sizes, each 1 or more and named once",
            fix="start with the size that would be used without a tuner",
        )
    for size in sizes:
        if batch_size < 1 or batch_size % size:
            raise ScheduleError(
                f"micro-batches of {size} for a batch of {batch_size}",
                expected="a size that divides the batch",
                fix=f"leave {size} out, or change the batch",
            )
