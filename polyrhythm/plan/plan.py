"""The plan: which layers make a stage, and which device runs which stages of which pipeline.

All pipelines have the same stages, so that replicas of a stage can average. Otherwise they may
differ: one may have more micro-batches than another, and one device may run several consecutive
stages, so that a pipeline of two large devices can train with one of six small ones. Devices that
would only slow the others down are left out.

Ranks are numbered pipeline by pipeline: neighbours in a pipeline, which communicate most, get
neighbouring ranks, which torchrun puts on one machine.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from polyrhythm.errors import PlanError
from polyrhythm.types import AUTO, Seconds, Worker

# Of the environment: the file that a Trainer's plan="auto" stands for.
PLAN_VARIABLE = "POLYRHYTHM_PLAN"


class DevicePart(NamedTuple):
    """Consecutive stages on one device; a half-open range of stages."""

    device: str
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """One replica of all stages."""

    devices: tuple[str, ...] = ()  # per stage; empty for any devices
    num_microbatches: int | None = None  # per step; None if not planned
    schedule: str = AUTO  # or a spec, such as 1f1b, for as many stages as it has parts

    def __post_init__(self) -> None:
        if self.num_microbatches is not None and self.num_microbatches < 1:
            raise PlanError(
                f"a pipeline with {self.num_microbatches} micro-batches",
                expected="at least 1",
                fix="assign it a micro-batch, or leave its devices out",
            )
        names = [device for device, _ in groupby(self.devices)]
        for name in names:
            if names.count(name) > 1:
                raise PlanError(
                    f"{name!r} runs stages that are not next to one another",
                    expected="consecutive stages for each device",
                    fix="make its stages consecutive, or use another device",
                )

    @property
    def parts(self) -> tuple[DevicePart, ...]:
        ends = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(self.devices)) if a != b)]
        ends.append(len(self.devices))
        return tuple(DevicePart(self.devices[i], i, j) for i, j in pairwise(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRegion:
    """The devices of a site: a region of the cluster, or devices of one host.

    Inside it GPUs communicate over NCCL, between regions over gloo.
    """

    name: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """A part of a step's time, with its activity."""

    name: str
    takes: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """The planner's prediction of a step."""

    step: Seconds
    bound: Seconds  # no plan for this job is faster
    parts: tuple[TimePart, ...]  # they add up to the step; the largest first
    price_per_step: float | None = None  # in the currency of the cluster

    @property
    def gap(self) -> float:
        """The fraction of the step that another plan could save at most."""
        return max(0.0, 1 - self.bound / self.step) if self.step else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The inputs of `polyrhythm plan` for a plan; paths are relative to the plan's file."""

    cluster: str
    profile: str
    flops: float | None = None
    dtype: str | None = None
    gradient_bytes: float = 1.0
    optimizer_bytes: float = 2.0
    memory_reserve: float = 0.1
    buddy: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    layers_per_stage: tuple[int, ...]
    pipelines: tuple[PipelinePlan, ...]
    microbatch_size: int | None = None  # samples
    sync: str = "all_reduce"  # sync mode of the replicas
    # Per stage, whether its layers recompute activations in the backward; empty if none does.
    recompute: tuple[bool, ...] = ()
    cluster: str = ""  # name of the cluster that it was made for
    model: str = ""
    left_out: tuple[str, ...] = ()  # devices without work
    regions: tuple[PlanRegion, ...] = ()  # sites of the cluster; empty if it has only one
    predicted: PredictedStep | None = None
    sources: Sources | None = None

    def __post_init__(self) -> None:
        if not self.layers_per_stage or min(self.layers_per_stage) < 1:
            raise PlanError(
                f"layers_per_stage={list(self.layers_per_stage)}",
                expected="at least one stage, and at least one layer in each",
                fix="use fewer stages",
            )
        if not self.pipelines:
            raise PlanError(
                "a plan without pipelines",
                expected="at least one",
                fix="use 1 to train without replicas",
            )
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise PlanError(
                f"microbatch_size={self.microbatch_size}",
                expected="1 or more samples",
                fix="use a size that the model was profiled with",
            )
        if len(self.recompute) not in (0, self.num_stages):
            raise PlanError(
                f"recompute={list(self.recompute)} for {self.num_stages} stages",
                expected="true or false for each stage, or nothing",
                fix="write one value per stage, or omit recompute",
            )
        if not any(self.recompute):
            object.__setattr__(self, "recompute", ())  # equal plans compare equal
        self._check_devices()

    def region_of(self, worker: Worker) -> str:
        """Return the region of a worker's device; all are in one region if the plan has none."""
        devices = self.pipelines[worker.pipeline].devices
        device = devices[worker.stage] if devices else ""
        return next((region.name for region in self.regions if device in region.devices), "")

    @property
    def num_stages(self) -> int:
        return len(self.layers_per_stage)

    @property
    def num_pipelines(self) -> int:
        return len(self.pipelines)

    @property
    def num_workers(self) -> int:
        return self.num_stages * self.num_pipelines

    @property
    def batch(self) -> int | None:
        """Samples per step over all pipelines; None if not planned."""
        numbers = [pipeline.num_microbatches for pipeline in self.pipelines]
        if self.microbatch_size is None or None in numbers:
            return None
        return self.microbatch_size * sum(number or 0 for number in numbers)

    def worker(self, rank: int) -> Worker:
        pipeline, stage = divmod(rank, self.num_stages)
        return Worker(stage, pipeline)

    def rank(self, worker: Worker) -> int:
        return worker.pipeline * self.num_stages + worker.stage

    def layers(self, stage: int) -> range:
        return range(*self._bounds[stage])

    def recomputes(self, stage: int) -> bool:
        """Return whether the layers of a stage recompute their activations in the backward."""
        return bool(self.recompute) and self.recompute[stage]

    def replicas(self, stage: int) -> tuple[Worker, ...]:
        """Return the workers of one stage, which average with one another."""
        return tuple(Worker(stage, pipeline) for pipeline in range(self.num_pipelines))

    def save(self, path: str | Path) -> None:
        from polyrhythm.plan.plan_file import write_plan  # late: it imports this module

        write_plan(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan from a file, written by `save` or by hand; raise UserError if it is wrong."""
        from polyrhythm.plan.plan_file import read_plan

        return read_plan(Path(path))

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.layers_per_stage, initial=0)))

    def _check_devices(self) -> None:
        where: dict[str, int] = {}
        for number, pipeline in enumerate(self.pipelines):
            if len(pipeline.devices) not in (0, self.num_stages):
                raise PlanError(
                    f"pipeline {number} has {len(pipeline.devices)} devices",
                    expected=f"one for each of the {self.num_stages} stages, or none at all",
                    fix="name the device of every stage; one may stand for several in a row",
                )
            for device in dict.fromkeys(pipeline.devices):
                if device in where:
                    raise PlanError(
                        f"{device!r} is in pipelines {where[device]} and {number}",
                        expected="a device in one pipeline only",
                        fix="use another device in one of them",
                    )
                if device in self.left_out:
                    raise PlanError(
                        f"{device!r} is in pipeline {number} and left out",
                        expected="one of them",
                        fix="take it out of left_out",
                    )
                where[device] = number


def even_plan(*, num_layers: int, num_stages: int, num_pipelines: int) -> Plan:
    """Return a plan for equal devices: layers split evenly, the remainder to earlier stages."""
    if not 1 <= num_stages <= num_layers:
        raise PlanError(
            f"{num_stages} stages for {num_layers} layers",
            expected=f"1 to {num_layers} stages, one layer or more in each",
            fix=f"use at most {num_layers} stages, or a model with more layers",
        )
    if num_pipelines < 1:
        raise PlanError(
            f"num_pipelines={num_pipelines}",
            expected="at least one pipeline",
            fix="use 1 to train without replicas",
        )
    each, rest = divmod(num_layers, num_stages)
    return Plan(
        layers_per_stage=tuple(each + (stage < rest) for stage in range(num_stages)),
        pipelines=(PipelinePlan(),) * num_pipelines,
    )
