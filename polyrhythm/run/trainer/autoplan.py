"""The job's plan: the user's, or made from measurements; then its global batch and shares.

With `stages=` and `pipelines=`, layers are assigned by measured times on several machines; on one,
and if the whole model is too large to be measured on rank 0's device, by numbers of parameters.

Under `plan="auto"` processes on several machines measure their devices and network. Rank 0 also
measures the layers of a copy of the model, makes the plan and broadcasts it. It saves measurements
and plan in the run folder, for the next start of the same job. Random states are restored
afterwards: training is the same with and without measurements.
"""

import contextlib
import copy
import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.cost.sync import Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import Layer, ModelProfile, blocks_with_parameters
from polyrhythm.describe.pairs import disjoint_rounds, round_robin_pairs
from polyrhythm.describe.units import parse
from polyrhythm.errors import PlanError, UserError
from polyrhythm.plan.all_devices import plan_all_devices
from polyrhythm.plan.degrees import Degrees
from polyrhythm.plan.inputs import planned_inputs, problem_of
from polyrhythm.plan.options import PlanOptions, TrainingJob
from polyrhythm.plan.partition import StageMemoryLimit, partition_within_memory
from polyrhythm.plan.plan import PLAN_VARIABLE, PipelinePlan, Plan, Sources, even_plan
from polyrhythm.plan.problem import Problem
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.data.loader import as_arguments
from polyrhythm.run.machine import machine_name, usable_memory
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.probe.probe import ProbeEffort, ProbeOptions, distinct_names, probe
from polyrhythm.run.profile.profile import (
    ProfiledModel,
    measure_layers,
    recomputing_layers,
    split_layers_by_name,
)
from polyrhythm.run.trainer.check_model import first_samples
from polyrhythm.run.trainer.config import DeviceConfig, TrainerConfig
from polyrhythm.run.trainer.rank_assignment import JobProcesses, device_of_process
from polyrhythm.run.trainer.run_dir import (
    CLUSTER,
    PLAN,
    PROFILE,
    PlanKey,
    load_cached_plan,
    save_plan,
)
from polyrhythm.run.trainer.sampler import GlobalBatch
from polyrhythm.types import AUTO, Bytes, Seconds

_logger = logging.getLogger(__name__)

_COPIES_PER_WEIGHT = 4  # the weight, its gradient, and Adam's two moments
# For all rounds of a probe together. A round ends some round trips after its `pair_timeout`.
_PROBE_BUDGET: Seconds = 6.0
_MAX_ROUNDS = 60  # of pairs that share no machine; above, pairs on one machine run concurrently
_MAX_STREAM: Seconds = 0.05
_MIN_TIMEOUT: Seconds = 2.0  # for one message: a busy machine may need as long
_MAX_MICROBATCH_SIZE = 64  # samples to profile; larger ones use no device better
_REPEAT = 3  # of a profiled layer
_MICROBATCHES_PER_STAGE = 4  # by default: the pipeline's bubble is then a fifth


def choose_plan(
    config: TrainerConfig,
    model: nn.Module,
    dataset: Any,
    processes: JobProcesses,
) -> tuple[Plan, Problem | None]:
    """Return the configured plan, or one from measurements, or one stage per replica.

    Measurements tell which stages recompute; the configuration may say all or none. On rank 0 also
    return the problem that the plan solves, if it is known.
    """
    plan, problem = _choose_plan(config, model, dataset, processes)
    if config.device.recompute != AUTO:
        recompute = (config.device.recompute == "always",) * plan.num_stages
        plan = replace(plan, recompute=recompute)
    return plan, problem


