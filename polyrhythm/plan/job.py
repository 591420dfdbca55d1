"""The training job, as far as a plan depends on it."""

from dataclasses import dataclass
from enum import StrEnum

from polyrhythm.errors import PlanError


class Objective(StrEnum):
    TIME = "time"  # of a step
    COST = "cost"  # price of a step, and so of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    batch: int  # samples per step, over all pipelines
    sync: str = "all_reduce"  # sync mode of the replicas; see cost.sync.Sync
    objective: Objective = Objective.TIME
    gradient_bytes: float = 1.0  # per byte of parameters: 2.0 for fp32 gradients of fp16 weights
    optimizer_bytes: float = 2.0  # per byte of parameters: what Adam keeps
    memory_reserve: float = 0.1  # fraction of each device's memory that stays free
    num_stages: int | None = None  # fixed number; None: the planner chooses
    num_pipelines: int | None = None
    microbatch_size: int | None = None
    schedule: str = "auto"
    unequal: bool = True  # pipelines may have different numbers of micro-batches, or of devices

    def __post_init__(self) -> None:
        for name in ("batch", "num_stages", "num_pipelines", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name}={value}", expected="1 or more", fix=f"correct {name}")
        for name in ("gradient_bytes", "optimizer_bytes"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise PlanError(
                    f"{name}={value:g}",
                    expected="bytes per byte of parameters, 0 or more",
                    fix="use 1 for gradients of the parameters' own type, 2 for Adam's state",
                )
        if not 0 <= self.memory_reserve < 1:
            raise PlanError(
                f"memory_reserve={self.memory_reserve:g}",
                expected="a share of the memory, from 0 to below 1",
                fix="use 0.1 to leave a tenth to the framework",
            )
