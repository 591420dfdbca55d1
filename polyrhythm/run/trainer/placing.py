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
from polyrhythm.run.launch import Place
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds

DEVICE = "POLYRHYTHM_DEVICE"  # which device a process runs on; the lab tells its hosts
_ALONE = Place(rank=0, world_size=1, local_rank=0)


class Home(msgspec.Struct, frozen=True):
    """Where a process runs, as it tells the others."""

    device: str  # as `polyrhythm probe` names it
    machine: str  # equal for processes whose messages cross no network

    @classmethod
    def of(cls, place: Place) -> "Home":
        told, host = os.environ.get(DEVICE), socket.gethostname()
        if told is not None:
            return cls(told, told)
        return cls(f"{host}/{place.local_rank}", host)


@dataclass(slots=True)
class Processes:
    """Those of the job, before any of them is a worker; they meet when they are first asked for."""

    deadline: Seconds
    _place: Place = field(init=False)
    _homes: list[Home] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._place = Place.here() or _ALONE

    @property
    def are_joined(self) -> bool:
        """By the script itself, which also ends it."""
        return dist.is_initialized()

    @property
    def number(self) -> int:
        return dist.get_world_size() if self.are_joined else self._place.world_size

    @property
    def place(self) -> Place:
        """Of this one; with a store that all share, once they have met."""
        return self._place

    def homes(self) -> list[Home]:
        """Of all, by the rank that their launcher gave them; raises PeerError."""
        if self._homes or self.are_joined:
            return self._homes
        own = Home.of(self._place)
        if self._place.world_size == 1:
            self._homes = [own]
            return self._homes
        self._place = place = self._place.met(self.deadline)
        assert place.store is not None, "met"
        key = "polyrhythm/home of {}".format
        place.store.set(key(place.rank), msgspec.json.encode(own).decode())
        for rank in range(place.world_size):
            with waiting_for(f"the process of rank {rank}", "hearing where it runs"):
                told = place.store.get(key(rank))
            self._homes.append(msgspec.json.decode(told, type=Home))
        return self._homes

    def names(self) -> list[str]:
        return [home.device for home in self.homes()]


def distinct(names: Sequence[str]) -> list[str]:
    """As `polyrhythm probe` tells processes of one device apart."""
    count = Counter(names)
    return [f"{n} (rank {i})" if count[n] > 1 else n for i, n in enumerate(names)]


def seats(plan: Plan, names: Sequence[str]) -> list[int]:
    """The rank in the plan of each process, in the order of the ranks that they were given."""
    if len(names) != plan.num_workers:
        raise PlanError(
            f"{len(names)} processes for {plan.num_stages} stages x {plan.num_pipelines} pipelines",
            expected=f"{plan.num_workers} processes, one for each stage of each pipeline",
            fix=f"start {plan.num_workers} processes, or use another plan",
        )
    wanted = [device for pipeline in plan.pipelines for device in pipeline.devices]
    if len(wanted) < plan.num_workers or not set(wanted) & {*names, *distinct(names)}:
        return list(range(len(names)))  # any device will do, or these have other names
    if set(wanted) <= set(distinct(names)):
        names = distinct(names)
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
