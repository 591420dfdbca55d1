"""How the workers of a job find each other: names, places, and who runs the scheduler.

The store of torch.distributed, which all of them have, serves for the first words: the address and
the keys of the coordinator, and everybody's life. By default the coordinator is a thread of the
process of rank 0; its keys go through the store, which whoever can reach the job can read, as with
torch.distributed itself. A coordinator of its own (`polyrhythm scheduler`) has its keys in a file.
"""

import socket
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from polyrhythm.errors import LaunchError, PolicyError
from polyrhythm.run.average.pairs import Pairs, Peer
from polyrhythm.run.coordinator.coordinator import Coordinator
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.seats import shapes_differ
from polyrhythm.run.coordinator.setup import Setup
from polyrhythm.run.coordinator.wire import Shape
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds, Worker

# Of the meetings of a process: all processes hold the same ones, in order. A parameter server takes
# part in its own ones only.
_numbers: dict[str, Iterator[int]] = {"workers": count(), "ssp": count()}
_STARTUP = 1.1  # times the timeout: until then all who are there have given up


def next_name(setup: Setup) -> str:
    """The same for all who take part in a meeting, if nobody has given it another name."""
    kind = "ssp" if setup.policy == "ssp" else "workers"
    return f"{kind}{next(_numbers[kind])}"


class Meeting:
    """One worker's part in it, under a name of its own among the meetings of the job."""

    def __init__(self, setup: Setup, worker: Worker, *, timeout: Seconds, name: str) -> None:
        """`timeout` bounds every wait for others."""
        if not timeout > 0:
            raise PolicyError(
                f"timeout={timeout:g}",
                expected="more than 0 seconds",
                fix="make it several steps of the slowest worker",
            )
        if not dist.is_initialized():
            raise LaunchError(
                "workers that average, outside of a job",
                expected="an initialised torch.distributed",
                fix="start with torchrun, and call torch.distributed.init_process_group first",
            )
        self.setup, self.timeout = setup, timeout
        everything = _get_default_store().clone()  # type: ignore[attr-defined]
        self.store = PrefixStore(f"polyrhythm/sync/{name}", everything)
        self.store.set_timeout(timedelta(seconds=timeout))
        self.me = Peer(worker, self.store.add(f"lives/{worker}", 1))
        self.store.set(f"life/{worker}", str(self.me.life))
        self.pairs = Pairs(self.store, self.me)

    def nodes(self, node: str) -> dict[Worker, str]:
        """The machine of every worker of this stage; each says its own."""
        stage = self.me.worker.stage
        workers = [Worker(stage, pipeline) for pipeline in range(self.setup.num_pipelines)]
        self.store.set(f"node/{self.me.worker}", node)
        with waiting_for("another worker", "asking where it runs"):
            return {worker: self.store.get(f"node/{worker}").decode() for worker in workers}

    def check(self, shape: Shape) -> None:
        """Refuse a model that is not the first pipeline's, before anything of it is sent."""
        first = Worker(self.me.worker.stage, 0)
        if self.me.worker == first:
            self.store.set(f"shape/{first}", msgspec.json.encode(shape).decode())
            return
        with waiting_for(first, "asking for the shape of its model"):
            known = msgspec.json.decode(self.store.get(f"shape/{first}"), type=Shape)
        if shape != known:
            raise PolicyError(
                shapes_differ(self.me.worker, shape, first, known),
                expected="replicas of one model, with the same parameters to train",
                fix="build the same model in every process",
            )

    def spread(self, flat: Tensor) -> Tensor:
        """What the first pipeline's worker of this stage has, handed on from one to two others."""
        stage, place = self.me.worker
        below = [2 * place + 1, 2 * place + 2]
        workers = [Worker(stage, p) for p in below if p < self.setup.num_pipelines]
        timeout = timedelta(seconds=self.timeout)
        if place > 0:
            flat = flat.clone()
            above = self._connected(Worker(stage, (place - 1) // 2))
            with waiting_for(above.worker, "receiving the model to begin with"):
                self.pairs.receive(above, flat.view(torch.uint8), tag=0).wait(timeout)
        for worker in workers:
            peer = self._connected(worker)
            with waiting_for(worker, "sending the model to begin with"):
                self.pairs.send(peer, flat.view(torch.uint8), tag=0).wait(timeout)
        return flat

    def coordinate(self, log: Path | None) -> Coordinator | None:
        """Begin to serve, if that is for this process to do; tell the others where."""
        if dist.get_rank() != 0:
            return None
        keys = JobKeys.new()
        bind = f"tcp://{_own_address()}:0"
        coordinator = Coordinator.of(
            self.setup, bind=bind, keys=keys, log=log, startup=_STARTUP * self.timeout
        ).in_thread()
        self.store.set("keys", keys.text)
        self.store.set("address", coordinator.address)
        return coordinator

    def coordinator(self) -> tuple[str, JobKeys]:
        """Address and keys of the one that a worker of the job serves."""
        with waiting_for("the process of rank 0", "asking for the coordinator"):
            address = self.store.get("address").decode()
            return address, JobKeys.parse(self.store.get("keys").decode())

    def peer(self, worker: Worker) -> Peer:
        """A worker in its present life; waits until it has one."""
        with waiting_for(worker, "joining"):
            return Peer(worker, int(self.store.get(f"life/{worker}")))

    def _connected(self, worker: Worker) -> Peer:
        """To somebody who is not in a group with us, but expects us."""
        peer = self.peer(worker)
        self.pairs.connect([peer], "begin", deadline=self.timeout)
        return peer


def _own_address() -> str:
    """Of this machine, as the others reach it: they have all reached the store, which is here."""
    store = _get_default_store()
    if isinstance(store, PrefixStore):
        store = store._underlying_non_prefix_store  # type: ignore[attr-defined]
    for name in (getattr(store, "host", ""), socket.gethostname()):
        try:
            address = socket.gethostbyname(name) if name else ""
            with socket.socket() as probe:
                probe.bind((address, 0))
        except OSError:
            continue
        if address:
            return address
    raise LaunchError(
        "no address of this machine that other workers can reach",
        expected="a store of torch.distributed on the machine of rank 0, or a name that resolves",
        fix="run `polyrhythm scheduler` and give its address: GroupSync(..., coordinator=...)",
    )
