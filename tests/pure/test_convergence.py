"""Convergence in virtual time: local updates and averages of real weights."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from polyrhythm.cost.step import Replica, StageRun
from polyrhythm.describe.scenario import Kill, Scenario, Slow
from polyrhythm.errors import UserError
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.convergence import ConvergenceCurve, converge
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.problems import TrainingProblem, Vector, perceptron, quadratic
from polyrhythm.sync.policies.local import OuterNesterov
from tests.pure.simulate_cases import equal_job

STRAGGLERS = Scenario(name="b", slow=(Slow(device="*", probability=0.1, sleep_factor=3.0),))


def make_job(policy: str = "all_reduce", **options: Any) -> SimulatedJob:
    defaults: dict[str, Any] = {
        "num_pipelines": 4,
        "forward": 0.01,
        "backward": 0.02,
        "gradient_bytes": 1e6,
        "bandwidth": 1e9,
    }
    return equal_job(policy=policy, **defaults | options)


def single_worker_losses(
    problem: TrainingProblem, num_steps: int, lr: float, momentum: float = 0.0
) -> list[float]:
    """Losses of one worker with the batch of all shards, after each step."""
    weights, velocity, losses = problem.start(), np.zeros(len(problem.start())), []
    for step in range(num_steps):
        losses.append(problem.loss(weights))
        shards = range(problem.num_shards)
        gradient = np.mean([problem.gradient(weights, shard, step) for shard in shards], 0)
        velocity = momentum * velocity + gradient
        weights = weights - lr * velocity
    return [*losses, problem.loss(weights)]


@dataclass
class Drift:
    """Random gradients that do not depend on the weights, so that the mean model is known."""

    num_shards: int
    drifted: Vector = field(default_factory=lambda: np.zeros(6))
    off: list[float] = field(default_factory=list)

    def start(self) -> Vector:
        return np.ones(6)

    def loss(self, weights: Vector) -> float:
        self.off.append(float(abs(weights - self.start() + self.drifted / self.num_shards).max()))
        return 0.0

    def gradient(self, weights: Vector, shard: int, step: int) -> Vector:
        gradient = np.random.default_rng((shard, step)).standard_normal(6)
        self.drifted = self.drifted + gradient
        return gradient


@pytest.mark.parametrize("problem", [quadratic(4), perceptron(4, num_samples=256)])
@pytest.mark.parametrize(
    "job",
    [
        make_job(),
        make_job(decoupled=True, scenario=STRAGGLERS),
        make_job("ssp", options={"staleness": 0}),
        make_job("local", options={}),
    ],
    ids=["all_reduce", "decoupled", "server", "outer"],
)
def test_exact_policies_equal_one_worker_with_the_batch_of_all(job, problem):
    if job.sync.policy == "local":
        job = replace(job, sync=replace(job.sync, every=1))
    plain = OuterNesterov(lr=1.0, momentum=0.0)
    curve = converge(job, problem, num_steps=20, lr=0.1, momentum=0.5, outer=plain)
    assert curve.losses == pytest.approx(single_worker_losses(problem, 20, 0.1, 0.5), rel=1e-9)
    assert curve.steps == pytest.approx(range(21))


def test_a_pipeline_that_is_never_flushed_uses_the_weights_of_the_forward():
    problem = quadratic(4, num_parameters=10)
    job = make_job(num_stages=2, in_flight=(2, 1))
    curve = converge(job, problem, num_steps=12, lr=0.2)
    first, last = [problem.start()[:5]], [problem.start()[5:]]  # weights by step
    for step in range(12):
        weights = np.concatenate([first[max(0, step - 1)], last[step]])
        gradient = np.mean([problem.gradient(weights, shard, step) for shard in range(4)], 0)
        first.append(first[-1] - 0.2 * gradient[:5])
        last.append(last[-1] - 0.2 * gradient[5:])
    assert curve.final_loss == pytest.approx(
        problem.loss(np.concatenate([first[-1], last[-1]])), rel=1e-9
    )


def test_stages_on_one_device_are_trained_as_stages_on_two():
    problem = quadratic(2, num_parameters=10)
    two_devices = make_job(num_pipelines=2, num_stages=2)
    schedule = ScheduleSpec.parse("1f1b").build(num_stages=1, num_microbatches=1)
    one_device = replace(
        two_devices,
        pipelines=tuple(Replica(runs=(StageRun(p, 0, 2),), schedule=schedule) for p in range(2)),
    )
    jobs = (two_devices, one_device)
    first, second = (converge(job, problem, num_steps=10, lr=0.1) for job in jobs)
    assert first.final_loss == pytest.approx(second.final_loss, rel=1e-9)


@pytest.mark.parametrize(
    "policy", ["adaptive", "age", "pairwise", "random", "smart", "partial_reduce", "static"]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_averages_preserve_the_global_mean(policy, overlap):
    problem = Drift(4)
    job = make_job(policy, scenario=STRAGGLERS, overlap=overlap and policy != "static")
    converge(job, problem, num_steps=40, lr=1.0)
    # While the members of a group apply its average one by one, the mean is in between.
    exact = [off for off in problem.off if off < 1e-9]
    assert len(exact) > 0.9 * len(problem.off)


def test_groups_keep_workers_close():
    problem = quadratic(8, minima_spread=1.0, noise=0.5)

    def distance(policy: str, **options: object) -> float:
        job = make_job(policy, num_pipelines=8, scenario=STRAGGLERS, options=options)
        return float(np.mean(converge(job, problem, num_steps=150, lr=0.1).distances[75:]))

    alone, groups = distance("local"), distance("adaptive")
    assert alone > 10
    assert groups < alone / 20
    assert distance("all_reduce") < groups


def test_groups_reach_the_minimum_of_all_shards():
    problem = quadratic(8, noise=0.1)
    job = make_job("adaptive", num_pipelines=8, scenario=STRAGGLERS)
    curve = converge(job, problem, num_steps=300, lr=0.2, every=10)
    assert curve.final_loss < 0.01 * curve.losses[0]
    assert 0 < curve.time_to(0.5 * curve.losses[0]) < curve.time_to(0.1 * curve.losses[0])
    assert curve.time_to(-1.0) == float("inf")


def test_stale_gradients_converge_later():
    problem = quadratic(4, noise=0.0, minima_spread=0.2)

    def steps(*in_flight: int) -> float:
        job = make_job(num_stages=len(in_flight), in_flight=in_flight)
        curve = converge(job, problem, num_steps=120, lr=0.3, momentum=0.5)
        return curve.steps_to(0.05 * curve.losses[0])

    assert steps(4, 3, 2, 1) > steps(1)


def test_a_seed_fixes_the_curve():
    def curve(seed: int) -> ConvergenceCurve:
        job = make_job("pairwise", scenario=replace(STRAGGLERS, seed=seed), seed=seed)
        return converge(job, perceptron(4, num_samples=128, seed=seed), num_steps=20, lr=0.1)

    first, same, other = curve(1), curve(1), curve(2)
    assert (first.times, first.losses, first.distances) == (same.times, same.losses, same.distances)
    assert first.losses != other.losses


def test_the_gradient_of_a_perceptron_is_that_of_its_loss():
    problem = perceptron(1, hidden=(5, 4), num_samples=1, batch_size=3)
    weights = problem.start()
    gradient = problem.gradient(weights, 0, 0)
    for i in range(0, len(weights), 7):
        nudge = np.zeros_like(weights)
        nudge[i] = 1e-5
        slope = (problem.loss(weights + nudge) - problem.loss(weights - nudge)) / 2e-5
        assert gradient[i] == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_a_perceptron_learns_and_its_shards_differ():
    problem = perceptron(4, skew=0.8)
    curve = converge(make_job(), problem, num_steps=150, lr=0.3, momentum=0.5, every=50)
    assert curve.final_loss < 0.8 * curve.losses[0]
    counts = [np.bincount(problem.labels[shard], minlength=8) for shard in problem.shards]
    assert abs(counts[0] - counts[3]).sum() > 0.5 * counts[0].sum()


@pytest.mark.parametrize(
    ("job", "problem", "every"),
    [
        (make_job(), quadratic(3), 1),
        (make_job(), quadratic(4), 0),
        (make_job(scenario=Scenario(name="k", kill=(Kill(device="d1", at=1.0),))), quadratic(4), 1),
        (make_job(num_stages=3), quadratic(4, num_parameters=2), 1),
    ],
)
def test_invalid_convergence_job_is_refused(job, problem, every):
    with pytest.raises(UserError, match="fix:"):
        converge(job, problem, num_steps=2, lr=0.1, every=every)


def test_a_problem_with_too_few_samples_is_refused():
    with pytest.raises(UserError, match="2 samples for 3 shards"):
        perceptron(3, num_samples=2)
