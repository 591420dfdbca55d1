"""The job's plan: the user's, or made from measurements; then its global batch and shares.

Under `plan="auto"` processes on several machines measure their devices and network. Rank 0 also
measures the model, makes the plan and broadcasts it. It saves measurements and plan in the run
folder, for the next start of the same job.
"""

import logging
import os
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyrhythm.cost.sync import Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.measure import device_of
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.pairs import disjoint_rounds, round_robin_pairs
from polyrhythm.describe.units import parse
from polyrhythm.errors import PlanError
from polyrhythm.plan.all_devices import plan_all_devices
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import PLAN_VARIABLE, Plan, Sources, even_plan
from polyrhythm.plan.problem import Problem
from polyrhythm.run.machine import usable_memory
from polyrhythm.run.probe.probe import ProbeEffort, ProbeOptions, distinct_names, probe
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.layer_profile import (
    layer_blocks,
    preserve_rng_state,
    profile_layers,
    profile_sizes,
)
from polyrhythm.run.trainer.rank_assignment import JobProcesses
from polyrhythm.run.trainer.run_dir import CLUSTER, PROFILE, PlanKey, load_cached_plan, save_plan
from polyrhythm.run.trainer.sampler import GlobalBatch
from polyrhythm.types import AUTO, Bytes, Seconds

_logger = logging.getLogger(__name__)

_COPIES_PER_WEIGHT = 4  # the weight, its gradient, and Adam's two moments
# For all rounds of a probe together. A round ends some round trips after its `pair_timeout`.
_PROBE_BUDGET: Seconds = 6.0
_MAX_ROUNDS = 60  # of pairs that share no machine; above, pairs on one machine run concurrently
_MAX_STREAM: Seconds = 0.05
_MIN_TIMEOUT: Seconds = 2.0  # for one message: a busy machine may need as long
_MICROBATCHES_PER_STAGE = 4  # by default: the pipeline's bubble is then a fifth


