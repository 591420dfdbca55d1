"""Choose the job's plan, its global batch, and each pipeline's share of it."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import AUTO, PLAN_VARIABLE, Plan, even_plan
from polyrhythm.run.trainer.autoplan import AutoPlanner
from polyrhythm.run.trainer.batch_shares import GlobalBatch
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.rank_assignment import JobProcesses

_MICROBATCHES_PER_STAGE = 4  # by default: the pipeline's bubble is then a fifth


def choose_plan(
    config: TrainerConfig,
    model: nn.Module,
    dataset: Any,
    processes: JobProcesses,
    run: Path | str | None,
) -> Plan:
    """Return the configured plan, or one from measurements, or one stage per replica."""
    source = os.environ.get(PLAN_VARIABLE, AUTO) if config.plan == AUTO else config.plan
    num_layers = config.split.num_layers(model)
    if source != AUTO:
        return _given_plan(source, num_layers)
    if config.batch_size is None:
        raise _missing_batch_size()
    plan, num_processes = None, processes.num_processes
    if num_processes > 1 and not processes.are_joined:
        folder = None if run is None else Path(run)
        plan = AutoPlanner(config, model, dataset, processes, folder).plan()
    return plan or even_plan(num_layers=num_layers, num_stages=1, num_pipelines=num_processes)


def _given_plan(source: Plan | Path | str, num_layers: int) -> Plan:
    plan = source if isinstance(source, Plan) else Plan.load(Path(source))
    planned = sum(plan.layers_per_stage)
    if plan.num_stages > 1 and planned != num_layers:
        raise PlanError(
            f"a plan for {planned} layers, and a model with {num_layers}",
            expected="a plan for this model",
            fix="make one: polyrhythm profile, then polyrhythm plan; or use plan='auto'",
        )
    return plan


def choose_global_batch(config: TrainerConfig, plan: Plan) -> GlobalBatch:
    """Return the global batch: sizes from the arguments, then from the plan, then defaults."""
    size = config.batch_size or plan.batch
    if size is None:
        raise _missing_batch_size()
    if plan.batch is not None and plan.batch != size:
        raise PlanError(
            f"batch_size={size} with a plan for batches of {plan.batch}",
            expected="the plan's batch size",
            fix=f"omit batch_size, or plan again: polyrhythm plan --batch-size {size}",
        )
    each = config.microbatch_size or plan.microbatch_size
    if each is None:
        share = max(1, size // plan.num_pipelines)
        num_microbatches = 1 if plan.num_stages == 1 else _MICROBATCHES_PER_STAGE * plan.num_stages
        each = max(1, share // num_microbatches)
    return GlobalBatch(size=size, microbatch_size=each)


def choose_shares(plan: Plan, global_batch: GlobalBatch) -> tuple[int, ...]:
    """Return each pipeline's number of micro-batches per step in the lockstep sync modes."""
    planned = [pipeline.num_microbatches for pipeline in plan.pipelines]
    shares = tuple(number for number in planned if number is not None)
    if len(shares) == plan.num_pipelines and sum(shares) == global_batch.num_microbatches:
        return shares
    return global_batch.equal_shares(plan.num_pipelines)


def _missing_batch_size() -> PlanError:
    return PlanError(
        "no batch_size",
        expected="the number of samples per step, summed over all pipelines",
        fix="pass Trainer(..., batch_size=64), or a plan with a batch size",
    )
