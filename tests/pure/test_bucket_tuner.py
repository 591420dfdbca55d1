"""The bucket tuner, on simulated steps."""

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.fusion import tuner
from polyrhythm.sync.fusion.layers import LayerTimes, by_bytes
from polyrhythm.sync.fusion.tuner import (
    FIRST,
    FLAT,
    BayesianSearch,
    BucketCandidate,
    BucketDecision,
    BucketMode,
    BucketTuner,
    EqualWorkTuner,
    Space,
    TimedStep,
)
from reproduction.dear.ring import Ring
from reproduction.dear.search import GridSearch, RandomSearch
from reproduction.dear.timeline import dear, wfbp

Model = list[tuple[float, float]]  # by layer: bytes, and share of the compute


def bottlenecks() -> Iterator[tuple[float, float]]:
    """As ResNet-50: later layers are larger, and all layers compute equally long."""
    before = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for _ in range(depth):
            for weights in (before * width, 9 * width * width, width * 4 * width):
                yield 4.0 * weights, weights / width**2
            before = 4 * width


def blocks(hidden: int, depth: int) -> Model:
    """As BERT: an embedding without compute, then equal blocks."""
    sizes = [4.0 * n * hidden * hidden for n in (1, 1, 1, 1, 4, 4)] * depth
    return [(4 * 30522.0 * hidden, 0.0), *((size, size) for size in sizes)]


