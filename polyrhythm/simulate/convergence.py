"""Convergence in virtual time: simulated workers train real weights on a small problem.

A step is SGD with momentum, with the gradient at the weights that the worker had at the start of
the step's forward; groups average as the runtime does, by adding the difference between the mean
and the published weights. So the cost of a policy in time and in progress comes from one run.

A worker has its stage's part of the parameters. In each stage, a mini-batch uses the weights that
the stage had at its forward: in a pipeline that is never flushed these are of different steps, and
the gradient is that of the mixed weights, as with PipeDream's weight stashing.

Departures: momentum stays with its worker (the runtime's `state="local"`). Under `all_reduce` and
`balanced` the runtime averages gradients; averaging models after equal steps is equivalent. The
shares of `balanced` are taken as equal: their mean is over the same global batch.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from polyrhythm.errors import UserError
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.problems import TrainingProblem, Vector
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.policies.local import OuterNesterov, pseudo_gradient
from polyrhythm.types import Seconds, Worker

DILOCO = OuterNesterov()


@dataclass(frozen=True, kw_only=True)
class ConvergenceCurve:
    """Progress of training, measured at the mean of all workers' models."""

    times: tuple[Seconds, ...]
    steps: tuple[float, ...]  # mean over pipelines
    losses: tuple[float, ...]
    distances: tuple[float, ...]  # mean squared distance of workers from that mean
    simulated: SimulationResult

    @property
    def final_loss(self) -> float:
        return self.losses[-1]

    def time_to(self, loss: float) -> Seconds:
        """Time at which `loss` is first reached; inf if never."""
        return self._first(self.times, loss)

    def steps_to(self, loss: float) -> float:
        return self._first(self.steps, loss)

    def _first(self, axis: Sequence[float], loss: float) -> float:
        """Position on `axis` where `loss` is first reached, with linear interpolation."""
        for i, after in enumerate(self.losses):
            if after <= loss:
                if i == 0:
                    return axis[0]
                before = self.losses[i - 1]
                fraction = (before - loss) / (before - after)
                return axis[i - 1] + fraction * (axis[i] - axis[i - 1])
        return float("inf")


def converge(
    job: SimulatedJob,
    problem: TrainingProblem,
    *,
    num_steps: int,
    lr: float,
    momentum: float = 0.0,
    every: int = 1,  # steps from one point of the curve to the next
    outer: OuterNesterov = DILOCO,  # the outer optimizer of `local`
) -> ConvergenceCurve:
    """Train `problem` in a simulated job; seeds of problem, policy and scenario fix the result."""
    _check(job, problem, every)
    models = _Models(job, problem, lr, momentum, every, outer)
    simulated = simulate(job, num_steps=num_steps, observers=[models])
    models.add_point(simulated.duration)
    times, steps, losses, distances = zip(*models.points, strict=True)
    return ConvergenceCurve(
        times=times, steps=steps, losses=losses, distances=distances, simulated=simulated
    )


def _check(job: SimulatedJob, problem: TrainingProblem, every: int) -> None:
    num_pipelines = len(job.pipelines)
    if problem.num_shards != num_pipelines or len(problem.start()) < len(job.stages):
        raise UserError(
            f"{problem.num_shards} shards and {len(problem.start())} parameters for "
            f"{num_pipelines} pipelines of {len(job.stages)} stages",
            expected="a shard for each pipeline, and a parameter for each stage",
            fix="create the problem with as many shards as the job has pipelines",
        )
    if job.scenario.kill or job.scenario.join:
        raise UserError(
            "the convergence of a job that workers leave or join",
            expected="constant workers: else the models of lost ones would count",
            fix="remove kill and join; `simulate` gives the times of such a job",
        )
    if every < 1:
        raise UserError(f"every={every}", expected="1 step or more", fix="use 1")


class _Average(NamedTuple):
    mean: Vector
    published: dict[Worker, Vector]  # of the members that have not applied it yet


