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
from polyrhythm.describe.pairs import apart, matchings
from polyrhythm.describe.units import parse
from polyrhythm.errors import PlanError
from polyrhythm.plan.all_devices import plan_for_all
from polyrhythm.plan.job import Job
from polyrhythm.plan.plan import AUTO, Plan, Sources
from polyrhythm.plan.problem import Problem
from polyrhythm.run.machine import usable_memory
from polyrhythm.run.probe.effort import Effort
from polyrhythm.run.probe.probe import ProbeOptions, probe
from polyrhythm.run.trainer.deciding import decided
from polyrhythm.run.trainer.placing import Processes, distinct
from polyrhythm.run.trainer.planned_before import CLUSTER, PROFILE, Wanted, keep, planned_before
from polyrhythm.run.trainer.profiling import (
    layers_together,
    profiled_layers,
    sizes_of,
    undisturbed,
)
from polyrhythm.run.trainer.settings import Settings
from polyrhythm.schedule.planned import PlannedSchedules
from polyrhythm.sync.foreseen import DECOUPLED
from polyrhythm.types import Bytes, Seconds

_logger = logging.getLogger(__name__)

_PER_WEIGHT = 4  # the weight, its gradient, and the two numbers that Adam keeps
# Of a probe: what all of its rounds may take. A round ends some round trips after its patience.
_PROBING: Seconds = 6.0
_MOST_ROUNDS = 60  # in which no two pairs share a machine; beyond, pairs are measured side by side
_STREAM: Seconds = 0.05
_SHORTEST: Seconds = 2.0  # to wait for one message: what a busy machine may take


def automatic_plan(
    settings: Settings, model: nn.Module, dataset: Any, processes: Processes, run: Path | None
) -> Plan | None:
    """For all processes of a job alike; None where each may as well be a replica of its own.

    That is so on one machine, if the model fits there, and for a model that cannot be cut. Raises
    PeerError with who was lost, and what rank 0 refuses with in all of them.
    """
    if settings.cut.num_layers(model) == 1:
        return None
    if len({home.machine for home in processes.homes()}) == 1:
        fits = decided(processes, "if replicas fit", lambda: _if_fits(settings, model, processes))
        if fits:
            return None
    found = decided(processes, "if to measure", lambda: _kept(settings, model, processes, run))
    began, what = time.monotonic(), "used again"
    if not found:
        with undisturbed(_device(settings, processes)):
            cluster = _probed(settings, processes)

        def make() -> str:
            assert cluster is not None, "rank 0 has it"
            plan = _made(settings, model, dataset, processes, cluster, run)
            return msgspec.json.encode(plan).decode()

        found = decided(processes, "the plan", make)
        what = f"measured in {time.monotonic() - began:.1f} s"
    plan = msgspec.json.decode(found, type=Plan)
    if processes.place.rank == 0:
        _logger.info("plan %s: %s", what, _text(plan))
    return plan


def _check_microbatches(settings: Settings) -> None:
    """Before anything is measured: what the planner would refuse after it."""
    size, batch = settings.microbatch_size, settings.batch_size
    assert batch is not None, "checked"
    if size is not None and batch % size:
        raise PlanError(
            f"a batch of {batch} in micro-batches of {size}, to be planned",
            expected="a size that divides the batch",
            fix=f"use batch_size={max(size, batch // size * size)}, or leave microbatch_size out",
        )


def _if_fits(settings: Settings, model: nn.Module, processes: Processes) -> str:
    """Whether this process has room for the whole model and what its optimizer keeps."""
    device = _device(settings, processes)
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = usable_memory() // processes.number
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return "yes" if _PER_WEIGHT * weights <= min(room, _limit(settings) or room) else ""


def _kept(settings: Settings, model: nn.Module, processes: Processes, run: Path | None) -> str:
    """The plan that was made before for the same job, as JSON; nothing if there is none."""
    _check_microbatches(settings)
    if run is None:
        return ""
    assert settings.batch_size is not None, "checked"
    wanted = Wanted(
        devices=tuple(distinct(processes.names())),
        model=_model_text(settings, model),
        batch=settings.batch_size,
        microbatch_size=settings.microbatch_size,
        sync=_sync(settings),
    )
    plan = planned_before(run, wanted)
    return "" if plan is None else msgspec.json.encode(plan).decode()


