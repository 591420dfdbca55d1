"""Convergence in virtual time: virtual workers have weights, and do to them what real ones do.

A step is one of SGD with momentum, of the gradient at the weights that the worker had when it began
that step's forward; groups average as the runtime does, by adding what the mean differs from what
was published. So what a policy costs in time and what it costs in progress come from one run.

A worker has its stage's part of the parameters. A mini-batch meets in each stage the weights that
the stage had at its forward: in a pipeline that is never flushed these are of different steps, and
the gradient is that of the mix, as with PipeDream's stashed weights.

Departures: momentum stays with its worker (the runtime's `state="local"`). Under `all_reduce` and
`balanced` the runtime averages gradients; to average models after equal steps comes to the same.
The shares of `balanced` are taken as equal: their mean is over the same global batch.
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
    """How training went; of the mean of all workers' models."""

    times: tuple[Seconds, ...]
    steps: tuple[float, ...]  # of a pipeline, on average
    losses: tuple[float, ...]
    distances: tuple[float, ...]  # of workers from that mean, squared; on average
    simulated: SimulationResult

    @property
    def final_loss(self) -> float:
        return self.losses[-1]

    def time_to(self, loss: float) -> Seconds:
        """When it is first that low; infinity if it never is."""
        return self._first(self.times, loss)

    def steps_to(self, loss: float) -> float:
        return self._first(self.steps, loss)

    def _first(self, along: Sequence[float], loss: float) -> float:
        """Between two points, on the line that joins them."""
        for i, found in enumerate(self.losses):
            if found <= loss:
                if i == 0:
                    return along[0]
                before = self.losses[i - 1]
                part = (before - loss) / (before - found)
                return along[i - 1] + part * (along[i] - along[i - 1])
        return float("inf")


def converge(
    job: SimulatedJob,
    problem: TrainingProblem,
    *,
    num_steps: int,
    lr: float,
    momentum: float = 0.0,
    every: int = 1,  # steps from one point of the curve to the next
    outer: OuterNesterov = DILOCO,  # what `local` does with averages
) -> ConvergenceCurve:
    """Train it as `job` says; chance is in the seeds of the problem, the policy, the scenario."""
    _check(job, problem, every)
    models = _Models(job, problem, lr, momentum, every, outer)
    simulated = simulate(job, num_steps=num_steps, observers=[models])
    models.note(simulated.duration)
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
            fix="make the problem with as many shards as the job has pipelines",
        )
    if job.scenario.kill or job.scenario.join:
        raise UserError(
            "the convergence of a job that workers leave or join",
            expected="workers that stay: else models of those that are gone would count",
            fix="leave out kill and join; `simulate` has the times of such a job",
        )
    if every < 1:
        raise UserError(f"every={every}", expected="1 step or more", fix="use 1")


class _Average(NamedTuple):
    mean: Vector
    published: dict[Worker, Vector]  # by those that have not taken it in yet


class _Models:
    """The observer: the weights of all workers, changed as events tell."""

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
        ends = np.linspace(0, len(problem.start()), num_stages + 1).astype(int).tolist()
        self._parts = [slice(*ends[stage : stage + 2]) for stage in range(num_stages)]
        self._weights = np.tile(problem.start(), (num_pipelines, 1))  # [pipeline, parameter]
        self._velocity = np.zeros_like(self._weights)
        self._outer = outer if job.sync.policy == "local" else None
        self._anchor, self._outer_velocity = self._weights.copy(), np.zeros_like(self._weights)
        self._server, self._pulled = problem.start(), self._weights.copy()
        self._averages: dict[int, _Average] = {}  # by group
        # What each worker had at the forwards of mini-batches whose gradients are to come.
        self._forwards: dict[Worker, deque[Vector]] = {w: deque() for w in job.sync.workers}
        self._made = dict.fromkeys(self._forwards, 0)  # steps
        self._gradients: dict[tuple[int, int], Vector] = {}  # of a pipeline's mini-batch
        self._num_taken: Counter[tuple[int, int]] = Counter()  # stages that have had their part
        self._total, self._every = 0, every * len(self._forwards)
        self.points: list[tuple[Seconds, float, float, float]] = []

    def on_begin(self, worker: Worker, now: Seconds) -> None:
        weights = self._weights[worker.pipeline, self._parts[worker.stage]]
        self._forwards[worker].append(weights.copy())

    def on_step(self, worker: Worker, now: Seconds) -> None:
        if self._total % self._every == 0:  # before it: where all average, they have done so
            self.note(now if self._total else 0.0)
        number, part = worker.pipeline, self._parts[worker.stage]
        gradient = self._gradient(worker)[part]
        velocity = self._momentum * self._velocity[number, part] + gradient
        self._velocity[number, part] = velocity
        self._weights[number, part] -= self._lr * velocity
        self._made[worker] += 1
        self._forwards[worker].popleft()
        self._total += 1

    def on_average(
        self, gid: int, members: Sequence[Worker], weights: Sequence[float], now: Seconds
    ) -> None:
        part = self._parts[members[0].stage]
        rows = [member.pipeline for member in members]
        published = self._weights[rows, part]
        self._averages[gid] = _Average(
            np.asarray(weights) @ published, dict(zip(members, published, strict=True))
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

    def on_served(self, worker: Worker, is_push: bool, now: Seconds) -> None:
        number, part = worker.pipeline, self._parts[worker.stage]
        if is_push:
            moves = self._weights[number, part] - self._pulled[number, part]
            self._server[part] += moves / len(self._weights)
        else:
            self._weights[number, part] = self._pulled[number, part] = self._server[part]

    def on_copied(self, worker: Worker, source: Worker, now: Seconds) -> None:
        raise AssertionError("jobs that workers join are refused")

    def _gradient(self, worker: Worker) -> Vector:
        """Of a whole mini-batch, made when its backward begins: the last stage is the first."""
        number, step = worker.pipeline, self._made[worker]
        key = number, step
        if key not in self._gradients:
            stages = [Worker(stage, number) for stage in range(len(self._parts))]
            met = [self._forwards[other][step - self._made[other]] for other in stages]
            self._gradients[key] = self._problem.gradient(np.concatenate(met), number, step)
        self._num_taken[key] += 1
        if self._num_taken[key] < len(self._parts):
            return self._gradients[key]
        del self._num_taken[key]
        return self._gradients.pop(key)

    def note(self, now: Seconds) -> None:
        mean = self._weights.mean(0)
        away = self._weights - mean
        distance = float((away * away).sum(1).mean())
        steps = self._total / len(self._forwards)
        self.points.append((now, steps, self._problem.loss(mean), distance))
