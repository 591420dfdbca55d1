"""Assign each process to a worker of the plan, and join the job as that worker.

A launcher gives each process a rank; a plan may name devices. If the plan names the processes'
devices, each process becomes a worker on its own device; a device with several stages has as many
processes. Otherwise workers are assigned by launcher rank. Each process then has its rank in the
plan: pipeline by pipeline, stages in order.
"""

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from polyrhythm.errors import LaunchError, PlanError
from polyrhythm.plan.plan import Plan
from polyrhythm.run.averaging.rendezvous import check_worker_keys
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.process_groups import abort, gloo_of, job_mesh, set_timeout
from polyrhythm.run.comm.store import PROCESS_NAME, JobStore, Members, job_store_backend, prefixed
from polyrhythm.run.decoupled.gradient_sync import NcclReach, nccl_reach
from polyrhythm.run.machine import DEVICE, machine_name
from polyrhythm.run.probe.probe import distinct_names
from polyrhythm.types import Seconds, Worker

LEADER = Worker(0, 0)
_SINGLE_PROCESS = DistContext(rank=0, world_size=1, local_rank=0)


class HostInfo(msgspec.Struct, frozen=True):
    """The device and machine of a process, as published to the other processes."""

    device: str  # as `polyrhythm probe` names it
    machine: str  # equal for processes whose messages cross no network

    @classmethod
    def of(cls, ctx: DistContext) -> "HostInfo":
        device, machine = os.environ.get(DEVICE), machine_name()
        return cls(device or f"{machine}/{ctx.local_rank}", machine)


@dataclass(slots=True)
class JobProcesses:
    """The processes of the job before they are workers; `hosts` connects them on first use."""

    timeout: Seconds
    _ctx: DistContext = field(init=False)
    _hosts: list[HostInfo] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._ctx = DistContext.current() or _SINGLE_PROCESS

    @property
    def are_joined(self) -> bool:
        """Whether the script has initialised the process group itself."""
        return dist.is_initialized()

    @property
    def num_processes(self) -> int:
        return dist.get_world_size() if self.are_joined else self._ctx.world_size

    @property
    def ctx(self) -> DistContext:
        """The context of this process; after `hosts` it has the job's store."""
        return self._ctx

    def hosts(self) -> list[HostInfo]:
        """Return the hosts of all processes, by launcher rank; raises PeerError."""
        if self._hosts or self.are_joined:
            return self._hosts
        own = HostInfo.of(self._ctx)
        if self._ctx.world_size == 1:
            self._hosts = [own]
            return self._hosts
        self.with_store()
        self._hosts = self._job_store().all_gather_object(
            "hosts", own, self.members, as_type=HostInfo
        )
        return self._hosts

    def with_store(self) -> DistContext:
        """Connect to the store of the job; return the context with it."""
        self._ctx = self._ctx.with_store(self.timeout)
        return self._ctx

    def gather(self, name: str, value: Any, as_type: Any) -> list[Any]:
        """Return the values of all processes, by launcher rank; raises PeerError."""
        if self.num_processes == 1:
            return [value]
        if not self.are_joined:
            return self.job_store().all_gather_object(name, value, self.members, as_type=as_type)
        backend, rank = job_store_backend("polyrhythm/processes", self.timeout), dist.get_rank()
        store = JobStore(backend, rank, timeout=self.timeout, name_of=PROCESS_NAME)
        # A script may make several Trainers in its process group, one after the other.
        members = Members(tuple(range(self.num_processes)), backend.add(f"{name} {rank}", 1))
        return store.all_gather_object(name, value, members, as_type=as_type)

    def with_coordinator(self) -> DistContext:
        """Return the context in a job with a coordinator, which is started if there is none."""
        if self._ctx.coordinator is None:
            store = self.job_store()
            check_worker_keys(store, self.members)
            self._ctx = self._ctx.with_coordinator(store, self.members, self.timeout)
        return self._ctx

    def device_names(self) -> list[str]:
        return [host.device for host in self.hosts()]

    @property
    def members(self) -> Members:
        return Members(tuple(range(self._ctx.world_size)))

    def job_store(self) -> JobStore:
        """Return the store of the processes; errors name their devices."""
        return self._job_store(self.device_names().__getitem__)

    def _job_store(self, name_of: Callable[[int], str] = PROCESS_NAME) -> JobStore:
        assert self._ctx.store is not None, "hosts() connects to the store"
        backend = prefixed("polyrhythm/processes", self._ctx.store)
        return JobStore(backend, self._ctx.rank, timeout=self.timeout, name_of=name_of)