def _choose_plan(
    config: TrainerConfig, model: nn.Module, dataset: Any, processes: JobProcesses
) -> tuple[Plan, Problem | None]:
    source = os.environ.get(PLAN_VARIABLE, AUTO) if config.plan == AUTO else config.plan
    degrees = _chosen_degrees(config, source)
    if source != AUTO:
        plan = _given_plan(source, config.split, model)
        is_needed = processes.ctx.keeps_survivors and processes.ctx.rank == 0
        return plan, _given_problem(plan, source) if is_needed else None
    if config.batch_size is None:
        raise _missing_batch_size()
    num_stages, num_processes = None, processes.num_processes
    if degrees.are_given:
        num_stages, num_pipelines = degrees.complete(num_processes)
        _check_splittable(config.split, model, num_stages)
        num_blocks = len(layer_blocks(config.split, model))
        even_plan(num_layers=num_blocks, num_stages=num_stages, num_pipelines=num_pipelines)
    if num_processes > 1 and not processes.are_joined and num_stages != 1:
        planner = AutoPlanner(config, model, dataset, processes, num_stages)
        if (found := planner.plan()) is not None:
            return found, planner.problem
    if num_stages is not None:
        return _partitioned_plan(config, model, processes, num_stages), None
    num_layers = config.split.num_layers(model)
    return even_plan(num_layers=num_layers, num_stages=1, num_pipelines=num_processes), None


def _chosen_degrees(config: TrainerConfig, source: Plan | Path | str) -> Degrees:
    """Return the script's stages and pipelines, or those of the command line."""
    of_command, of_script = Degrees.from_environment(os.environ), config.degrees
    degrees = of_script if of_script.are_given else of_command
    what = "" if source == AUTO or not degrees.are_given else "a plan"
    if of_script.are_given and of_command.are_given and of_script != of_command:
        what = f"{of_command} on the command line"
    if what:
        raise PlanError(
            f"{degrees} and {what}",
            expected="the numbers of stages and pipelines in one place",
            fix=f"omit the plan (plan=, --plan, {PLAN_VARIABLE}), or omit stages and pipelines "
            "in the script or on the command line",
        )
    return degrees


def _check_splittable(split: LayerSplit, model: nn.Module, num_stages: int) -> None:
    """Refuse several stages of a model without a list of layers; name the lists that it has."""
    if num_stages == 1 or isinstance(model, nn.Sequential) or split.num_layers(model) > 1:
        return
    try:
        split.extract_stage(model, 0, (1,) * num_stages)
    except PlanError as error:
        modules = model.named_modules(remove_duplicate=False)
        lists = {name: len(each) for name, each in modules if isinstance(each, nn.ModuleList)}
        if split.layers is not None or not lists:
            raise
        names = sorted(lists, key=lambda name: -lists[name])[:4]
        shown = ", ".join(f"{name} ({lists[name]})" for name in names)
        raise PlanError(
            error.wrong,
            expected=error.expected,
            fix=f'name `split=`: split=LayerSplit(layers="{names[0]}", prologue=[...], '
            f"epilogue=[...]); lists of this model, with their lengths: {shown}",
        ) from None


def _given_plan(source: Plan | Path | str, split: LayerSplit, model: nn.Module) -> Plan:
    plan = source if isinstance(source, Plan) else Plan.load(Path(source))
    _check_splittable(split, model, plan.num_stages)
    planned, num_layers = sum(plan.layers_per_stage), split.num_layers(model)
    if plan.num_stages > 1 and planned != num_layers:
        raise PlanError(
            f"a plan for {planned} layers, and a model with {num_layers}",
            expected="a plan for this model",
            fix="make one: polyrhythm profile, then polyrhythm plan; or use plan='auto'",
        )
    return plan


def _given_problem(plan: Plan, source: Plan | Path | str) -> Problem | None:
    """Return the problem that a given plan solves; None if it does not name its inputs."""
    if plan.sources is None:
        return None
    file = None if isinstance(source, Plan) else Path(source)
    try:
        cluster, profile = planned_inputs(plan, file, cluster=None, profile=None)
        return problem_of(plan, cluster, profile)
    except UserError as error:
        _logger.info("what the plan was made from is not known: %s", error.wrong)
        return None


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