def _probed(settings: Settings, processes: Processes) -> Cluster | None:
    """On rank 0, devices and links as they are now."""
    place, machines = processes.place, dict(enumerate(h.machine for h in processes.homes()))
    pairs = list(matchings(range(processes.number)))
    num_rounds = sum(len(list(apart(some, machines))) for some in pairs)
    # Where no two processes share a machine, nobody is in the way of another.
    at_once = len(set(machines.values())) == len(machines) or num_rounds > _MOST_ROUNDS
    options = ProbeOptions(
        cluster_name="measured",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        device=_kind(settings),
        dtype=str(settings.autocast or torch.float32).removeprefix("torch."),
        all_at_once=at_once,
        effort=_effort(len(pairs) if at_once else num_rounds, settings.deadline),
    )
    return probe(place.apart("polyrhythm/probe"), processes.names()[place.rank], options)


def _effort(num_rounds: int, deadline: Seconds) -> Effort:
    """As thorough as the time allows. The longest wait is for eight messages: within `deadline`."""
    each = _PROBING / num_rounds
    return Effort(
        seconds=min(_STREAM, each / 10),
        repeat=3 if each > 10 * _STREAM else 2,
        patience=min(1.0, each),
        deadline=max(_SHORTEST, deadline / 10),
    )


def _made(
    settings: Settings,
    model: nn.Module,
    dataset: Any,
    processes: Processes,
    cluster: Cluster,
    run: Path | None,
) -> Plan:
    device = _device(settings, processes)
    sizes = sizes_of(settings, processes.number)
    layers = profiled_layers(settings, model, dataset, sizes=sizes, device=device)
    profile = ModelProfile(
        name=_model_text(settings, model),
        source=cluster.source,
        measured_at=cluster.measured_at,
        flops=cluster.devices[0].flops,  # rank 0's, which has measured both
        flops_dtype=cluster.flops_dtype,
        microbatch_size=sizes[0],
        layers=layers,
    )
    assert settings.batch_size is not None, "checked"
    job = Job(
        batch=settings.batch_size,
        sync=_sync(settings),
        microbatch_size=settings.microbatch_size,
        schedule=settings.schedule,
    )
    problem = Problem(
        cluster=_limited(cluster, _limit(settings), job),
        profile=profile,
        job=job,
        schedules=PlannedSchedules(),
    )
    plan = plan_for_all(problem, layers_together=layers_together(settings.cut, model))
    plan = replace(plan, sources=Sources(cluster=CLUSTER, profile=PROFILE))
    if run is not None:
        keep(run, cluster, profile, plan)
    return plan


def _limited(cluster: Cluster, limit: Bytes | None, job: Job) -> Cluster:
    """With no more memory than the limit; a limit has the reserve in it already."""
    if limit is None:
        return cluster
    most = int(limit / (1 - job.memory_reserve))
    devices = [replace(d, memory=min(d.memory or most, most)) for d in cluster.devices]
    return replace(cluster, devices=tuple(devices))


def _limit(settings: Settings) -> Bytes | None:
    limit = settings.memory_limit
    return int(parse(limit, Bytes)) if isinstance(limit, str) else limit


def _sync(settings: Settings) -> str:
    """As the planner knows it."""
    if settings.sync in (AUTO, DECOUPLED):
        return DECOUPLED
    return "all_reduce" if settings.sync in ("all_reduce", "balanced") else "groups"


def _kind(settings: Settings) -> str:
    """Of device, as a probe takes it."""
    kind = AUTO if settings.device is None else torch.device(settings.device).type
    return kind if kind in ("cpu", "cuda") else AUTO


def _device(settings: Settings, processes: Processes) -> torch.device:
    if settings.device is not None:
        return torch.device(settings.device)
    return device_of(AUTO, index=processes.place.local_rank)


def _model_text(settings: Settings, model: nn.Module) -> str:
    """Its shape: a model that is another one has another."""
    number = sum(parameter.numel() for parameter in model.parameters())
    layers = settings.cut.num_layers(model)
    return f"{type(model).__name__} of {layers} layers, {number} parameters"


def _text(plan: Plan) -> str:
    takes = "" if plan.predicted is None else f", {plan.predicted.step:.3g} s a step by prediction"
    stages = f"{plan.num_stages} stage{'s' * (plan.num_stages > 1)}"
    pipelines = f"{plan.num_pipelines} pipeline{'s' * (plan.num_pipelines > 1)}"
    return f"{stages} x {pipelines}, micro-batches of {plan.microbatch_size}{takes}"