class _Models:
    """Observer that applies all simulated events to the weights of all workers."""

    def __init__(
        self,
        job: SimulatedJob,
        problem: TrainingProblem,
        lr: float,
        momentum: float,
        every: int,
        outer: OuterNesterov,
    ) -> None:
        num_stages, num_pipelines = len(job.stages), len(job.pipelines)
        self._problem, self._lr, self._momentum = problem, lr, momentum
        bounds = np.linspace(0, len(problem.start()), num_stages + 1).astype(int).tolist()
        self._parts = [slice(*bounds[stage : stage + 2]) for stage in range(num_stages)]
        self._weights = np.tile(problem.start(), (num_pipelines, 1))  # [pipeline, parameter]
        self._velocity = np.zeros_like(self._weights)
        self._outer = outer if job.sync.mode.has_outer_optimizer else None
        self._anchor, self._outer_velocity = self._weights.copy(), np.zeros_like(self._weights)
        self._server, self._pulled = problem.start(), self._weights.copy()
        self._averages: dict[int, _Average] = {}  # by group
        # Weights of each worker at the forwards of mini-batches without gradients yet.
        self._forwards: dict[Worker, deque[Vector]] = {w: deque() for w in job.sync.workers}
        self._num_steps = dict.fromkeys(self._forwards, 0)
        self._gradients: dict[tuple[int, int], Vector] = {}  # by pipeline and mini-batch
        self._num_uses: Counter[tuple[int, int]] = Counter()  # stages that have used a gradient
        self._total, self._every = 0, every * len(self._forwards)
        self.points: list[tuple[Seconds, float, float, float]] = []

    def on_step_start(self, worker: Worker, now: Seconds) -> None:
        weights = self._weights[worker.pipeline, self._parts[worker.stage]]
        self._forwards[worker].append(weights.copy())

    def on_step(self, worker: Worker, now: Seconds) -> None:
        if self._total % self._every == 0:  # before the step, so that pending averages are applied
            self.add_point(now if self._total else 0.0)
        number, part = worker.pipeline, self._parts[worker.stage]
        gradient = self._gradient(worker)[part]
        velocity = self._momentum * self._velocity[number, part] + gradient
        self._velocity[number, part] = velocity
        self._weights[number, part] -= self._lr * velocity
        self._num_steps[worker] += 1
        self._forwards[worker].popleft()
        self._total += 1

    def on_average(self, gid: int, members: Sequence[Worker], now: Seconds) -> None:
        part = self._parts[members[0].stage]
        rows = [member.pipeline for member in members]
        published = self._weights[rows, part]
        self._averages[gid] = _Average(
            published.mean(axis=0), dict(zip(members, published, strict=True))
        )

    def on_applied(self, worker: Worker, gid: int, now: Seconds) -> None:
        number, part = worker.pipeline, self._parts[worker.stage]
        average = self._averages[gid]
        mean = average.mean
        if self._outer is not None:
            anchor = self._anchor[number, part]
            mean, velocity = self._outer.step(
                anchor, pseudo_gradient(anchor, mean), self._outer_velocity[number, part]
            )
            self._anchor[number, part], self._outer_velocity[number, part] = mean, velocity
        self._weights[number, part] += mean - average.published.pop(worker)
        if not average.published:
            del self._averages[gid]

    def on_server_transfer(self, worker: Worker, is_push: bool, now: Seconds) -> None:
        number, part = worker.pipeline, self._parts[worker.stage]
        if is_push:
            update = self._weights[number, part] - self._pulled[number, part]
            self._server[part] += update / len(self._weights)
        else:
            self._weights[number, part] = self._pulled[number, part] = self._server[part]

    def on_copied(self, worker: Worker, source: Worker, now: Seconds) -> None:
        raise AssertionError("`_check` refuses jobs with late joins")

    def _gradient(self, worker: Worker) -> Vector:
        """Gradient of a whole mini-batch, computed when its backward starts at the last stage."""
        number, step = worker.pipeline, self._num_steps[worker]
        key = number, step
        if key not in self._gradients:
            stages = [Worker(stage, number) for stage in range(len(self._parts))]
            weights = [self._forwards[s][step - self._num_steps[s]] for s in stages]
            self._gradients[key] = self._problem.gradient(np.concatenate(weights), number, step)
        self._num_uses[key] += 1
        if self._num_uses[key] < len(self._parts):
            return self._gradients[key]
        del self._num_uses[key]
        return self._gradients.pop(key)

    def add_point(self, now: Seconds) -> None:
        mean = self._weights.mean(0)
        difference = self._weights - mean
        distance = float((difference * difference).sum(1).mean())
        steps = self._total / len(self._forwards)
        self.points.append((now, steps, self._problem.loss(mean), distance))
