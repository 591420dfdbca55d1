"""What a job does with what it was given: its plan, its batches, and each pipeline's share."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import AUTO, PLAN_VARIABLE, Plan, even_plan
from polyrhythm.run.trainer.autoplan import make_auto_plan
from polyrhythm.run.trainer.batch_shares import GlobalBatch
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.rank_assignment import JobProcesses

_PER_STAGE = 4  # micro-batches, where nobody says how many: the pipeline's bubble is then a fifth


def choose_plan(
    config: TrainerConfig,
    model: nn.Module,
    dataset: Any,
    processes: JobProcesses,
    run: Path | str | None,
) -> Plan:
    """The plan that was given, for this model; else one from measurements, or of replicas."""
    given = os.environ.get(PLAN_VARIABLE, AUTO) if config.plan == AUTO else config.plan
    num_layers = config.split.num_layers(model)
    if given == AUTO:
        return _auto_plan(config, model, dataset, processes, run)
    plan = given if isinstance(given, Plan) else Plan.load(Path(given))
    planned = sum(plan.layers_per_stage)
    if plan.num_stages > 1 and planned != num_layers:
        raise PlanError(
            f"a plan for {planned} layers, and a model with {num_layers}",
            expected="a plan that was made for this model",
            fix="make one: polyrhythm profile, then polyrhythm plan; or use plan='auto'",
        )
    return plan


def _auto_plan(
    config: TrainerConfig,
    model: nn.Module,
    dataset: Any,
    processes: JobProcesses,
    run: Path | str | None,
) -> Plan:
    if config.batch_size is None:
        raise _missing_batch_size()
    plan = None
    if processes.num_processes > 1 and not processes.are_joined:
        folder = None if run is None else Path(run)
        plan = make_auto_plan(config, model, dataset, processes, folder)
    return plan or even_plan(
        num_layers=config.split.num_layers(model),
        num_stages=1,
        num_pipelines=processes.num_processes,
    )


def choose_global_batch(config: TrainerConfig, plan: Plan) -> GlobalBatch:
    """The global batch and its micro-batches: as they are given, or else as they are planned."""
    size = config.batch_size or plan.batch
    if size is None:
        raise _missing_batch_size()
    if plan.batch is not None and plan.batch != size:
        raise PlanError(
            f"batch_size={size} with a plan for batches of {plan.batch}",
            expected="the batch that was planned for",
            fix=f"leave batch_size out, or plan again: polyrhythm plan --batch {size}",
        )
    each = config.microbatch_size or plan.microbatch_size
    if each is None:
        share = max(1, size // plan.num_pipelines)
        number = 1 if plan.num_stages == 1 else _PER_STAGE * plan.num_stages
        each = max(1, share // number)
    return GlobalBatch(size=size, microbatch_size=each)


def choose_shares(plan: Plan, global_batch: GlobalBatch) -> tuple[int, ...]:
    """Micro-batches of each pipeline in a step, where all make each step together."""
    planned = [pipeline.num_microbatches for pipeline in plan.pipelines]
    shares = tuple(number for number in planned if number is not None)
    if len(shares) == plan.num_pipelines and sum(shares) == global_batch.num_microbatches:
        return shares
    return global_batch.equal_shares(plan.num_pipelines)


def _missing_batch_size() -> PlanError:
    return PlanError(
        "no batch_size",
        expected="how many samples a step has, of all pipelines together",
        fix="give Trainer(..., batch_size=64), or a plan that says it",
    )