def planner_sync(config: TrainerConfig) -> str:
    """Return the planner's name of the sync mode."""
    mode = config.sync.first_mode
    if mode.decoupled:
        return Sync.DECOUPLED.value
    return (Sync.ALL_REDUCE if mode.exact else Sync.GROUPS).value


class DeviceMemory(msgspec.Struct, frozen=True):
    """The memory of a process's device, which processes on the same device share."""

    machine: str
    device: str
    nbytes: Bytes
    limit: Bytes | None  # the user's, for this process

    @classmethod
    def of(cls, config: DeviceConfig, ctx: DistContext) -> "DeviceMemory":
        device = device_of_process(config.name, ctx)
        nbytes = usable_memory()
        if device.type == "cuda":
            nbytes = torch.cuda.get_device_properties(device).total_memory
        return cls(machine_name(), str(device), nbytes, memory_limit(config))

    def share(self, everyone: Sequence["DeviceMemory"]) -> Bytes:
        """Return what this process may use, less the planner's reserve."""
        sharing = sum(
            (each.machine, each.device) == (self.machine, self.device) for each in everyone
        )
        share = int(self.nbytes * (1 - PlanOptions().memory_reserve)) // sharing
        return share if self.limit is None else min(share, self.limit)


def memory_limit(config: DeviceConfig) -> Bytes | None:
    limit = config.memory_limit
    return int(parse(limit, Bytes)) if isinstance(limit, str) else limit


def _partitioned_plan(
    config: TrainerConfig, model: nn.Module, processes: JobProcesses, num_stages: int
) -> Plan:
    """Assign layers to stages by their numbers of parameters, within the memory of the devices."""
    blocks = layer_blocks(config.split, model)
    num_pipelines = processes.num_processes // num_stages
    own = DeviceMemory.of(config.device, processes.ctx)
    everyone = processes.gather("memory", own, DeviceMemory)
    limits = [
        min(
            (StageMemoryLimit(f"{d.machine}:{d.device}", d.share(everyone)) for d in replicas),
            key=lambda limit: limit.nbytes,
        )
        for replicas in (everyone[stage::num_stages] for stage in range(num_stages))
    ]
    parts = list(split_layers_by_name(config.split, model, ()).values())
    ends = list(accumulate(blocks, initial=0))
    work, needed = count_parameters([parts[a:b] for a, b in pairwise(ends)])
    counts = partition_within_memory(work, needed, limits)
    cuts = [ends[end] for end in accumulate(counts, initial=0)]
    layers_per_stage = tuple(b - a for a, b in pairwise(cuts))
    return Plan(layers_per_stage=layers_per_stage, pipelines=(PipelinePlan(),) * num_pipelines)


def count_parameters(
    blocks: Sequence[Sequence[nn.Module]],
) -> tuple[list[float], NDArray[np.float64]]:
    """Return the work of each block of layers, and [a, b]: the bytes that blocks a to b need.

    The work is the number of parameters, without those of embeddings, which are only looked up. A
    parameter that several blocks share counts once in a stage; a frozen one has no gradient and no
    optimizer state.
    """
    work: list[float] = []
    held: list[dict[nn.Parameter, Bytes]] = []
    for block in blocks:
        modules = [module for layer in block for module in layer.modules()]
        computed = {
            parameter
            for module in modules
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
            for parameter in module.parameters(recurse=False)
        }
        work.append(float(sum(parameter.numel() for parameter in computed)))
        held.append(
            {
                parameter: parameter.nbytes * (_COPIES_PER_WEIGHT if parameter.requires_grad else 1)
                for layer in block
                for parameter in layer.parameters()
            }
        )
    needed = np.full((len(blocks) + 1, len(blocks) + 1), np.inf)
    for first in range(len(blocks)):
        inside: dict[nn.Parameter, Bytes] = {}
        for end in range(first + 1, len(blocks) + 1):
            inside |= held[end - 1]
            needed[first, end] = sum(inside.values())
    return work, needed


