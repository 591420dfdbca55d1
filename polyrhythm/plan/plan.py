"""The plan: which layers make a stage, and which process is which worker.

Ranks are dealt pipeline by pipeline: neighbours in a pipeline, which talk most, get neighbouring
ranks, which torchrun puts on one machine.
"""

import json
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from polyrhythm.errors import PlanError
from polyrhythm.types import Worker

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    layers_per_stage: tuple[int, ...]
    num_pipelines: int

    def __post_init__(self) -> None:
        if not self.layers_per_stage or min(self.layers_per_stage) < 1:
            raise PlanError(
                f"layers_per_stage={list(self.layers_per_stage)}",
                expected="at least one stage, and at least one layer in each",
                fix="use fewer stages",
            )
        if self.num_pipelines < 1:
            raise PlanError(
                f"num_pipelines={self.num_pipelines}",
                expected="at least one pipeline",
                fix="use 1 to train without replicas",
            )

    @property
    def num_stages(self) -> int:
        return len(self.layers_per_stage)

    @property
    def num_workers(self) -> int:
        return self.num_stages * self.num_pipelines

    def worker(self, rank: int) -> Worker:
        pipeline, stage = divmod(rank, self.num_stages)
        return Worker(stage, pipeline)

    def rank(self, worker: Worker) -> int:
        return worker.pipeline * self.num_stages + worker.stage

    def layers(self, stage: int) -> range:
        bounds = list(pairwise(accumulate(self.layers_per_stage, initial=0)))
        return range(*bounds[stage])

    def replicas(self, stage: int) -> tuple[Worker, ...]:
        """The workers that hold the same layers and average with one another."""
        return tuple(Worker(stage, pipeline) for pipeline in range(self.num_pipelines))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n")


def even_plan(*, num_layers: int, num_stages: int, num_pipelines: int) -> Plan:
    """Equal machines: layers dealt as evenly as they go, earlier stages taking the remainder."""
    if not 1 <= num_stages <= num_layers:
        raise PlanError(
            f"{num_stages} stages for {num_layers} layers",
            expected=f"1 to {num_layers} stages, one layer or more in each",
            fix=f"use at most {num_layers} stages, or a model with more layers",
        )
    each, rest = divmod(num_layers, num_stages)
    return Plan(
        layers_per_stage=tuple(each + (stage < rest) for stage in range(num_stages)),
        num_pipelines=num_pipelines,
    )