def device_of_process(wanted: torch.device | str | int | None, ctx: DistContext) -> torch.device:
    """Return `wanted`, or by default this process's GPU if the machine has GPUs.

    A wanted "cuda" is this process's GPU, too: that of its local rank, or without a launcher the
    one that the script has made torch's current device.
    """
    has_gpu = torch.cuda.is_available()
    device = torch.device(("cuda" if has_gpu else "cpu") if wanted is None else wanted)
    if str(device) != "cuda" or not has_gpu:
        return device
    index = torch.cuda.current_device() if ctx.world_size == 1 else ctx.local_rank
    return torch.device("cuda", index % torch.cuda.device_count())


class Gpu(msgspec.Struct, frozen=True):
    """The GPU of a worker, as NCCL knows it."""

    host: str
    uuid: str

    @classmethod
    def of(cls, device: torch.device) -> "Gpu | None":
        """Return the GPU of a worker that may use NCCL; None for others."""
        if device.type != "cuda" or not dist.is_nccl_available():
            return None
        host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        return cls(host, str(torch.cuda.get_device_properties(device).uuid))


def choose_sites(
    backend: str, gpus: Sequence[Gpu | None], regions: Sequence[str]
) -> list[str | None]:
    """Return the site of each worker, by rank; None for those that communicate over gloo alone.

    Workers of one site communicate over NCCL. With auto it is the region of the plan, for GPUs that
    only one worker uses; with nccl all workers are one site.
    """
    shared = {gpu for gpu, number in Counter(gpus).items() if gpu is not None and number > 1}
    if backend == "nccl":
        for rank, gpu in enumerate(gpus):
            if gpu is None or gpu in shared:
                others = [str(i) for i, other in enumerate(gpus) if other == gpu and i != rank]
                why = "has no GPU" if gpu is None else f"shares its GPU with {', '.join(others)}"
                raise LaunchError(
                    f'backend="nccl", and worker {rank} {why}',
                    expected="a GPU for each worker of a machine: NCCL refuses two on one",
                    fix='DeviceConfig(backend="auto") or "gloo", or start a worker per GPU',
                )
        return [""] * len(gpus)
    if backend == "gloo":
        return [None] * len(gpus)
    return [
        None if gpu is None or gpu in shared else region
        for gpu, region in zip(gpus, regions, strict=True)
    ]


def describe_backends(sites: Mapping[Worker, str | None], *, is_decoupled: bool) -> str:
    """Return what connects the workers, for the user; `is_decoupled`: the sync mode may be."""
    num_stages, num_pipelines = (max(numbers) + 1 for numbers in zip(*sites, strict=True))
    parts = list[str]()
    if num_stages > 1:
        links = [(w, Worker(w.stage + 1, w.pipeline)) for w in sites if w.stage < num_stages - 1]
        over_nccl = [sites[a] is not None and sites[a] == sites[b] for a, b in links]
        text = f"NCCL between stages in {sum(over_nccl)} of {len(links)} places, gloo in the others"
        if all(over_nccl) or not any(over_nccl):
            text = f"{'NCCL' if all(over_nccl) else 'gloo'} between stages"
        parts.append(text)
    if num_pipelines > 1:
        of_stages = [[sites[Worker(s, p)] for p in range(num_pipelines)] for s in range(num_stages)]
        texts = [_between_replicas(each if is_decoupled else [None]) for each in of_stages]
        if len(set(texts)) > 1:
            texts = [f"stage {stage}: {text}" for stage, text in enumerate(texts)]
        parts += dict.fromkeys(texts)
    return ", ".join(parts)


def _between_replicas(sites: Sequence[str | None]) -> str:
    """Describe what averages the replicas of a stage in `decoupled`."""
    match nccl_reach(sites):
        case NcclReach.ALL:
            return "NCCL between replicas"
        case NcclReach.INSIDE_SITES:
            return "NCCL between replicas of a region, gloo between regions"
        case NcclReach.NONE:
            in_site = Counter(site for site in sites if site is not None)
            why = " (NCCL needs a GPU for each, and equally many in each region)"
            return f"gloo between replicas{why if max(in_site.values(), default=0) > 1 else ''}"


def assign_ranks(plan: Plan, names: Sequence[str]) -> list[int]:
    """Return each process's rank in the plan; `names` are devices by launcher rank."""
    if len(names) != plan.num_workers:
        raise PlanError(
            f"{len(names)} processes for {plan.num_stages} stages x {plan.num_pipelines} pipelines",
            expected=f"{plan.num_workers} processes, one for each stage of each pipeline",
            fix=f"start {plan.num_workers} processes, or use another plan",
        )
    wanted = [device for pipeline in plan.pipelines for device in pipeline.devices]
    if len(wanted) < plan.num_workers or not set(wanted) & {*names, *distinct_names(names)}:
        return list(range(len(names)))  # the plan names no devices, or none of these
    if set(wanted) <= set(distinct_names(names)):
        names = distinct_names(names)
    missing = Counter(wanted) - Counter(names)
    if missing:
        device, number = next(iter(missing.items()))
        raise PlanError(
            f"the plan has {Counter(wanted)[device]} stages on {device!r}, and "
            f"{Counter(names)[device]} processes run there",
            expected="as many processes on each device as the plan has stages there",
            fix=f"start {number} more on {device!r}, or plan for the devices of this job: "
            f"{', '.join(sorted(set(names)))}",
        )
    free = defaultdict(list)
    for rank, device in enumerate(wanted):
        free[device].append(rank)
    return [free[name].pop(0) for name in names]


