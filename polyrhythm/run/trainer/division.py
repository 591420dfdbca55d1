"""Divide the layers anew after a loss, over the processes that are left.

A loss leaves spares: stages whose pipeline has lost another one. The planner knows whether a plan
with other stages, which uses them, saves more time in the remaining steps than it costs to move
layers (`plan/after_loss.py`). It needs what the first plan was made from, which every process has
from the start. Each process can make any stage: it keeps the model without the values of its
parameters, which take no memory, and gets the values from the processes that have them.

In exact sync modes only, where all replicas of a stage are equal after each step.
"""

import copy
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.errors import PlanError
from polyrhythm.plan.after_loss import AfterLoss, decide_after_loss
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.survivors import Assignment, device_of, first_assignment
from polyrhythm.run.pipeline.partition import ModelPartition
from polyrhythm.run.trainer.autoplan import (
    layer_blocks,
    limit_memory,
    memory_limit,
    planner_sync,
)
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.rank_assignment import JobProcesses
from polyrhythm.run.trainer.sampler import GlobalBatch
from polyrhythm.types import AUTO, Seconds

# Of the remaining steps: for less, the search is not worthwhile. With 4 devices it takes a second
# or two, with 64 ten, on one core.
_MIN_LEFT: Seconds = 60.0
_MAX_FAILED = 2
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What a plan was made from, as rank 0 sends it."""

    cluster: Cluster
    profile: ModelProfile
    job: TrainingJob


def share_problem(problem: Problem | None, processes: JobProcesses) -> Problem | None:
    """Return rank 0's problem on all processes: rank 0 may be lost."""
    own = None
    if problem is not None:
        own = _Inputs(cluster=problem.cluster, profile=problem.profile, job=problem.job)
    inputs = processes.job_store().broadcast_object(
        "what the plan was made from", own, processes.members, as_type=_Inputs | None
    )
    if inputs is None:
        return None
    return Problem(cluster=inputs.cluster, profile=inputs.profile, job=inputs.job)


class LayerDivision:
    """What a process needs to divide the layers anew."""

    def __init__(
        self, config: TrainerConfig, model: nn.Module, problem: Problem, batch: GlobalBatch
    ) -> None:
        """`model`: the whole one, before any stage is made of it. Raises PlanError."""
        self.num_failed = 0  # epochs one after the other
        self._split = config.split.found(model)
        self._blocks = layer_blocks(config.split, model)
        self._model = _copy_model(model, ())
        job = replace(
            problem.job,
            batch_size=batch.size,
            microbatch_size=batch.microbatch_size,
            sync=planner_sync(config),
            schedule=config.schedule,
            recompute=config.device.recompute,
        )
        limited = limit_memory(problem.cluster, memory_limit(config.device), job)
        self._problem = replace(problem, cluster=limited, job=job)

    @classmethod
    def of_job(
        cls,
        config: TrainerConfig,
        model: nn.Module,
        plan: Plan,
        problem: Problem | None,
        batch: GlobalBatch,
    ) -> "LayerDivision | None":
        """Return what is needed, or None in a job that keeps its layers."""
        devices = {device for pipeline in plan.pipelines for device in pipeline.devices}
        is_planned = (plan.batch, plan.microbatch_size) == (batch.size, batch.microbatch_size)
        is_exact = config.sync.mode != AUTO and config.sync.first_mode.exact
        if (
            problem is None
            or plan.num_stages == 1
            or len(devices) < plan.num_workers
            or not devices <= problem.index.keys()
            or problem.num_layers != sum(plan.layers_per_stage)
            or not (is_planned and is_exact)
            or config.device.float8
        ):
            return None
        try:
            return cls(config, model, problem, batch)
        except Exception as error:  # of deepcopy: the user's modules may raise anything
            _logger.warning("after a loss layers are not divided anew: %s", error)
            return None

    @property
    def may_try(self) -> bool:
        """Whether to try a new division: layers are kept if too many have failed."""
        return self.num_failed < _MAX_FAILED

    def decide(self, kept: Assignment, *, steps: int) -> AfterLoss:
        """Decide for the members of an assignment, which keeps the layers."""
        found = decide_after_loss(
            replace(kept.plan, sync=self._problem.job.sync),
            [device_of(kept, member) for member in kept.members],
            self._problem,
            steps=steps,
            layer_blocks=self._blocks,
            one_stage_per_device=True,
            min_left=_MIN_LEFT,
        )
        if found.plan is None:
            return found
        try:
            self._split.check(self._model, found.plan.layers_per_stage)
            for stage in range(found.plan.num_stages):
                self._extract(self._model, found.plan, stage)
        except PlanError as error:
            return AfterLoss(plan=None, why=f"keep the layers: {error.wrong}")
        return found

    def extract_stage(self, plan: Plan, stage: int, device: torch.device) -> ModelPartition:
        """Make a stage of a new division, whose parameters have no values yet."""
        own = self._extract(self._model, plan, stage).module.parameters()
        part = self._extract(_copy_model(self._model, set(own)), plan, stage)
        part.module.to(device)
        return part

    def _extract(self, model: nn.Module, plan: Plan, stage: int) -> ModelPartition:
        return self._split.extract_stage(
            model, stage, plan.layers_per_stage, recompute=plan.recomputes(stage)
        )


def new_assignment(kept: Assignment, decided: AfterLoss) -> Assignment:
    """Return the assignment of a new plan to the members of `kept`, as spares or not."""
    assert decided.plan is not None, "it was decided to divide the layers"
    member_of = {device_of(kept, member): member for member in kept.members}
    devices = [device for pipeline in decided.plan.pipelines for device in pipeline.devices]
    found = first_assignment(decided.plan, [member_of[device] for device in devices])
    return replace(found, why=decided.why)


def _copy_model(model: nn.Module, with_memory: Collection[nn.Parameter]) -> nn.Module:
    """Copy a model without the values of its parameters: some have memory, the others none."""
    copies: dict[int, object] = {}
    for parameter in model.parameters():
        if parameter in with_memory:
            data = torch.empty(parameter.shape, dtype=parameter.dtype)
        else:
            data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        copied = nn.Parameter(data, requires_grad=parameter.requires_grad)
        vars(copied).update(vars(parameter))  # which an optimizer_fn may read
        copies[id(parameter)] = copied
    return copy.deepcopy(model, copies)
