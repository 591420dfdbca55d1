"""How the workers of a job find each other: names, places, and who runs the scheduler.

The store of torch.distributed, which all of them have, serves for the first words: the address and
the keys of the coordinator, everybody's life, and why somebody could not begin. By default the
coordinator is a thread of the process of rank 0; its keys go through the store, which whoever can
reach the job can read, as with torch.distributed itself. A coordinator of its own (`polyrhythm
scheduler`) has its keys in a file.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from polyrhythm.errors import LaunchError, PeerError, PolicyError, UserError
from polyrhythm.run.averaging.buffers import FlatBuffer
from polyrhythm.run.averaging.peer_connections import Peer, PeerConnections
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.coordinator.coordinator import Coordinator
from polyrhythm.run.coordinator.keys import JobKeys
from polyrhythm.run.coordinator.sessions import shape_mismatch
from polyrhythm.run.coordinator.wire import TensorShapes
from polyrhythm.run.fingerprint import fingerprint
from polyrhythm.sync.roster import format_items
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

# Of the meetings of a process: all processes hold the same ones, in order. A parameter server takes
# part in its own ones only.
_numbers: dict[str, Iterator[int]] = {"workers": count(), "ssp": count()}
_STARTUP_FACTOR = 1.1  # times the timeout: until then all who are there have given up
_POLL: Seconds = 0.002  # at first; doubled up to the next one
_LONGEST_POLL: Seconds = 0.05
WARN_AFTER: Seconds = 10.0  # after that long, whoever waits
RANK_0 = "the process of rank 0"
_NOT_JOINED = "it has not come so far"
_FAILED = "failed"  # the key of why the first one that failed has done so

_ANY_PORT = 9

_logger = logging.getLogger(__name__)


def next_name(setup: Setup) -> str:
    """The same for all who take part in a meeting, if nobody has given it another name."""
    kind = "ssp" if setup.policy == "ssp" else "workers"
    return f"{kind}{next(_numbers[kind])}"


def server_worker(stage: int, num_pipelines: int) -> Worker:
    """The name of a parameter server among the workers of a stage: it comes after all pipelines."""
    return Worker(stage, num_pipelines)


def check_timeout(timeout: Seconds) -> None:
    if not timeout > 0:
        raise PolicyError(
            f"timeout={timeout:g}",
            expected="more than 0 seconds",
            fix="make it several steps of the slowest worker",
        )


class Rendezvous:
    """One worker's part in it, under a name of its own among the meetings of the job."""

    def __init__(self, setup: Setup, worker: Worker, *, timeout: Seconds, name: str) -> None:
        """`timeout` bounds every wait for others."""
        check_timeout(timeout)
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
        self.store.set(f"life/{worker}", str(self.me.incarnation))
        if self.me.incarnation == 1:
            self.store.add("here", 1)
        self.connections = PeerConnections(self.store, self.me)

    def wait_for_all(self) -> None:
        """Wait until all who take part are here."""
        expected = {worker: str(worker) for worker in self.setup.workers}
        if self.setup.policy == "ssp":
            servers = [
                server_worker(stage, self.setup.num_pipelines)
                for stage in range(self.setup.num_stages)
            ]
            expected |= {server: f"{server} (the parameter server)" for server in servers}

        def all_are_here() -> bool:
            return self.store.add("here", 0) >= len(expected)

        def missing() -> tuple[str, str]:
            who = [name for who, name in expected.items() if not self.store.check([f"life/{who}"])]
            return format_items(who), "no GroupSync was made there; has it ended?"

        self.wait_until(all_are_here, missing, "beginning")

    def wait_until(
        self, condition: Callable[[], bool], missing: Callable[[], tuple[str, str]], action: str
    ) -> None:
        """Raises PeerError, with who is `missing` and why, after `timeout`.

        Sooner if somebody has failed.
        """
        began, pause, warn_after = time.monotonic(), _POLL, WARN_AFTER
        with peer_errors(RANK_0, action):
            while not condition():
                waited = time.monotonic() - began
                self._raise_failure(action, waited)
                if waited >= self.timeout:
                    who, cause = missing()
                    raise PeerError(who, action=action, waited=waited, cause=cause)
                if waited >= warn_after:
                    _logger.warning(
                        "%s has waited %.0f s for %s, and gives up after %g s",
                        *(self.me.worker, waited, missing()[0], self.timeout),
                    )
                    warn_after *= 10
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)

    def report_failure(self, error: BaseException) -> str:
        """Tell the others, so that they do not wait in vain; what the first to fail has told."""
        values = f"{self.me.worker}: {error.wrong if isinstance(error, UserError) else error}"
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody waits there
            values = self.store.compare_set(_FAILED, "", values).decode()
        self.connections.abort_all()
        return values

    def gather_nodes(self, node: str) -> dict[Worker, str]:
        """The machine of every worker of this stage; each says its own."""
        return self._gather_values("node", node)

    def check(self, shape: TensorShapes) -> None:
        """Refuse a model that is not the first pipeline's, before anything of it is sent."""
        first = Worker(self.me.worker.stage, 0)
        if self.me.worker == first:
            self.store.set(f"shape/{first.stage}", msgspec.json.encode(shape).decode())
            return
        known = msgspec.json.decode(
            self._wait_for_value(f"shape/{first.stage}", first), type=TensorShapes
        )
        if shape != known:
            raise PolicyError(
                shape_mismatch(self.me.worker, shape, first, known),
                expected="replicas of one model, with the same parameters to train",
                fix="build the same model in every process",
            )

    def broadcast_initial_state(self, buffers: Sequence[FlatBuffer]) -> None:
        """With what the first pipeline's worker of this stage has; parts are sent that differ."""
        if self.setup.num_pipelines == 1:
            return
        mine = " ".join(fingerprint([buffer.read()]) for buffer in buffers)
        values = self._gather_values("prints", mine).values()
        for buffer, prints in zip(buffers, zip(*map(str.split, values), strict=True), strict=True):
            if len(set(prints)) > 1:
                buffer.write(self._broadcast(buffer.read()))

    def _broadcast(self, flat: Tensor) -> Tensor:
        """What the first pipeline's worker of this stage has, handed on from one to two others."""
        stage, place = self.me.worker
        below = [2 * place + 1, 2 * place + 2]
        workers = [Worker(stage, p) for p in below if p < self.setup.num_pipelines]
        timeout = timedelta(seconds=self.timeout)
        if place > 0:
            flat = flat.clone()
            above = self._connect(Worker(stage, (place - 1) // 2))
            with peer_errors(above.worker, "receiving the model to begin with"):
                self.connections.receive(above, flat.view(torch.uint8), tag=0).wait(timeout)
        for worker in workers:
            peer = self._connect(worker)
            with peer_errors(worker, "sending the model to begin with"):
                self.connections.send(peer, flat.view(torch.uint8), tag=0).wait(timeout)
        return flat

    def start_coordinator(self, log: Path | None) -> Coordinator | None:
        """Begin to serve, if that is for this process to do; tell the others where."""
        if dist.get_rank() != 0:
            return None
        keys = JobKeys.new()
        bind = f"tcp://{_own_address()}:0"
        coordinator = Coordinator.of(
            self.setup,
            bind=bind,
            keys=keys,
            log=log,
            startup_timeout=_STARTUP_FACTOR * self.timeout,
            log_info=_logger.info,
            log_warning=_logger.warning,
        ).start()
        self.store.set("keys", keys.text)
        self.store.set("address", coordinator.address)
        return coordinator

    def coordinator_endpoint(self) -> tuple[str, JobKeys]:
        """Address and keys of the one that a worker of the job serves."""
        address = self._wait_for_value("address", RANK_0).decode()
        return address, JobKeys.parse(self._wait_for_value("keys", RANK_0).decode())

    def set_once(self, key: str, mine: str) -> str:
        """What the first worker of this stage to come here has said; all go by it."""
        with peer_errors(RANK_0, "agreeing"):
            said = self.store.compare_set(f"{key}/{self.me.worker.stage}", "", mine)
        return said.decode()

    def peer(self, worker: Worker) -> Peer:
        """A worker in its present life; waits until it has one."""
        return Peer(worker, int(self._wait_for_value(f"life/{worker}", worker)))

    def _connect(self, worker: Worker) -> Peer:
        """To somebody who is not in a group with us, but expects us."""
        peer, began = self.peer(worker), time.monotonic()
        try:
            self.connections.connect(
                [peer], "begin", timeout=self.timeout, should_stop=self.has_failed
            )
        except PeerError:
            self._raise_failure("connecting", time.monotonic() - began)
            raise
        return peer

    def _gather_values(self, name: str, mine: str) -> dict[Worker, str]:
        """By the workers of this stage, each its own."""
        self.store.set(f"{name}/{self.me.worker}", mine)
        workers = [w for w in self.setup.workers if w.stage == self.me.worker.stage]
        keys = {worker: f"{name}/{worker}" for worker in workers}

        def missing() -> tuple[str, str]:
            who = [str(worker) for worker, key in keys.items() if not self.store.check([key])]
            return format_items(who), _NOT_JOINED

        # Of all at once: each word to the store takes a round trip.
        self.wait_until(lambda: self.store.check(list(keys.values())), missing, "beginning")
        values = self.store.multi_get(list(keys.values()))
        return {worker: value.decode() for worker, value in zip(keys, values, strict=True)}

    def _wait_for_value(self, key: str, who: Worker | str) -> bytes:
        """What somebody tells all others; waits until it has."""
        missing = str(who), _NOT_JOINED
        self.wait_until(lambda: self.store.check([key]), lambda: missing, "beginning")
        return self.store.get(key)

    def has_failed(self) -> bool:
        return self.store.check([_FAILED])

    def _raise_failure(self, action: str, waited: Seconds) -> None:
        if self.has_failed():
            worker, _, why = self.store.get(_FAILED).decode().partition(": ")
            raise PeerError(
                worker, action=action, waited=waited, cause=f"it could not begin: {why}"
            )


def _own_address() -> str:
    """Of this machine, as the others reach it: on its way to the store, which all have reached."""
    store = _get_default_store()
    if isinstance(store, PrefixStore):
        store = store._underlying_non_prefix_store  # type: ignore[attr-defined]
    for name in (getattr(store, "host", ""), socket.gethostname()):
        try:
            with socket.socket(type=socket.SOCK_DGRAM) as probe:
                probe.connect((name, getattr(store, "port", _ANY_PORT)))  # which sends nothing
                address: str = probe.getsockname()[0]
        except OSError:
            continue
        if name:
            return address
    raise LaunchError(
        "no address of this machine that other workers can reach",
        expected="a store of torch.distributed that has an address, or a host name that resolves",
        fix="run `polyrhythm coordinator` and give its address: GroupSync(..., coordinator=...)",
    )