@dataclass(slots=True)
class JobMembership:
    """This process's worker in the job. `join_job` makes it, `leave` ends it."""

    ctx: DistContext
    plan: Plan
    worker: Worker
    timeout: Seconds
    _stack: ExitStack
    epoch: int = field(init=False)  # a job may join several times, one after the other

    def __post_init__(self) -> None:
        joins = job_store_backend("polyrhythm/joins", self.timeout)
        self.epoch = joins.add(str(self.plan.rank(self.worker)), 1)

    @property
    def name(self) -> str:
        """A name that is unique in the job's store."""
        return f"polyrhythm/trainer {self.epoch}"

    @property
    def members(self) -> Members:
        return Members(tuple(range(self.plan.num_workers)), self.epoch)

    @property
    def first_stages(self) -> Members:
        """The workers of stage 0, by pipeline."""
        plan = self.plan
        ranks = tuple(plan.rank(Worker(0, pipeline)) for pipeline in range(plan.num_pipelines))
        return Members(ranks, self.epoch)

    def job_store(self, purpose: str, timeout: Seconds | None = None) -> JobStore:
        """Connect to the job's store, for one thread; errors name workers.

        `timeout`: of each wait; by default that of the job.
        """
        return JobStore(
            job_store_backend(f"{self.name}/{purpose}", self.timeout),
            self.plan.rank(self.worker),
            timeout=timeout or self.timeout,
            name_of=lambda rank: str(self.plan.worker(rank)),
        )

    def device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Make the groups of this worker's pipeline and stage; None in a job of one process."""
        if not dist.is_initialized():
            return None
        num_pipelines, num_stages = self.plan.num_pipelines, self.plan.num_stages
        return job_mesh(num_pipelines, num_stages, device_type=device_type, timeout=self.timeout)

    def leave(self) -> None:
        """Leave the process group; all processes call it."""
        self._stack.close()

    def abandon(self) -> None:
        """Leave without waiting after a failure: peers notice the lost connection."""
        self._stack.pop_all()


def join_job(plan: Plan, processes: JobProcesses) -> JobMembership:
    """Become the plan's worker for this process's device, or for its rank."""
    stack, timeout = ExitStack(), processes.timeout
    if processes.are_joined:
        assign_ranks(plan, [""] * processes.num_processes)
        return JobMembership(processes.ctx, plan, plan.worker(dist.get_rank()), timeout, stack)
    rank = assign_ranks(plan, processes.device_names())[processes.ctx.rank]
    if processes.num_processes > 1:
        stack.enter_context(processes.ctx.process_group(timeout, rank=rank))
    return JobMembership(processes.ctx, plan, plan.worker(rank), timeout, stack)


def join_epoch(ctx: DistContext, plan: Plan, worker: Worker, timeout: Seconds) -> JobMembership:
    """Become a worker of an epoch; `ctx` has its rank, the number of workers and a store."""
    stack, epoch = ExitStack(), current_epoch()
    assert ctx.store is not None, "the epoch has one"
    store = JobStore(
        prefixed("workers", ctx.store),
        ctx.rank,
        timeout=timeout,
        name_of=lambda rank: str(plan.worker(rank)),
    )
    members = Members(tuple(range(ctx.world_size)))
    # Torch waits in the store for all of them, in a thread that may be left alone until a timeout.
    store.barrier("the start of connections", members)
    # A group that could not connect still counts, and the number is in the keys of the next one.
    dist.distributed_c10d._world.group_count = 0
    # Two workers may not reach each other any more: all reach the store.
    leaving = partial(store.barrier, "the end of connections", members)
    stack.enter_context(ctx.process_group(epoch.connect_timeout(timeout), barrier=leaving))
    group = _gloo_of_job()
    set_timeout(group, timeout)
    epoch.add(group, keeps=True)
    return JobMembership(ctx, plan, worker, timeout, stack)


def leave_group() -> None:
    """Leave torch's process group after a failure, if this process is in one."""
    if dist.is_initialized():
        abort(_gloo_of_job())
        dist.destroy_process_group()


def _gloo_of_job() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "it was initialised"
    return gloo_of(dist.group.WORLD)
