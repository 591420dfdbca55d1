"""Bucket tuner: finds the bucket size during training, by trials of some steps each.

A few fixed trials come first; then a Gaussian process is fitted to the measurements, and the
candidate with the largest expected improvement is tried. Plain all-reduces are candidates, too, so
that tuning does not lose to them; so are hierarchical exchanges. At the end the two best are
measured again, since the best of many noisy figures is in part the luckiest.

There is no clock and no communication here. One worker gets the times of all, of which the slowest
counts, and the others follow its decision: its arithmetic may differ from theirs in the last digit.
Only steps of equal work are compared. Inside an optimizer step gradients must be enabled: the
Gaussian process is fitted with them.

Source: Zhang et al., "DeAR", ICDCS 2023, section IV.B.
Departures: the size is on a log scale, of which 41 points are candidates; sizes that lead to the
same buckets are one candidate; the process is fitted to log times, as noise grows with them;
optuna's expected improvement has no parameter for exploration (the paper sets one to 0.1), which
the first trials make up for; medians, the lower one of an even number, since noise only adds.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median_low
from statistics import mode as most_frequent

from polyrhythm.errors import PolicyError
from polyrhythm.types import Bytes, Seconds

SMALLEST: Bytes = 1_000_000
FIRST: Bytes = 25_000_000  # DDP's, and the paper's first trial
_SECOND: Bytes = 5_000_000  # the paper's fixed buffer, half-way between FIRST and SMALLEST
LARGEST: Bytes = 100_000_000
SIZES = tuple(max(SMALLEST, round(FIRST * 10 ** (i / 20))) for i in range(-28, 13))  # 12 % apart
ALL_SIZES = (FIRST, *SIZES)  # of candidates
_CLOSE = 1.1  # up to this factor, a difference from the best may be noise
NOISE = 0.03  # a smaller difference between all candidates is not worth more trials
_MAX_RESTARTS = 2  # of a search, after a change of work


class BucketMode(StrEnum):
    """How a bucket is averaged; hierarchical means inside of a node first, then across nodes."""

    DECOUPLED = "decoupled"
    ALL_REDUCE = "all_reduce"  # plain: every worker updates all parameters
    HIERARCHICAL = "hierarchical"
    HIERARCHICAL_ALL_REDUCE = "hierarchical_all_reduce"

    @property
    def is_all_reduce(self) -> bool:
        return self in (BucketMode.ALL_REDUCE, BucketMode.HIERARCHICAL_ALL_REDUCE)

    @property
    def is_hierarchical(self) -> bool:
        return self in (BucketMode.HIERARCHICAL, BucketMode.HIERARCHICAL_ALL_REDUCE)


FLAT = (BucketMode.DECOUPLED, BucketMode.ALL_REDUCE)


@dataclass(frozen=True, order=True, slots=True)
class BucketCandidate:
    bucket_bytes: Bytes
    mode: BucketMode = BucketMode.DECOUPLED

    def __str__(self) -> str:
        return f"{self.bucket_bytes / 1e6:.3g} MB, {self.mode}"


class Space:
    """The distinct candidates: one represents all that lead to the same buckets."""

    def __init__(
        self, key: Callable[[BucketCandidate], Hashable], modes: Sequence[BucketMode] = FLAT
    ) -> None:
        """`key` returns the buckets of a candidate; it may be equal for different modes."""
        self.modes = tuple(modes)
        alike: dict[Hashable, list[BucketCandidate]] = {}
        for mode in self.modes:
            for size in ALL_SIZES:
                candidate = BucketCandidate(size, mode)
                alike.setdefault((mode, key(candidate)), []).append(candidate)
        self._alike = {members[0]: members for members in alike.values()}
        self._names = {c: name for name, members in self._alike.items() for c in members}

    def __len__(self) -> int:
        return len(self._alike)

    def name(self, candidate: BucketCandidate) -> BucketCandidate:
        """The representative of a candidate: that of the nearest known size."""
        kin = (c for c in self._names if c.mode is candidate.mode)
        return self._names[min(kin, key=lambda c: _log_distance(c, candidate))]

    def ends(self, name: BucketCandidate) -> list[BucketCandidate]:
        """The smallest and the largest candidate that `name` represents; one if they are equal."""
        return sorted({min(self._alike[name]), max(self._alike[name])})

    def nearest(
        self, wanted: BucketCandidate, tried: Container[BucketCandidate]
    ) -> BucketCandidate:
        """The nearest candidate that was not tried, of the same mode if one is left."""
        left = [name for name in self._alike if name not in tried]
        kin = [name for name in left if name.mode is wanted.mode]
        return min(kin or left, key=lambda n: min(_log_distance(c, wanted) for c in self._alike[n]))


@dataclass(kw_only=True, slots=True)
class Search(ABC):
    """Suggests the next candidate; a function of the observations and the seed."""

    space: Space
    num_trials: int = 8  # 10 with the second measurements of two
    seed: int = 0
    _observed: dict[BucketCandidate, list[Seconds]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.num_trials < 1:
            raise PolicyError(
                f"num_trials={self.num_trials}", expected="1 or more", fix="use 8, the default"
            )

    @property
    def is_over(self) -> bool:
        return len(self._observed) >= min(self.num_trials, len(self.space))

    def is_within(self, noise: float) -> bool:
        """Whether all modes and two sizes were tried, and their times differ by less than this."""
        times = [seconds for _, seconds in self.ranking]
        is_tried = len(times) > len(self.space.modes) or self.is_over
        return is_tried and max(times) <= (1 + noise) * min(times)

    @property
    def ranking(self) -> list[tuple[BucketCandidate, Seconds]]:
        """Observed candidates and their times: those measured twice first, then by time."""
        order = sorted(self._observed, key=lambda c: (-len(self._observed[c]), self._mean(c)))
        return [(candidate, self._mean(candidate)) for candidate in order]

    @property
    def best(self) -> BucketCandidate:
        return self.ranking[0][0]

    def suggest(self) -> BucketCandidate:
        """Suggest a candidate that was not observed yet."""
        if self.is_over:
            raise PolicyError(
                f"a suggestion after {len(self._observed)} trials",
                expected=f"{self.num_trials} trials, or as many as there are candidates",
                fix="check is_over, and use the best",
            )
        return self.space.nearest(self._wanted(), self._observed)

    def observe(self, candidate: BucketCandidate, seconds: Seconds) -> None:
        """Record the step time of a candidate; repeated observations are averaged."""
        if not (seconds > 0 and math.isfinite(seconds)):
            raise PolicyError(
                f"a step of {candidate} took {seconds:g} s",
                expected="a time above 0",
                fix="measure steps with a monotonic clock",
            )
        self._observed.setdefault(self.space.name(candidate), []).append(seconds)

    def _mean(self, candidate: BucketCandidate) -> Seconds:
        return fmean(self._observed[candidate])

    @abstractmethod
    def _wanted(self) -> BucketCandidate:
        """The most promising candidate; if it was tried, its nearest untried one is next."""


@dataclass(kw_only=True, slots=True)
class BayesianSearch(Search):
    def _wanted(self) -> BucketCandidate:
        fixed = [BucketCandidate(FIRST, mode) for mode in self.space.modes]
        for candidate in (*fixed, BucketCandidate(_SECOND, self.space.modes[0])):
            if self.space.name(candidate) not in self._observed:
                return candidate
        # A time holds for all sizes with the same buckets: else known ones would look promising.
        known = {end: math.log(time) for c, time in self.ranking for end in self.space.ends(c)}
        seed = self.seed + len(self._observed)
        return _most_promising(known, self.space.modes, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDecision:
    """The candidate from the next step on, and why."""

    candidate: BucketCandidate  # may be the current one
    is_final: bool
    why: str


class BucketTuner:
    """Takes the time of every step, decides when to change the candidate, and finally settles."""

    def __init__(
        self,
        search: Search,
        *,
        num_discarded: int = 2,
        num_measured: int = 10,
        noise: float | None = None,
    ) -> None:
        """Discard the first steps of each trial: buckets are new, and caches cold.

        With `noise`, stop early if the first trials differ by less than this fraction.
        """
        if num_discarded < 0 or num_measured < 1:
            raise PolicyError(
                f"num_discarded={num_discarded} num_measured={num_measured}",
                expected="0 or more steps to discard and 1 or more to measure",
                fix="use 2 and 10, the defaults",
            )
        self.search = search
        self.num_steps = num_discarded + num_measured  # per decision: times may come all at once
        self.current = search.suggest()
        self.is_over = False
        self._num_discarded, self._noise = num_discarded, noise
        self._seconds: list[Seconds] = []  # of the steps of this trial
        self._finalists: list[BucketCandidate] | None = None  # to be measured again

    def after_step(self, seconds: Seconds) -> BucketDecision | None:
        """Take the step time of the slowest worker; return None to continue as before."""
        if self.is_over:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < self.num_steps:
            return None
        self.search.observe(self.current, median_low(self._seconds[self._num_discarded :]))
        self._seconds.clear()
        decision = self._decide()
        self.current, self.is_over = decision.candidate, decision.is_final
        return decision

    def _decide(self) -> BucketDecision:
        ranking = self.search.ranking
        if self._noise is not None and self.search.is_within(self._noise):
            why = f"all of {len(ranking)} take about {ranking[0][1]:.3g} s"
            return BucketDecision(candidate=ranking[0][0], is_final=True, why=why)
        if not self.search.is_over:
            why = f"trial {len(ranking) + 1} of {self.search.num_trials} at most"
            return BucketDecision(candidate=self.search.suggest(), is_final=False, why=why)
        best, shortest = ranking[0]
        if self._finalists is None:
            close = [c for c, seconds in ranking[:2] if seconds <= shortest * _CLOSE]
            close.sort(key=lambda c: c != self.current)  # the current one needs no new buckets
            self._finalists = close if len(close) > 1 else []
        if self._finalists:
            why = f"again: two of {len(ranking)} take about {shortest:.3g} s"
            return BucketDecision(candidate=self._finalists.pop(0), is_final=False, why=why)
        why = f"the best of {len(ranking)}, with {shortest:.3g} s"
        return BucketDecision(candidate=best, is_final=True, why=why)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of one worker."""

    seconds: Seconds
    work: str = ""  # what the step computed: only steps of equal work are compared


