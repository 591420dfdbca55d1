"""A plan from measurements: processes on several machines measure their devices and network.

Rank 0 measures the model, makes the plan and tells the others. In a run folder it keeps what was
measured and planned, for the next start of the same job.
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
from polyrhythm.run.trainer.plan_cache import CLUSTER, PROFILE, PlanKey, load_cached_plan, save_plan
from polyrhythm.run.trainer.rank_assignment import JobProcesses, distinct_names
from polyrhythm.schedule.plan_schedules import PlannedSchedules
from polyrhythm.sync.replay import DECOUPLED
from polyrhythm.types import Bytes, Seconds

_logger = logging.getLogger(__name__)

_COPIES_PER_WEIGHT = 4  # the weight, its gradient, and the two numbers that Adam keeps
# Of a probe: what all of its rounds may take. A round ends some round trips after its patience.
_PROBE_BUDGET: Seconds = 6.0
_MOST_ROUNDS = 60  # in which no two pairs share a machine; beyond, pairs are measured side by side
_STREAM: Seconds = 0.05
_SHORTEST: Seconds = 2.0  # to wait for one message: what a busy machine may take


def make_auto_plan(
    config: TrainerConfig, model: nn.Module, dataset: Any, processes: JobProcesses, run: Path | None
) -> Plan | None:
    """For all processes of a job alike; None where each may as well be a replica of its own.

    That is so on one machine, if the model fits there, and for a model that cannot be cut. Raises
    PeerError with who was lost, and what rank 0 refuses with in all of them.
    """
    if config.split.num_layers(model) == 1:
        return None
    if len({home.machine for home in processes.hosts()}) == 1:
        fits = run_on_leader(
            processes, "if replicas fit", lambda: _replicas_fit(config, model, processes)
        )
        if fits:
            return None
    found = run_on_leader(
        processes, "if to measure", lambda: _cached_plan(config, model, processes, run)
    )
    began, what = time.monotonic(), "used again"
    if not found:
        with preserve_rng_state(_device(config, processes)):
            cluster = _probe_cluster(config, processes)

        def make() -> str:
            assert cluster is not None, "rank 0 has it"
            plan = _search_plan(config, model, dataset, processes, cluster, run)
            return msgspec.json.encode(plan).decode()

        found = run_on_leader(processes, "the plan", make)
        what = f"measured in {time.monotonic() - began:.1f} s"
    plan = msgspec.json.decode(found, type=Plan)
    if processes.place.rank == 0:
        _logger.info("plan %s: %s", what, _text(plan))
    return plan


def _check_microbatches(config: TrainerConfig) -> None:
    """Before anything is measured: what the planner would refuse after it."""
    size, batch = config.microbatch_size, config.batch_size
    assert batch is not None, "checked"
    if size is not None and batch % size:
        raise PlanError(
            f"a batch of {batch} in micro-batches of {size}, to be planned",
            expected="a size that divides the batch",
            fix=f"use batch_size={max(size, batch // size * size)}, or leave microbatch_size out",
        )


def _replicas_fit(config: TrainerConfig, model: nn.Module, processes: JobProcesses) -> str:
    """Whether this process has room for the whole model and what its optimizer keeps."""
    device = _device(config, processes)
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = usable_memory() // processes.num_processes
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return "yes" if _COPIES_PER_WEIGHT * weights <= min(room, _limit(config) or room) else ""


def _cached_plan(
    config: TrainerConfig, model: nn.Module, processes: JobProcesses, run: Path | None
) -> str:
    """The plan that was made before for the same job, as JSON; nothing if there is none."""
    _check_microbatches(config)
    if run is None:
        return ""
    assert config.batch_size is not None, "checked"
    wanted = PlanKey(
        devices=tuple(distinct_names(processes.device_names())),
        model=_model_text(config, model),
        batch=config.batch_size,
        microbatch_size=config.microbatch_size,
        sync=_sync(config),
    )
    plan = load_cached_plan(run, wanted)
    return "" if plan is None else msgspec.json.encode(plan).decode()


def _probe_cluster(config: TrainerConfig, processes: JobProcesses) -> Cluster | None:
    """On rank 0, devices and links as they are now."""
    place, machines = processes.place, dict(enumerate(h.machine for h in processes.hosts()))
    pairs = list(round_robin_pairs(range(processes.num_processes)))
    num_rounds = sum(len(list(disjoint_rounds(some, machines))) for some in pairs)
    # Where no two processes share a machine, nobody is in the way of another.
    at_once = len(set(machines.values())) == len(machines) or num_rounds > _MOST_ROUNDS
    options = ProbeOptions(
        cluster_name="measured",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        device=_kind(config),
        dtype=str(config.autocast or torch.float32).removeprefix("torch."),
        all_at_once=at_once,
        effort=_effort(len(pairs) if at_once else num_rounds, config.timeout),
    )
    return probe(
        place.with_store_prefix("polyrhythm/probe"), processes.device_names()[place.rank], options
    )


def _effort(num_rounds: int, timeout: Seconds) -> ProbeEffort:
    """As thorough as the time allows. The longest wait is for eight messages: within `timeout`."""
    each = _PROBE_BUDGET / num_rounds
    return ProbeEffort(
        seconds=min(_STREAM, each / 10),
        repeat=3 if each > 10 * _STREAM else 2,
        pair_timeout=min(1.0, each),
        timeout=max(_SHORTEST, timeout / 10),
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
        name=_model_text(config, model),
        source=cluster.source,
        measured_at=cluster.measured_at,
        flops=cluster.devices[0].flops,  # rank 0's, which has measured both
        flops_dtype=cluster.flops_dtype,
        microbatch_size=sizes[0],
        layers=layers,
    )
    assert config.batch_size is not None, "checked"
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
    """With no more memory than the limit; a limit has the reserve in it already."""
    if limit is None:
        return cluster
    most = int(limit / (1 - job.memory_reserve))
    devices = [replace(d, memory=min(d.memory or most, most)) for d in cluster.devices]
    return replace(cluster, devices=tuple(devices))


def _limit(config: TrainerConfig) -> Bytes | None:
    limit = config.memory_limit
    return int(parse(limit, Bytes)) if isinstance(limit, str) else limit


def _sync(config: TrainerConfig) -> str:
    """As the planner knows it."""
    if config.sync in (AUTO, DECOUPLED):
        return DECOUPLED
    return "all_reduce" if config.sync in ("all_reduce", "balanced") else "groups"


def _kind(config: TrainerConfig) -> str:
    """Of device, as a probe takes it."""
    kind = AUTO if config.device is None else torch.device(config.device).type
    return kind if kind in ("cpu", "cuda") else AUTO


def _device(config: TrainerConfig, processes: JobProcesses) -> torch.device:
    if config.device is not None:
        return torch.device(config.device)
    return device_of(AUTO, index=processes.place.local_rank)


def _model_text(config: TrainerConfig, model: nn.Module) -> str:
    """Its shape: a model that is another one has another."""
    number = sum(parameter.numel() for parameter in model.parameters())
    layers = config.split.num_layers(model)
    return f"{type(model).__name__} of {layers} layers, {number} parameters"


def _text(plan: Plan) -> str:
    takes = "" if plan.predicted is None else f", {plan.predicted.step:.3g} s a step by prediction"
    stages = f"{plan.num_stages} stage{'s' * (plan.num_stages > 1)}"
    pipelines = f"{plan.num_pipelines} pipeline{'s' * (plan.num_pipelines > 1)}"
    return f"{stages} x {pipelines}, micro-batches of {plan.microbatch_size}{takes}"
