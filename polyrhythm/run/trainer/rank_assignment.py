"""Which process is which worker of a plan.

Ranks are what a launcher gave, and a plan may name devices. Where both are known, each process is
the worker whose device it runs on; a device with several stages has as many processes. Otherwise
workers are dealt by rank. Processes then take the ranks that a plan deals: pipeline by pipeline,
stages in order.
"""

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch.distributed as dist

from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import Plan
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.types import Seconds

DEVICE = "POLYRHYTHM_DEVICE"  # which device a process runs on; the lab tells its hosts
_SINGLE_PROCESS = DistContext(rank=0, world_size=1, local_rank=0)


class HostInfo(msgspec.Struct, frozen=True):
    """Where a process runs, as it tells the others."""

    device: str  # as `polyrhythm probe` names it
    machine: str  # equal for processes whose messages cross no network

    @classmethod
    def of(cls, place: DistContext) -> "HostInfo":
        told, host = os.environ.get(DEVICE), socket.gethostname()
        if told is not None:
            return cls(told, told)
        return cls(f"{host}/{place.local_rank}", host)


@dataclass(slots=True)
class JobProcesses:
    """Those of the job, before any of them is a worker; they meet when they are first asked for."""

    timeout: Seconds
    _place: DistContext = field(init=False)
    _hosts: list[HostInfo] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._place = DistContext.current() or _SINGLE_PROCESS

    @property
    def are_joined(self) -> bool:
        """By the script itself, which also ends it."""
        return dist.is_initialized()

    @property
    def num_processes(self) -> int:
        return dist.get_world_size() if self.are_joined else self._place.world_size

    @property
    def place(self) -> DistContext:
        """Of this one; with a store that all share, once they have met."""
        return self._place

    def hosts(self) -> list[HostInfo]:
        """Of all, by the rank that their launcher gave them; raises PeerError."""
        if self._hosts or self.are_joined:
            return self._hosts
        own = HostInfo.of(self._place)
        if self._place.world_size == 1:
            self._hosts = [own]
            return self._hosts
        self._place = place = self._place.with_store(self.timeout)
        assert place.store is not None, "met"
        key = "polyrhythm/home of {}".format
        place.store.set(key(place.rank), msgspec.json.encode(own).decode())
        for rank in range(place.world_size):
            with peer_errors(f"the process of rank {rank}", "hearing where it runs"):
                told = place.store.get(key(rank))
            self._hosts.append(msgspec.json.decode(told, type=HostInfo))
        return self._hosts

    def device_names(self) -> list[str]:
        return [home.device for home in self.hosts()]


def distinct_names(names: Sequence[str]) -> list[str]:
    """As `polyrhythm probe` tells processes of one device apart."""
    count = Counter(names)
    return [f"{n} (rank {i})" if count[n] > 1 else n for i, n in enumerate(names)]


def assign_ranks(plan: Plan, names: Sequence[str]) -> list[int]:
    """The rank in the plan of each process, in the order of the ranks that they were given."""
    if len(names) != plan.num_workers:
        raise PlanError(
            f"{len(names)} processes for {plan.num_stages} stages x {plan.num_pipelines} pipelines",
            expected=f"{plan.num_workers} processes, one for each stage of each pipeline",
            fix=f"start {plan.num_workers} processes, or use another plan",
        )
    wanted = [device for pipeline in plan.pipelines for device in pipeline.devices]
    if len(wanted) < plan.num_workers or not set(wanted) & {*names, *distinct_names(names)}:
        return list(range(len(names)))  # any device will do, or these have other names
    if set(wanted) <= set(distinct_names(names)):
        names = distinct_names(names)
    missing = Counter(wanted) - Counter(names)
    if missing:
        device, number = next(iter(missing.items()))
        raise PlanError(
            f"the plan has {Counter(wanted)[device]} stages on {device!r}, and "
            f"{Counter(names)[device]} processes run there",
            expected="as many processes on each device as the plan has stages there",
            fix=f"start {number} more on {device!r}, or plan for the devices that there are: "
            f"{', '.join(sorted(set(names)))}",
        )
    free = defaultdict(list)
    for rank, device in enumerate(wanted):
        free[device].append(rank)
    return [free[name].pop(0) for name in names]
