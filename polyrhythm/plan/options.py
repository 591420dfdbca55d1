"""What the planner optimizes, what it may not change, and the memory that training needs.

One record for all: the command line reads `PlanOptions`, `make_plan` takes them, and with the size
of a batch they are the `TrainingJob` of a planning problem.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from polyrhythm.errors import PlanError

Objective = Literal["time", "cost", "both"]
Recompute = Literal["auto", "never", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    objective: Objective = "time"
    """The fastest step, the cheapest step, or the Pareto front of both."""
    sync: str | None = None
    """Sync mode of the replicas: all_reduce, decoupled or groups; by default that of a running
    plan, or all_reduce."""
    num_stages: int | None = None
    """Number of stages, instead of the best one."""
    num_pipelines: int | None = None
    """Number of pipelines, instead of the best one."""
    microbatch_size: int | None = None
    """Samples per micro-batch, instead of the best profiled size."""
    schedule: str = "auto"
    """Schedule of all pipelines, such as 1f1b, instead of the best for each."""
    unequal: bool = True
    """Pipelines may differ in their numbers of micro-batches and of devices."""
    gradient_bytes: float = 1.0
    """Gradient bytes per byte of parameters: 2 for float32 gradients of float16 weights."""
    optimizer_bytes: float = 2.0
    """Optimizer bytes per byte of parameters: 2 for Adam, 6 for float32 Adam on float16 weights."""
    memory_reserve: float = 0.1
    """Fraction of each device's memory that stays free."""
    buddy: bool = True
    """With decoupled: count the copy of another replica's shard that each device holds, without
    which training ends with the loss of a device; as in SyncConfig."""
    recompute: Recompute = "auto"
    """Recompute activations in the backward (activation checkpointing): auto on the stages whose
    memory would not suffice, or that are faster with it; never; or always, on all stages."""

    def job(self, batch_size: int) -> "TrainingJob":
        """Return the job with these options; `batch_size` samples per step, over all pipelines."""
        options = {each.name: getattr(self, each.name) for each in fields(PlanOptions)}
        return TrainingJob(**{**options, "sync": self.sync or "all_reduce"}, batch_size=batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob(PlanOptions):
    """The training job, as far as a plan depends on it."""

    batch_size: int  # samples per step, over all pipelines
    sync: str = "all_reduce"  # see cost.sync.Sync

    def __post_init__(self) -> None:
        # Not in PlanOptions: the command line parser would wrap the message.
        if self.objective not in get_args(Objective):
            raise PlanError(
                f"objective={self.objective!r}",
                expected=f"one of {', '.join(get_args(Objective))}",
                fix="use time, cost or both",
            )
        if self.recompute not in get_args(Recompute):
            raise PlanError(
                f"recompute={self.recompute!r}",
                expected=f"one of {', '.join(get_args(Recompute))}",
                fix="use auto, never or always",
            )
        for name in ("batch_size", "num_stages", "num_pipelines", "microbatch_size"):
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
