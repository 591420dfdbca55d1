"""Routes of micro-batches around lost workers: another worker of the same stage runs them.

A pipeline that has lost a worker keeps its other stages, and its micro-batches. Where it has a
hole, each of them takes a worker of another pipeline, which has the same layers: the one that then
has least to do. All others stay where they are. A stage without any worker has no routes.

Source: Gandhi et al., "ReCycle: Resilient Training of Large DNNs using Pipeline Adaptation", SOSP
2024 (arXiv:2405.14009), "adaptive pipelining". Departures: backwards are not split, and all stages
end a step together; workers may have different speeds.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes
from polyrhythm.errors import PlanError
from polyrhythm.types import Op, Seconds, Worker

_NO_TIME: Seconds = 1e-12  # of work that takes none, to divide by

Route = tuple[int, ...]  # the pipeline whose worker runs a micro-batch, by stage


@dataclass(frozen=True, slots=True, kw_only=True)
class GridTimes:
    """Times of all workers and links, for one micro-batch; those of lost workers are not read."""

    pipelines: tuple[PipelineTimes, ...]
    # From one pipeline to another, where they are known.
    crossings: Mapping[tuple[Worker, Worker], LinkTimes] = field(default_factory=dict)

    def duration(self, worker: Worker, op: Op) -> Seconds:
        times = self.pipelines[worker.pipeline]
        return (times.forward if op is Op.F else times.backward)[worker.stage]

    def per_microbatch(self, worker: Worker) -> Seconds:
        return self.duration(worker, Op.F) + self.duration(worker, Op.B)

    def link(self, source: Worker, target: Worker) -> LinkTimes:
        """Return the link between workers of neighbouring stages.

        One between pipelines that is not known counts as the slower of those inside them.
        """
        if (known := self.crossings.get((source, target))) is not None:
            return known
        is_forward, link = source.stage < target.stage, min(source.stage, target.stage)
        both = (self.pipelines[number] for number in (source.pipeline, target.pipeline))
        links = [(times.activations if is_forward else times.gradients)[link] for times in both]
        return max(links, key=lambda each: each.transfer)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Who runs which micro-batch, at each stage."""

    num_stages: int
    lost: tuple[Worker, ...]  # sorted
    by_pipeline: tuple[tuple[Route, ...], ...]  # per pipeline and micro-batch

    @property
    def num_pipelines(self) -> int:
        return len(self.by_pipeline)

    @cached_property
    def num_microbatches(self) -> tuple[int, ...]:
        """Per pipeline; micro-batches keep the pipeline that they began in."""
        return tuple(map(len, self.by_pipeline))

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """Those that are left, sorted."""
        every = (Worker(s, p) for s in range(self.num_stages) for p in range(self.num_pipelines))
        return tuple(worker for worker in every if worker not in self.lost)

    @cached_property
    def loads(self) -> Mapping[Worker, int]:
        """The number of micro-batches of each worker.

        In a gradient that is averaged over the workers of a stage, each counts by the labels (or
        samples) of all its micro-batches, its own and others': not by those of its pipeline.
        """
        return Counter(
            Worker(stage, pipeline)
            for routes in self.by_pipeline
            for route in routes
            for stage, pipeline in enumerate(route)
        )

    def worker(self, stage: int, pipeline: int, microbatch: int) -> Worker:
        """Return who runs a micro-batch of a pipeline at a stage."""
        return Worker(stage, self.by_pipeline[pipeline][microbatch][stage])


def assign_routes(
    lost: Collection[Worker], num_microbatches: Sequence[int], times: GridTimes
) -> Routes:
    """Assign each micro-batch of a lost worker to a worker of its stage.

    `num_microbatches` is per pipeline. The result depends only on the arguments. Raises PlanError
    if a stage has no worker.
    """
    num_pipelines, num_stages = len(num_microbatches), times.pipelines[0].num_stages
    assert len(times.pipelines) == num_pipelines, "each pipeline has its times"
    routes = [[[p] * num_stages for _ in range(n)] for p, n in enumerate(num_microbatches)]
    for stage in range(num_stages):
        every = [Worker(stage, pipeline) for pipeline in range(num_pipelines)]
        left = [worker for worker in every if worker not in lost]
        if not left:
            raise PlanError(
                f"stage {stage} has lost all its {num_pipelines} workers",
                expected="a worker of each stage, for the micro-batches of the others",
                fix="go on from a checkpoint",
            )
        each = {worker: times.per_microbatch(worker) for worker in left}
        loads = {worker: num_microbatches[worker.pipeline] for worker in left}
        holes = [worker.pipeline for worker in every if worker in lost]
        for microbatch, hole in sorted((m, p) for p in holes for m in range(num_microbatches[p])):
            before = routes[hole][microbatch][stage - 1] if stage else hole

            def key(worker: Worker, hole: int = hole, before: int = before) -> tuple[float, ...]:
                ends = (loads[worker] + 1) * each[worker]  # noqa: B023  # called at once
                distance = (worker.pipeline - hole) % num_pipelines
                return ends, worker.pipeline != before, distance

            chosen = min(left, key=key)
            loads[chosen] += 1
            routes[hole][microbatch][stage] = chosen.pipeline
    return Routes(
        num_stages=num_stages,
        lost=tuple(sorted(set(lost))),
        by_pipeline=tuple(tuple(map(tuple, of_pipeline)) for of_pipeline in routes),
    )


def least_length(routes: Routes, times: GridTimes) -> Seconds:
    """Return a lower bound of a step, for any order of actions on these routes.

    A worker starts when its first micro-batch has come from the first stage, and the step does not
    end before its last one is back there. In between it does the work of its own pipeline; and all
    workers of a stage do that of the stage, at best divided as their speeds are.
    """
    away: dict[Worker, list[tuple[Seconds, Seconds]]] = {}  # of each micro-batch, there and back
    for of_pipeline in routes.by_pipeline:
        for route in of_pipeline:
            there = back = 0.0
            for stage, pipeline in enumerate(route):
                worker = Worker(stage, pipeline)
                if stage:
                    before = Worker(stage - 1, route[stage - 1])
                    there += times.duration(before, Op.F) + times.link(before, worker).transfer
                    back += times.duration(before, Op.B) + times.link(worker, before).transfer
                away.setdefault(worker, []).append((there, back))
    longest = 0.0
    for stage in range(routes.num_stages):
        rate, firsts, lasts = 0.0, list[Seconds](), list[Seconds]()
        for worker in routes.workers:
            if worker.stage != stage or worker not in away:
                continue
            there, back = (min(each) for each in zip(*away[worker], strict=True))
            own = routes.num_microbatches[worker.pipeline] * times.per_microbatch(worker)
            longest = max(longest, there + own + back)
            rate += 1 / max(times.per_microbatch(worker), _NO_TIME)
            firsts.append(there)
            lasts.append(back)
        longest = max(longest, min(firsts) + sum(routes.num_microbatches) / rate + min(lasts))
    return longest