@dataclass(slots=True)
class AutoPlanner:
    """Makes the plan of one job; every process of the job makes it and calls `plan`."""

    config: TrainerConfig
    model: nn.Module
    dataset: Any
    processes: JobProcesses
    num_stages: int | None = None  # None: the planner chooses
    problem: Problem | None = field(default=None, init=False)  # on rank 0, that the plan solves

    def plan(self) -> Plan | None:
        """Return the same plan in all processes; None if nothing need be measured.

        That is the case on one machine if the model fits, and for a model that cannot be split;
        with given stages, on one machine, and for a model that is too large to be measured.
        Raises PeerError with the name of a lost process, and rank 0's UserError in all processes.
        """
        processes = self.processes
        if self.config.split.num_layers(self.model) == 1:
            return None
        is_one_machine = len({host.machine for host in processes.hosts()}) == 1
        if is_one_machine and self.num_stages is not None:
            return None
        store, members = processes.job_store(), processes.members
        # With given stages the whole model must fit to be measured, without them to be replicated.
        if is_one_machine or self.num_stages is not None:
            fits = store.run_on_leader("if replicas fit", self._replicas_fit, members)
            if fits == (self.num_stages is None):
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
        return device_of_process(self.config.device.name, self.processes.ctx)

    @property
    def _memory_limit(self) -> Bytes | None:
        return memory_limit(self.config.device)

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
            sync=planner_sync(self.config),
            num_stages=self.num_stages,
            recompute=self.config.device.recompute,
            buddy=self._buddy,
        )
        plan = load_cached_plan(self.config.run_dir, key)
        if plan is not None:
            file = self.config.run_dir / PLAN
            # Without its inputs the plan is used all the same.
            with contextlib.suppress(UserError):
                self.problem = self._problem_of(
                    *planned_inputs(plan, file, cluster=None, profile=None)
                )
        return plan

    @property
    def _buddy(self) -> bool:
        """Whether each shard of the optimizer's state has a copy, if the job is decoupled."""
        return self.config.sync.buddy and self.processes.ctx.keeps_survivors

    def _probe_cluster(self) -> Cluster | None:
        """Measure devices and links; returns the cluster on rank 0, None elsewhere."""
        config, processes, ctx = self.config, self.processes, self.processes.ctx
        machines = dict(enumerate(h.machine for h in processes.hosts()))
        pairs = list(round_robin_pairs(range(processes.num_processes)))
        num_rounds = sum(len(list(disjoint_rounds(parallel, machines))) for parallel in pairs)
        # If no two processes share a machine, concurrent pairs do not compete for a network card.
        all_at_once = len(set(machines.values())) == len(machines) or num_rounds > _MAX_ROUNDS
        name = config.device.name
        device_type = AUTO if name is None else torch.device(name).type
        options = ProbeOptions(
            cluster_name="measured",
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device_type if device_type in ("cpu", "cuda") else AUTO,
            dtype=str(config.device.autocast or torch.float32).removeprefix("torch."),
            all_at_once=all_at_once,
            nccl=False,
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
        self.problem = problem = self._problem_of(cluster, profile)
        plan = plan_all_devices(problem, layer_blocks=layer_blocks(config.split, model))
        buddy = problem.job.buddy
        plan = replace(plan, sources=Sources(cluster=CLUSTER, profile=PROFILE, buddy=buddy))
        if self.config.run_dir is not None:
            save_plan(self.config.run_dir, cluster, profile, plan)
        return plan

    def _problem_of(self, cluster: Cluster, profile: ModelProfile) -> Problem:
        config = self.config
        job = TrainingJob(
            batch_size=self._batch_size,
            sync=planner_sync(config),
            microbatch_size=config.microbatch_size,
            schedule=config.schedule,
            num_stages=self.num_stages,
            recompute=config.device.recompute,
            buddy=self._buddy,
        )
        limited = limit_memory(cluster, self._memory_limit, job)
        return Problem(cluster=limited, profile=profile, job=job)


def _effort(num_rounds: int, timeout: Seconds) -> ProbeEffort:
    """Divide the probe's budget among rounds; its longest wait, 8 messages, is below `timeout`."""
    each = _PROBE_BUDGET / num_rounds
    return ProbeEffort(
        seconds=min(_MAX_STREAM, each / 10),
        repeat=3 if each > 10 * _MAX_STREAM else 2,
        pair_timeout=min(1.0, each),
        timeout=max(_MIN_TIMEOUT, timeout / 10),
    )


def limit_memory(cluster: Cluster, limit: Bytes | None, job: TrainingJob) -> Cluster:
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
    number = sum(plan.recompute)
    recompute = f", {number} of {plan.num_stages} stages recompute activations" if number else ""
    return f"{stages} x {pipelines}, micro-batches of {plan.microbatch_size}{recompute}{predicted}"


def profile_sizes(config: TrainerConfig, num_processes: int) -> tuple[int, ...]:
    """Return the sizes to measure, largest first; a batch has a micro-batch per process."""
    assert config.batch_size is not None, "choose_plan checks it"
    if config.microbatch_size is not None:
        return (config.microbatch_size,)
    largest = max(1, min(_MAX_MICROBATCH_SIZE, config.batch_size // num_processes))
    divisors = [size for size in range(1, largest + 1) if config.batch_size % size == 0]
    between = min(divisors, key=lambda size: abs(size * size - divisors[-1]))
    return tuple(sorted({divisors[-1], between, 1}, reverse=True))


def profile_layers(
    config: TrainerConfig,
    model: nn.Module,
    dataset: Any,
    *,
    sizes: tuple[int, ...],
    device: torch.device,
) -> tuple[Layer, ...]:
    """Profile every layer that a stage may start with.

    Skips a size at which a layer fails, except for the first of `sizes`. Raises DescriptionError,
    DataError and PlanError.
    """
    with preserve_rng_state(device):
        inputs = first_samples(config, dataset, max(sizes)).inputs
        arguments, keywords = as_arguments(inputs)
        copied, names = _deepcopy_model(model), tuple(keywords)
        layers = split_layers_by_name(config.split, copied, names)
        example = (*arguments, *keywords.values())
        tensors = [x for x in pytree.tree_leaves(example) if isinstance(x, Tensor) and x.dim()]
        if not tensors:
            raise PlanError(
                f"inputs of type {type(inputs).__name__}, without a tensor",
                expected="samples whose inputs are a tensor, several, or several by name",
                fix="pass a plan, or a dataset whose items are (inputs, target)",
            )
        subject = ProfiledModel(
            layers=layers,
            example=example,
            num_samples=len(tensors[0]),
            recomputing=recomputing_layers(config.split, copied, names),
        )
        with config.device.precision(device):
            return measure_layers(
                subject.to(device, None),
                size=sizes[0],
                other_sizes=sizes[1:],
                optional=sizes[1:],
                repeat=_REPEAT,
                device=device,
            )


def layer_blocks(split: LayerSplit, model: nn.Module) -> tuple[int, ...]:
    """Return the sizes of blocks of layers that no stage may split.

    A stage needs parameters; layers that share more than the hidden state stay together.
    """
    if split.layers is None and isinstance(model, nn.Sequential):
        trained = [
            layer is not None and any(True for _ in layer.parameters())
            for layer in model._modules.values()
        ]
        return tuple(len(block) for block in blocks_with_parameters(trained))
    counts: list[int] = []
    num_layers = split.num_layers(model)
    together = split.found(model).together if num_layers > 1 else ()
    for index in range(num_layers):
        if any(first < index <= last for first, last in together):
            counts[-1] += 1
        else:
            counts.append(1)
    return tuple(counts)


@contextlib.contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _deepcopy_model(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # the user's modules may raise anything
        raise PlanError(
            f"the model cannot be copied for profiling: {type(error).__name__}: {error}",
            expected="a model that copy.deepcopy can copy",
            fix="pass a plan: polyrhythm profile, then polyrhythm plan",
        ) from error
