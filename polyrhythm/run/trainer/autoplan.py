"""`plan="auto"`: processes on several machines measure their devices and network, rank 0 plans.

Rank 0 also measures the model, and broadcasts the plan. It saves measurements and plan in the run
folder, for the next start of the same job.
"""

import logging
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.measure import device_of
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.pairs import disjoint_rounds, round_robin_pairs
from polyrhythm.describe.units import parse
from polyrhythm.errors import PlanError
from polyrhythm.plan.all_devices import plan_all_devices
from polyrhythm.plan.job import TrainingJob
from polyrhythm.plan.plan import AUTO, Plan, Sources
from polyrhythm.plan.problem import Problem
from polyrhythm.run.machine import usable_memory
from polyrhythm.run.probe.effort import ProbeEffort
from polyrhythm.run.probe.probe import ProbeOptions, probe
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.layer_profile import (
    layer_blocks,
    preserve_rng_state,
    profile_layers,
    profile_sizes,
)
from polyrhythm.run.trainer.leader import run_on_leader
from polyrhythm.run.trainer.rank_assignment import JobProcesses, distinct_names
from polyrhythm.run.trainer.run_dir import CLUSTER, PROFILE, PlanKey, load_cached_plan, save_plan
from polyrhythm.schedule.plan_schedules import PlannedSchedules
from polyrhythm.sync.replay import DECOUPLED
from polyrhythm.types import Bytes, Seconds

_logger = logging.getLogger(__name__)

_COPIES_PER_WEIGHT = 4  # the weight, its gradient, and Adam's two moments
# For all rounds of a probe together. A round ends some round trips after its `pair_timeout`.
_PROBE_BUDGET: Seconds = 6.0
_MAX_ROUNDS = 60  # of pairs that share no machine; above, pairs on one machine run concurrently
_MAX_STREAM: Seconds = 0.05
_MIN_TIMEOUT: Seconds = 2.0  # for one message: a busy machine may need as long


def make_auto_plan(
    config: TrainerConfig, model: nn.Module, dataset: Any, processes: JobProcesses, run: Path | None
) -> Plan | None:
    """Return the same plan in all processes; None if each process can be a whole replica.

    That is the case on one machine if the model fits, and for a model that cannot be split.
    Raises PeerError with the name of a lost process, and rank 0's UserError in all processes.
    """
    if config.split.num_layers(model) == 1:
        return None
    if len({host.machine for host in processes.hosts()}) == 1:
        fits = run_on_leader(
            processes, "if replicas fit", lambda: _replicas_fit(config, model, processes)
        )
        if fits:
            return None
    encoded = run_on_leader(
        processes, "the cached plan", lambda: _cached_plan(config, model, processes, run)
    )
    start, origin = time.monotonic(), "used again"
    if not encoded:
        with preserve_rng_state(_device(config, processes)):
            cluster = _probe_cluster(config, processes)

        def make() -> str:
            assert cluster is not None, "rank 0 has the probe's result"
            plan = _search_plan(config, model, dataset, processes, cluster, run)
            return msgspec.json.encode(plan).decode()

        encoded = run_on_leader(processes, "the plan", make)
        origin = f"measured in {time.monotonic() - start:.1f} s"
    plan = msgspec.json.decode(encoded, type=Plan)
    if processes.ctx.rank == 0:
        _logger.info("plan %s: %s", origin, _summary(plan))
    return plan


def _check_microbatches(config: TrainerConfig) -> None:
    """Reject before measuring what the planner would reject afterwards."""
    size, batch = config.microbatch_size, config.batch_size
    assert batch is not None, "choose_plan checks it"
    if size is not None and batch % size:
        raise PlanError(
            f"batch_size={batch} with microbatch_size={size} and plan='auto'",
            expected="a microbatch_size that divides batch_size",
            fix=f"use batch_size={max(size, batch // size * size)}, or omit microbatch_size",
        )


def _replicas_fit(config: TrainerConfig, model: nn.Module, processes: JobProcesses) -> str:
    """Return "yes" if the whole model and its optimizer state fit in this process, else ""."""
    device = _device(config, processes)
    if device.type == "cuda":
        capacity = torch.cuda.get_device_properties(device).total_memory
    else:
        capacity = usable_memory() // processes.num_processes
    weights = sum(parameter.nbytes for parameter in model.parameters())
    limit = min(capacity, _limit(config) or capacity)
    return "yes" if _COPIES_PER_WEIGHT * weights <= limit else ""


def _cached_plan(
    config: TrainerConfig, model: nn.Module, processes: JobProcesses, run: Path | None
) -> str:
    """Return the plan cached for the same job as JSON; "" if there is none."""
    _check_microbatches(config)
    if run is None:
        return ""
    assert config.batch_size is not None, "choose_plan checks it"
    key = PlanKey(
        devices=tuple(distinct_names(processes.device_names())),
        model=_model_name(config, model),
        batch=config.batch_size,
        microbatch_size=config.microbatch_size,
        sync=_sync(config),
    )
    plan = load_cached_plan(run, key)
    return "" if plan is None else msgspec.json.encode(plan).decode()