def choose_plan(
    config: TrainerConfig,
    model: nn.Module,
    dataset: Any,
    processes: JobProcesses,
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
        plan = AutoPlanner(config, model, dataset, processes).plan()
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


@dataclass(frozen=True, slots=True)
class AutoPlanner:
    """Makes the plan of one job; every process of the job makes it and calls `plan`."""

    config: TrainerConfig
    model: nn.Module
    dataset: Any
    processes: JobProcesses

    def plan(self) -> Plan | None:
        """Return the same plan in all processes; None if each process can be a whole replica.

        That is the case on one machine if the model fits, and for a model that cannot be split.
        Raises PeerError with the name of a lost process, and rank 0's UserError in all processes.
        """
        processes = self.processes
        if self.config.split.num_layers(self.model) == 1:
            return None
        is_one_machine = len({host.machine for host in processes.hosts()}) == 1
        store, members = processes.job_store(), processes.members
        if is_one_machine and store.run_on_leader("if replicas fit", self._replicas_fit, members):
            return None
        plan = store.run_on_leader(
            "the cached plan", self._cached_plan, members, as_type=Plan | None
        )
        start, origin = time.monotonic(), "used again"
        if plan is None:
            with preserve_rng_state(self._device):
                cluster = self._probe_cluster()

            def make() -> Plan:
                assert cluster is not None, "rank 0 has the probe's result"
                return self._search_plan(cluster)

            plan = store.run_on_leader("the plan", make, members, as_type=Plan)
            origin = f"measured in {time.monotonic() - start:.1f} s"
        if processes.ctx.rank == 0:
            _logger.info("plan %s: %s", origin, _summary(plan))
        return plan

    @property
    def _batch_size(self) -> int:
        assert self.config.batch_size is not None, "choose_plan checks it"
        return self.config.batch_size

    @property
    def _device(self) -> torch.device:
        if self.config.device is not None:
            return torch.device(self.config.device)
        return device_of(AUTO, index=self.processes.ctx.local_rank)

    @property
    def _memory_limit(self) -> Bytes | None:
        limit = self.config.memory_limit
        return int(parse(limit, Bytes)) if isinstance(limit, str) else limit

    @property
    def _sync(self) -> str:
        """The planner's name of the sync mode."""
        mode = self.config.sync.first_mode
        if mode.decoupled:
            return Sync.DECOUPLED.value
        return (Sync.ALL_REDUCE if mode.exact else Sync.GROUPS).value

    @property
    def _model_name(self) -> str:
        """The name of the model in the plan cache: its type and size."""
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        layers = self.config.split.num_layers(self.model)
        return f"{type(self.model).__name__} of {layers} layers, {num_parameters} parameters"

    def _check_microbatches(self) -> None:
        """Reject before measuring what the planner would reject afterwards."""
        size, batch = self.config.microbatch_size, self._batch_size
        if size is not None and batch % size:
            raise PlanError(
                f"batch_size={batch} with microbatch_size={size} and plan='auto'",
                expected="a microbatch_size that divides batch_size",
                fix=f"use batch_size={max(size, batch // size * size)}, or omit microbatch_size",
            )

    def _replicas_fit(self) -> bool:
        """Whether the whole model and its optimizer state fit in this process."""
        device = self._device
        if device.type == "cuda":
            capacity = torch.cuda.get_device_properties(device).total_memory
        else:
            capacity = usable_memory() // self.processes.num_processes
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        limit = min(capacity, self._memory_limit or capacity)
        return _COPIES_PER_WEIGHT * weights <= limit

    def _cached_plan(self) -> Plan | None:
        """Return the plan cached for the same job; None if there is none."""
        self._check_microbatches()
        if self.config.run_dir is None:
            return None
        key = PlanKey(
            devices=tuple(distinct_names(self.processes.device_names())),
            model=self._model_name,
            batch=self._batch_size,
            microbatch_size=self.config.microbatch_size,
            sync=self._sync,
        )
        return load_cached_plan(self.config.run_dir, key)

    def _probe_cluster(self) -> Cluster | None:
        """Measure devices and links; returns the cluster on rank 0, None elsewhere."""
        config, processes, ctx = self.config, self.processes, self.processes.ctx
        machines = dict(enumerate(h.machine for h in processes.hosts()))
        pairs = list(round_robin_pairs(range(processes.num_processes)))
        num_rounds = sum(len(list(disjoint_rounds(parallel, machines))) for parallel in pairs)
        # If no two processes share a machine, concurrent pairs do not compete for a network card.
        all_at_once = len(set(machines.values())) == len(machines) or num_rounds > _MAX_ROUNDS
        device_type = AUTO if config.device is None else torch.device(config.device).type
        options = ProbeOptions(
            cluster_name="measured",
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device_type if device_type in ("cpu", "cuda") else AUTO,
            dtype=str(config.autocast or torch.float32).removeprefix("torch."),
            all_at_once=all_at_once,
            effort=_effort(len(pairs) if all_at_once else num_rounds, config.timeout),
        )
        return probe(
            ctx.with_store_prefix("polyrhythm/probe"), processes.device_names()[ctx.rank], options
        )

    def _search_plan(self, cluster: Cluster) -> Plan:
        config, model = self.config, self.model
        sizes = profile_sizes(config, self.processes.num_processes)
        profile = ModelProfile(
            name=self._model_name,
            source=cluster.source,
            measured_at=cluster.measured_at,
            flops=cluster.devices[0].flops,  # rank 0 has measured both device and layers
            flops_dtype=cluster.flops_dtype,
            microbatch_size=sizes[0],
            layers=profile_layers(config, model, self.dataset, sizes=sizes, device=self._device),
        )
        job = TrainingJob(
            batch_size=self._batch_size,
            sync=self._sync,
            microbatch_size=config.microbatch_size,
            schedule=config.schedule,
        )
        problem = Problem(
            cluster=_limited(cluster, self._memory_limit, job),
            profile=profile,
            job=job,
        )
        plan = plan_all_devices(problem, layer_blocks=layer_blocks(config.split, model))
        plan = replace(plan, sources=Sources(cluster=CLUSTER, profile=PROFILE))
        if self.config.run_dir is not None:
            save_plan(self.config.run_dir, cluster, profile, plan)
        return plan


def _effort(num_rounds: int, timeout: Seconds) -> ProbeEffort:
    """Divide the probe's budget among rounds; its longest wait, 8 messages, is below `timeout`."""
    each = _PROBE_BUDGET / num_rounds
    return ProbeEffort(
        seconds=min(_MAX_STREAM, each / 10),
        repeat=3 if each > 10 * _MAX_STREAM else 2,
        pair_timeout=min(1.0, each),
        timeout=max(_MIN_TIMEOUT, timeout / 10),
    )


def _limited(cluster: Cluster, limit: Bytes | None, job: TrainingJob) -> Cluster:
    """Cap the devices' memory; the planner subtracts its reserve, which `limit` excludes."""
    if limit is None:
        return cluster
    cap = int(limit / (1 - job.memory_reserve))
    devices = [replace(d, memory=min(d.memory or cap, cap)) for d in cluster.devices]
    return replace(cluster, devices=tuple(devices))


def _summary(plan: Plan) -> str:
    predicted = "" if plan.predicted is None else f", predicted {plan.predicted.step:.3g} s a step"
    stages = f"{plan.num_stages} stage{'s' * (plan.num_stages > 1)}"
    pipelines = f"{plan.num_pipelines} pipeline{'s' * (plan.num_pipelines > 1)}"
    return f"{stages} x {pipelines}, micro-batches of {plan.microbatch_size}{predicted}"