MODELS: dict[str, Model] = {
    "bottlenecks": list(bottlenecks()),
    "base": blocks(768, 12),
    "large": blocks(1024, 24),
    "small": blocks(384, 6),
    "many": [(4 * 98e3, 1.0)] * 200,  # as DenseNet-201
    "even": [(4 * 2.0**20, 1.0)] * 10,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A step of a model whose all-gather, without latency, takes `gather` forwards."""

    model: str
    latency: float
    gather: float = 2.0
    ratio: float = 2.0  # of backward and forward
    num_workers: int = 4

    def key(self, candidate: BucketCandidate) -> tuple[range, ...]:
        return by_bytes([size for size, _ in MODELS[self.model]], candidate.bucket_bytes)

    def seconds(self, candidate: BucketCandidate) -> float:
        sizes, works = zip(*MODELS[self.model], strict=True)
        ring = Ring(latency=self.latency, bandwidth=1e8)
        forward = (1 - 1 / self.num_workers) * sum(sizes) / ring.bandwidth / self.gather
        units = [forward * work / sum(works) for work in works]
        layers = [
            LayerTimes(size=size, forward=unit, backward=self.ratio * unit)
            for size, unit in zip(sizes, units, strict=True)
        ]
        timeline = wfbp if candidate.mode.is_all_reduce else dear
        return timeline(layers, self.key(candidate), ring, self.num_workers).seconds

    def best(self, modes: tuple[BucketMode, ...] = FLAT) -> float:
        """Shortest step on a grid that is four times as fine as the tuner's."""
        sizes = [int(1e6 * 100 ** (i / 160)) for i in range(161)]
        return min(self.seconds(BucketCandidate(size, mode)) for size in sizes for mode in modes)

    def tuned(self, seed: int = 0) -> tuple[BucketTuner, list[BucketDecision]]:
        rng = random.Random(seed)
        trials = BucketTuner(BayesianSearch(space=Space(self.key), seed=seed))
        return trials, run_tuner(trials, lambda c: self.seconds(c) * math.exp(rng.gauss(0, 0.03)))


def run_tuner(
    trials: BucketTuner, seconds: Callable[[BucketCandidate], float]
) -> list[BucketDecision]:
    """Run steps until the tuner settles; return its decisions."""
    decisions: list[BucketDecision] = []
    while not trials.is_over:
        decision = trials.after_step(seconds(trials.current))
        decisions += [decision] if decision else []
    return decisions


def any_job(seed: int) -> Job:
    rng = random.Random(seed)
    return Job(
        model=list(MODELS)[seed % len(MODELS)],
        latency=10 ** rng.uniform(-4.3, -1.7),  # 0.05 to 20 ms
        gather=10 ** rng.uniform(-0.3, 0.7),
        ratio=rng.choice([2.0, 3.0]),
        num_workers=rng.choice([2, 4, 8]),
    )


@pytest.fixture(scope="module")
def runs() -> list[tuple[Job, list[BucketDecision]]]:
    return [(any_job(seed), any_job(seed).tuned(seed)[1]) for seed in range(24)]


@pytest.mark.long
def test_tuner_settles_close_to_the_best_of_a_fine_grid_within_10_trials(
    runs: list[tuple[Job, list[BucketDecision]]],
) -> None:
    assert all(len(decisions) <= 10 for _, decisions in runs)
    ratios = [job.seconds(decisions[-1].candidate) / job.best() for job, decisions in runs]
    assert sum(ratio <= 1.05 for ratio in ratios) >= len(ratios) - 1  # noise may mislead it once
    assert max(ratios) <= 1.1
    first = [job.seconds(BucketCandidate(FIRST)) / job.best() for job, _ in runs]
    assert fmean(ratios) - 1 < (fmean(first) - 1) / 4  # staying with the first is much worse


@pytest.mark.long
def test_random_and_grid_search_need_more_trials(
    runs: list[tuple[Job, list[BucketDecision]]],
) -> None:
    bayesian = fmean(
        trials_needed(
            job, [BucketCandidate(FIRST), *(decision.candidate for decision in decisions)]
        )
        for job, decisions in runs
    )
    for mode in (RandomSearch, GridSearch):
        num_trials = fmean(
            trials_needed(job, searched(mode(space=Space(job.key), num_trials=40, seed=seed)))
            for seed, (job, _) in enumerate(runs)
        )
        assert num_trials > 1.5 * bayesian


def searched(search: tuner.Search) -> Iterator[BucketCandidate]:
    while not search.is_over:
        yield (candidate := search.suggest())
        search.observe(candidate, 1.0)


def trials_needed(job: Job, tried: Iterable[BucketCandidate]) -> int:
    enough = 1.05 * job.best()
    good = (number for number, c in enumerate(tried, 1) if job.seconds(c) <= enough)
    return next(good, 41)


@pytest.mark.long
@pytest.mark.parametrize("latency", [0.0, 0.0005])
def test_a_plain_all_reduce_is_chosen_where_decoupling_loses(latency: float) -> None:
    long = Job(model="many", latency=latency, gather=1.5, ratio=3.0)
    assert long.best((BucketMode.ALL_REDUCE,)) < long.best((BucketMode.DECOUPLED,)) / 1.05
    assert long.tuned()[0].current.mode.is_all_reduce
    assert not Job(model="many", latency=latency).tuned()[0].current.mode.is_all_reduce


@pytest.mark.long
def test_the_same_times_lead_to_the_same_decisions() -> None:
    job = any_job(1)
    trials, decisions = job.tuned(3)
    assert job.tuned(3)[1] == decisions
    # Earlier suggestions and the order of observations have no effect.
    first, second = (BayesianSearch(space=Space(job.key), seed=3) for _ in range(2))
    observations = trials.search.ranking[:5]
    for forward, backward in zip(observations, reversed(observations), strict=True):
        first.suggest()
        first.observe(*forward)
        second.observe(*backward)
    assert first.suggest() == second.suggest()


def test_tuner_ignores_warmup_steps_and_outliers() -> None:
    """The first two of 12 steps, and five of the others, may take any time."""
    job, steps = Job(model="even", latency=0.005), iter(range(10**6))

    def disturbed(candidate: BucketCandidate) -> float:
        i = next(steps) % 12
        factor = (
            (100.0 if candidate.mode.is_all_reduce else 0.01) if i < 2 else 9.0 if i % 2 else 1.0
        )
        return factor * job.seconds(candidate)

    first, second = (BucketTuner(GridSearch(space=Space(job.key))) for _ in range(2))
    assert run_tuner(first, disturbed) == run_tuner(second, job.seconds)


def test_tuner_decides_every_num_steps_until_final() -> None:
    trials = BucketTuner(
        BayesianSearch(space=Space(lambda _: "one")), num_discarded=1, num_measured=4
    )
    assert [trials.after_step(1.0) is None for _ in range(trials.num_steps)] == 4 * [True] + [False]
    assert trials.current == BucketCandidate(FIRST, BucketMode.ALL_REDUCE)
    assert [d.is_final for d in run_tuner(trials, lambda _: 1.0)] == [False, False, True]
    assert all(trials.after_step(9.0) is None for _ in range(20))


def test_two_best_candidates_are_measured_again() -> None:
    times = {
        BucketCandidate(FIRST): [1.0, 1.2],
        BucketCandidate(FIRST, BucketMode.ALL_REDUCE): [1.05, 1.05],
    }
    trials = BucketTuner(
        BayesianSearch(space=Space(lambda _: "one")), num_discarded=0, num_measured=1
    )
    decisions = run_tuner(trials, lambda candidate: times[candidate].pop(0))
    assert [d.candidate.mode.is_all_reduce for d in decisions] == [True, True, False, True]
    trials = BucketTuner(
        BayesianSearch(space=Space(lambda _: "one"))
    )  # not if one is clearly slower
    decisions = run_tuner(trials, lambda candidate: 1.3 if candidate.mode.is_all_reduce else 1.0)
    assert [d.candidate.mode.is_all_reduce for d in decisions] == [True, False]


@settings(deadline=None)
@given(
    st.lists(st.floats(1e5, 6e7), min_size=1, max_size=30),
    st.sampled_from([RandomSearch, GridSearch]),
    st.integers(1, 30),
    st.integers(0, 99),
)
def test_equal_buckets_are_tried_once(
    sizes: list[float], mode: type[tuner.Search], num_trials: int, seed: int
) -> None:
    def key(candidate: BucketCandidate) -> tuple[range, ...]:
        return by_bytes(sizes, candidate.bucket_bytes)

    search, rng = mode(space=Space(key), num_trials=num_trials, seed=seed), random.Random(seed)
    trials = BucketTuner(search, num_discarded=0, num_measured=1)
    decisions = run_tuner(trials, lambda _: rng.uniform(1, 2))
    tried = [candidate for candidate, _ in search.ranking]
    num_distinct = len({(key(BucketCandidate(size))) for size in tuner.SIZES}) * 2
    assert len({(c.mode, key(c)) for c in tried}) == len(tried) == min(num_trials, num_distinct)
    assert trials.current == search.best == decisions[-1].candidate
    assert len(decisions) in (len(tried), len(tried) + 2)
    with pytest.raises(PolicyError, match="is_over"):
        search.suggest()


@pytest.mark.long
def test_all_bucket_modes_are_tried() -> None:
    modes = list(BucketMode)
    space = Space(lambda c: by_bytes([4e6] * 20, c.bucket_bytes), modes)
    trials = BucketTuner(BayesianSearch(space=space))
    decisions = run_tuner(trials, lambda c: 2.0 - modes.index(c.mode) / 10)
    tried = [BucketMode.DECOUPLED, *(decision.candidate.mode for decision in decisions)]
    assert tried[:4] == modes
    assert trials.current.mode is modes[-1]


def test_small_model_needs_four_trials() -> None:
    """8 MB in two layers are one bucket or two: four trials."""
    space = Space(lambda candidate: by_bytes([4e6, 4e6], candidate.bucket_bytes))
    trials = BucketTuner(BayesianSearch(space=space))
    assert len(run_tuner(trials, lambda c: 1 + (c.bucket_bytes > 8e6) + c.mode.is_all_reduce)) == 4
    assert not trials.current.mode.is_all_reduce
    assert trials.current.bucket_bytes < 8e6


def test_optuna_is_imported_lazily() -> None:
    check = """
import sys
import polyrhythm.cli
from polyrhythm.sync.fusion.tuner import BayesianSearch, Space
search = BayesianSearch(space=Space(lambda candidate: candidate.bucket_bytes))
for seconds in (1.0, 1.1, 1.2):
    search.observe(search.suggest(), seconds)
sys.exit("optuna" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", check], timeout=100, check=False).returncode == 0


def test_optuna_is_silent_and_keeps_its_verbosity(capfd: pytest.CaptureFixture[str]) -> None:
    import optuna  # takes a second

    search = BayesianSearch(space=Space(lambda candidate: candidate.bucket_bytes))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        for seconds in (1.0, 1.1, 1.2, 1.3):
            search.observe(search.suggest(), seconds)
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(verbosity)
    assert capfd.readouterr() == ("", "")


def test_invalid_tuner_arguments_are_refused() -> None:
    space = Space(lambda candidate: candidate.bucket_bytes)
    with pytest.raises(PolicyError, match="num_trials=0"):
        BayesianSearch(space=space, num_trials=0)
    with pytest.raises(PolicyError, match="took nan s"):
        BayesianSearch(space=space).observe(BucketCandidate(FIRST), math.nan)
    with pytest.raises(PolicyError, match="num_measured=0"):
        BucketTuner(BayesianSearch(space=space), num_measured=0)


def equal_work_tuner(noise: float | None = None) -> EqualWorkTuner:
    """Two candidates, the modes: one size makes the same buckets as any other."""
    space = Space(lambda _: 0)
    return EqualWorkTuner(lambda: BucketTuner(BayesianSearch(space=space), noise=noise))


def steps_of(tuner: EqualWorkTuner, work: str = "4 samples") -> list[TimedStep]:
    """A plain all-reduce takes half as long."""
    seconds = 1.0 if tuner.current.mode is BucketMode.DECOUPLED else 0.5
    return [TimedStep(seconds, work)] * tuner.num_steps


def test_steps_of_other_work_are_left_out() -> None:
    """The last batch of an epoch is smaller on one worker, and takes no time."""
    found = equal_work_tuner()
    decisions = []
    for _ in range(20):
        full = steps_of(found)
        partial = [TimedStep(0.001, "1 sample") if i % 3 == 2 else s for i, s in enumerate(full)]
        decisions.append(found.after_steps([full, partial]))
        if decisions[-1].is_final:
            break
    assert decisions[-1].candidate.mode is BucketMode.ALL_REDUCE
    assert "0.5 s" in decisions[-1].why


def test_slowest_worker_counts() -> None:
    found = equal_work_tuner()
    while not (
        decision := found.after_steps([steps_of(found), [TimedStep(2.0)] * found.num_steps])
    ).is_final:
        pass
    assert "2 s" in decision.why


def test_search_restarts_when_the_usual_work_changes() -> None:
    found = equal_work_tuner()
    assert found.after_steps([steps_of(found)]).candidate.mode is BucketMode.ALL_REDUCE
    again = found.after_steps([steps_of(found, "8 samples")])
    assert "starts again" in again.why
    assert again.candidate.mode is BucketMode.DECOUPLED
    for number in range(2):
        decision = found.after_steps([steps_of(found, f"{number} samples")])
    assert decision.is_final, "after three changes"


def test_tuner_stops_early_within_noise() -> None:
    found, steps = equal_work_tuner(noise=0.03), [TimedStep(1.0)] * 12
    assert not found.after_steps([steps]).is_final
    decision = found.after_steps([[TimedStep(1.02)] * 12])
    assert decision.is_final
    assert "all of 2" in decision.why