class EqualWorkTuner:
    """Tunes by the steps of several workers, and leaves out those with other work than usual.

    A last, smaller batch takes less time, whatever the buckets. If the usual work itself changes
    (another schedule or batch size), the search starts again, a few times at most.
    """

    def __init__(self, new_tuner: Callable[[], BucketTuner]) -> None:
        self._new_tuner, self._tuner = new_tuner, new_tuner()
        self.num_steps = self._tuner.num_steps
        self._usual: list[str] = []  # the work of a step, by worker
        self._num_restarts = 0

    @property
    def current(self) -> BucketCandidate:
        return self._tuner.current

    def after_steps(self, steps: Sequence[Sequence[TimedStep]]) -> BucketDecision:
        """Take the latest steps of each worker, all with the current candidate."""
        usual = [most_frequent(step.work for step in of_worker) for of_worker in steps]
        if self._usual and usual != self._usual:
            return self._restart(usual)
        self._usual = usual
        for together in zip(*steps, strict=True):
            if [step.work for step in together] == usual:
                decision = self._tuner.after_step(max(step.seconds for step in together))
                if decision is not None:
                    return decision
        why = "too few steps of equal work"
        return BucketDecision(candidate=self.current, is_final=False, why=why)

    def _restart(self, usual: list[str]) -> BucketDecision:
        self._usual, self._num_restarts = usual, self._num_restarts + 1
        if self._num_restarts > _MAX_RESTARTS:
            ranking = self._tuner.search.ranking
            best = ranking[0][0] if ranking else self.current
            why = f"the work of steps has changed {self._num_restarts} times"
            return BucketDecision(candidate=best, is_final=True, why=why)
        self._tuner = self._new_tuner()
        why = "the work of steps has changed: starts again"
        return BucketDecision(candidate=self.current, is_final=False, why=why)


def _log_distance(a: BucketCandidate, b: BucketCandidate) -> float:
    return abs(math.log(a.bucket_bytes / b.bucket_bytes))


def _most_promising(
    known: Mapping[BucketCandidate, float], modes: Sequence[BucketMode], *, seed: int
) -> BucketCandidate:
    """The candidate with the largest expected improvement, by a new study of `known` alone."""
    import optuna  # here, since it takes seconds, and only one worker needs it

    scale = {
        "size": optuna.distributions.FloatDistribution(SMALLEST, LARGEST, log=True),
        "kind": optuna.distributions.CategoricalDistribution([str(mode) for mode in modes]),
    }
    verbosity = optuna.logging.get_verbosity()  # restored for a user's own studies
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        # The sampler's default is ten random trials first; a study's default is TPE.
        sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=1)
        study = optuna.create_study(sampler=sampler)
        for candidate, value in known.items():
            params = {"size": candidate.bucket_bytes, "kind": str(candidate.mode)}
            study.add_trial(optuna.create_trial(params=params, distributions=scale, value=value))
        suggested = study.ask(scale).params
    finally:
        optuna.logging.set_verbosity(verbosity)
    return BucketCandidate(round(suggested["size"]), BucketMode(suggested["kind"]))