def _probe_cluster(config: TrainerConfig, processes: JobProcesses) -> Cluster | None:
    """Measure devices and links; returns the cluster on rank 0, None elsewhere."""
    ctx, machines = processes.ctx, dict(enumerate(h.machine for h in processes.hosts()))
    pairs = list(round_robin_pairs(range(processes.num_processes)))
    num_rounds = sum(len(list(disjoint_rounds(parallel, machines))) for parallel in pairs)
    # If no two processes share a machine, concurrent pairs do not compete for a network card.
    all_at_once = len(set(machines.values())) == len(machines) or num_rounds > _MAX_ROUNDS
    options = ProbeOptions(
        cluster_name="measured",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        device=_device_type(config),
        dtype=str(config.autocast or torch.float32).removeprefix("torch."),
        all_at_once=all_at_once,
        effort=_effort(len(pairs) if all_at_once else num_rounds, config.timeout),
    )
    return probe(
        ctx.with_store_prefix("polyrhythm/probe"), processes.device_names()[ctx.rank], options
    )


def _effort(num_rounds: int, timeout: Seconds) -> ProbeEffort:
    """Divide the probe's budget among rounds; its longest wait, 8 messages, is below `timeout`."""
    each = _PROBE_BUDGET / num_rounds
    return ProbeEffort(
        seconds=min(_MAX_STREAM, each / 10),
        repeat=3 if each > 10 * _MAX_STREAM else 2,
        pair_timeout=min(1.0, each),
        timeout=max(_MIN_TIMEOUT, timeout / 10),
    )


def _search_plan(
    config: TrainerConfig,
    model: nn.Module,
    dataset: Any,
    processes: JobProcesses,
    cluster: Cluster,
    run: Path | None,
) -> Plan:
    device = _device(config, processes)
    sizes = profile_sizes(config, processes.num_processes)
    layers = profile_layers(config, model, dataset, sizes=sizes, device=device)
    profile = ModelProfile(
        name=_model_name(config, model),
        source=cluster.source,
        measured_at=cluster.measured_at,
        flops=cluster.devices[0].flops,  # rank 0 has measured both device and layers
        flops_dtype=cluster.flops_dtype,
        microbatch_size=sizes[0],
        layers=layers,
    )
    assert config.batch_size is not None, "choose_plan checks it"
    job = TrainingJob(
        batch=config.batch_size,
        sync=_sync(config),
        microbatch_size=config.microbatch_size,
        schedule=config.schedule,
    )
    problem = Problem(
        cluster=_limited(cluster, _limit(config), job),
        profile=profile,
        job=job,
        schedules=PlannedSchedules(),
    )
    plan = plan_all_devices(problem, layer_blocks=layer_blocks(config.split, model))
    plan = replace(plan, sources=Sources(cluster=CLUSTER, profile=PROFILE))
    if run is not None:
        save_plan(run, cluster, profile, plan)
    return plan


def _limited(cluster: Cluster, limit: Bytes | None, job: TrainingJob) -> Cluster:
    """Cap the devices' memory; the planner subtracts its reserve, which `limit` excludes."""
    if limit is None:
        return cluster
    cap = int(limit / (1 - job.memory_reserve))
    devices = [replace(d, memory=min(d.memory or cap, cap)) for d in cluster.devices]
    return replace(cluster, devices=tuple(devices))


def _limit(config: TrainerConfig) -> Bytes | None:
    limit = config.memory_limit
    return int(parse(limit, Bytes)) if isinstance(limit, str) else limit


def _sync(config: TrainerConfig) -> str:
    """Return the planner's name of the sync mode."""
    if config.sync in (AUTO, DECOUPLED):
        return DECOUPLED
    return "all_reduce" if config.sync in ("all_reduce", "balanced") else "groups"


def _device_type(config: TrainerConfig) -> str:
    """Return the `device` option of the probe."""
    device_type = AUTO if config.device is None else torch.device(config.device).type
    return device_type if device_type in ("cpu", "cuda") else AUTO


def _device(config: TrainerConfig, processes: JobProcesses) -> torch.device:
    if config.device is not None:
        return torch.device(config.device)
    return device_of(AUTO, index=processes.ctx.local_rank)


def _model_name(config: TrainerConfig, model: nn.Module) -> str:
    """Return the name of a model in the plan cache: its type and size."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = config.split.num_layers(model)
    return f"{type(model).__name__} of {layers} layers, {num_parameters} parameters"


def _summary(plan: Plan) -> str:
    predicted = "" if plan.predicted is None else f", predicted {plan.predicted.step:.3g} s a step"
    stages = f"{plan.num_stages} stage{'s' * (plan.num_stages > 1)}"
    pipelines = f"{plan.num_pipelines} pipeline{'s' * (plan.num_pipelines > 1)}"
    return f"{stages} x {pipelines}, micro-batches of {plan.microbatch_size}{predicted}"
