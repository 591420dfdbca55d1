"""Rendezvous of the workers of a job: incarnations, initial state, and the coordinator's address.

The workers exchange their first values over the store of torch.distributed: the address and the
keys of the coordinator, every worker's incarnation, and the first error. By default the coordinator
is a thread of the process of rank 0; its keys go through the store, which everyone who can reach
the job can read, as with torch.distributed itself. A separate coordinator (`polyrhythm
coordinator`) has its keys in a file.
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
from polyrhythm.sync.policy import format_items
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

# Rendezvous are numbered in the order of creation, which is the same in all processes. A parameter
# server takes part only in those of ssp.
_numbers: dict[str, Iterator[int]] = {"workers": count(), "servers": count()}
_STARTUP_FACTOR = 1.1  # times the timeout: by then every waiting worker has timed out
_POLL: Seconds = 0.002  # initially; doubled up to _LONGEST_POLL
_LONGEST_POLL: Seconds = 0.05
WARN_AFTER: Seconds = 10.0  # log a warning after waiting this long
RANK_0 = "the process of rank 0"
_NOT_JOINED = "it has not joined yet"
_FAILED = "failed"  # the store key of the first error

_ANY_PORT = 9

_logger = logging.getLogger(__name__)


def next_name(setup: Setup) -> str:
    """Return the default name of the next rendezvous, equal in all processes."""
    kind = "servers" if setup.mode.has_server else "workers"
    return f"{kind}{next(_numbers[kind])}"


def server_worker(stage: int, num_pipelines: int) -> Worker:
    """Return the Worker that stands for the parameter server of a stage: after all pipelines."""
    return Worker(stage, num_pipelines)


def check_timeout(timeout: Seconds) -> None:
    if not timeout > 0:
        raise PolicyError(
            f"timeout={timeout:g}",
            expected="more than 0 seconds",
            fix="use several steps of the slowest worker",
        )


class Rendezvous:
    """One worker's side of a rendezvous, with a name that is unique in the job."""

    def __init__(self, setup: Setup, worker: Worker, *, timeout: Seconds, name: str) -> None:
        """`timeout` bounds every wait for other workers."""
        check_timeout(timeout)
        if not dist.is_initialized():
            raise LaunchError(
                "group averaging without torch.distributed",
                expected="an initialised torch.distributed",
                fix="start with torchrun, and call torch.distributed.init_process_group first",
            )
        self.setup, self.timeout = setup, timeout
        with peer_errors(RANK_0, "reaching the job's store"):
            job_store = _get_default_store().clone()  # type: ignore[attr-defined]
            self.store = PrefixStore(f"polyrhythm/sync/{name}", job_store)
            self.me = Peer(worker, self.store.add(f"num_incarnations/{worker}", 1))
            self.connections = PeerConnections(self.store, self.me)
            for store in (self.store, self.connections.store):
                # Only now: before, it would bound connecting to the store, which may be busy.
                store.set_timeout(timedelta(seconds=timeout))
            self.store.set(f"incarnation/{worker}", str(self.me.incarnation))
            if self.me.incarnation == 1:
                self.store.add("here", 1)

    def wait_for_all(self) -> None:
        """Wait until all workers, and under ssp the parameter servers, are present."""
        expected = {worker: str(worker) for worker in self.setup.workers}
        if self.setup.mode.has_server:
            servers = [
                server_worker(stage, self.setup.num_pipelines)
                for stage in range(self.setup.num_stages)
            ]
            expected |= {server: f"{server} (the parameter server)" for server in servers}

        def all_present() -> bool:
            return self.store.add("here", 0) >= len(expected)

        def missing() -> tuple[str, str]:
            is_present = {w: self.store.check([f"incarnation/{w}"]) for w in expected}
            names = [name for worker, name in expected.items() if not is_present[worker]]
            return format_items(names), "it has created no GroupSync; has its process exited?"

        self.wait_until(all_present, missing, "starting")

    def wait_until(
        self, condition: Callable[[], bool], missing: Callable[[], tuple[str, str]], action: str
    ) -> None:
        """Wait until `condition` holds; raises PeerError if a worker has failed.

        After `timeout`, raises PeerError with the name and cause that `missing` returns.
        """
        start, pause, warn_after = time.monotonic(), _POLL, WARN_AFTER
        with peer_errors(RANK_0, action):
            while not condition():
                waited = time.monotonic() - start
                self._raise_failure(action, waited)
                if waited >= self.timeout:
                    peer, cause = missing()
                    raise PeerError(peer, action=action, waited=waited, cause=cause)
                if waited >= warn_after:
                    _logger.warning(
                        "%s has waited %.0f s for %s; timeout is %g s",
                        *(self.me.worker, waited, missing()[0], self.timeout),
                    )
                    warn_after *= 10
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL)

    def report_failure(self, error: BaseException) -> str:
        """Store `error` so that waiting workers stop; return the first error of the job."""
        first = f"{self.me.worker}: {error.wrong if isinstance(error, UserError) else error}"
        with contextlib.suppress(RuntimeError):  # the store is gone: no worker waits on it
            first = self.store.compare_set(_FAILED, "", first).decode()
        self.connections.abort_all()
        return first

    def gather_nodes(self, node: str) -> dict[Worker, str]:
        """Gather the machine names of all workers of this stage."""
        return self._gather_values("node", node)

    def check_same_shapes(self, shape: TensorShapes) -> None:
        """Refuse tensors other than the first pipeline's, before any are sent."""
        first = Worker(self.me.worker.stage, 0)
        if self.me.worker == first:
            self.store.set(f"shape/{first.stage}", msgspec.json.encode(shape).decode())
            return
        expected = msgspec.json.decode(
            self._wait_for_value(f"shape/{first.stage}", first), type=TensorShapes
        )
        if shape != expected:
            raise PolicyError(
                shape_mismatch(self.me.worker, shape, first, expected),
                expected="replicas of one model, with the same parameters to train",
                fix="build the same model in every process",
            )

    def broadcast_initial_state(self, buffers: Sequence[FlatBuffer]) -> None:
        """Copy the state of the stage's first worker to all; only buffers that differ are sent."""
        if self.setup.num_pipelines == 1:
            return
        own = " ".join(fingerprint([buffer.read()]) for buffer in buffers)
        by_worker = [value.split() for value in self._gather_values("fingerprint", own).values()]
        for buffer, fingerprints in zip(buffers, zip(*by_worker, strict=True), strict=True):
            if len(set(fingerprints)) > 1:
                buffer.write(self._broadcast(buffer.read()))

    def _broadcast(self, flat: Tensor) -> Tensor:
        """Return the buffer of the stage's first worker, broadcast along a binary tree."""
        stage, pipeline = self.me.worker
        children = [2 * pipeline + 1, 2 * pipeline + 2]
        workers = [Worker(stage, p) for p in children if p < self.setup.num_pipelines]
        timeout = timedelta(seconds=self.timeout)
        if pipeline > 0:
            flat = flat.clone()
            parent = self._connect(Worker(stage, (pipeline - 1) // 2))
            with peer_errors(parent.worker, "receiving the initial model"):
                self.connections.receive(parent, flat.view(torch.uint8), tag=0).wait(timeout)
        for worker in workers:
            peer = self._connect(worker)
            with peer_errors(worker, "sending the initial model"):
                self.connections.send(peer, flat.view(torch.uint8), tag=0).wait(timeout)
        return flat

    def start_coordinator(self, log: Path | None) -> Coordinator | None:
        """Start the coordinator if this is rank 0, and store its address and keys."""
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
        """Return address and keys of the coordinator that rank 0 hosts."""
        address = self._wait_for_value("address", RANK_0).decode()
        return address, JobKeys.parse(self._wait_for_value("keys", RANK_0).decode())

    def set_once(self, key: str, value: str) -> str:
        """Store `value` unless a worker of this stage has; return the stored value."""
        with peer_errors(RANK_0, f"agreeing on the {key}"):
            stored = self.store.compare_set(f"{key}/{self.me.worker.stage}", "", value)
        return stored.decode()

    def peer(self, worker: Worker) -> Peer:
        """Return a worker's current incarnation; wait until it has one."""
        return Peer(worker, int(self._wait_for_value(f"incarnation/{worker}", worker)))

    def _connect(self, worker: Worker) -> Peer:
        """Connect to a worker outside any group; that worker calls this, too."""
        peer, start = self.peer(worker), time.monotonic()
        try:
            self.connections.connect(
                [peer], "start", timeout=self.timeout, should_stop=self.has_failed
            )
        except PeerError:
            self._raise_failure("connecting", time.monotonic() - start)
            raise
        return peer

    def _gather_values(self, name: str, value: str) -> dict[Worker, str]:
        """Gather one value from each worker of this stage."""
        self.store.set(f"{name}/{self.me.worker}", value)
        workers = [w for w in self.setup.workers if w.stage == self.me.worker.stage]
        keys = {worker: f"{name}/{worker}" for worker in workers}

        def missing() -> tuple[str, str]:
            names = [str(worker) for worker, key in keys.items() if not self.store.check([key])]
            return format_items(names), _NOT_JOINED

        # One call for all keys: each call to the store takes a round trip.
        self.wait_until(lambda: self.store.check(list(keys.values())), missing, "starting")
        values = self.store.multi_get(list(keys.values()))
        return {worker: value.decode() for worker, value in zip(keys, values, strict=True)}

    def _wait_for_value(self, key: str, owner: Worker | str) -> bytes:
        """Wait until `owner` has stored a value, and return it."""
        missing = str(owner), _NOT_JOINED
        self.wait_until(lambda: self.store.check([key]), lambda: missing, "starting")
        return self.store.get(key)

    def has_failed(self) -> bool:
        return self.store.check([_FAILED])

    def _raise_failure(self, action: str, waited: Seconds) -> None:
        if self.has_failed():
            worker, _, why = self.store.get(_FAILED).decode().partition(": ")
            raise PeerError(
                worker, action=action, waited=waited, cause=f"it could not start: {why}"
            )


def _own_address() -> str:
    """Return this machine's address on its route to the store, which all workers reach."""
    store = _get_default_store()
    if isinstance(store, PrefixStore):
        store = store._underlying_non_prefix_store  # type: ignore[attr-defined]
    for name in (getattr(store, "host", ""), socket.gethostname()):
        try:
            with socket.socket(type=socket.SOCK_DGRAM) as probe:
                probe.connect((name, getattr(store, "port", _ANY_PORT)))  # sends nothing
                address: str = probe.getsockname()[0]
        except OSError:
            continue
        if name:
            return address
    raise LaunchError(
        "no address of this machine that other workers can reach",
        expected="a store of torch.distributed with an address, or a host name that resolves",
        fix="run `polyrhythm coordinator` and pass its address: GroupSync(..., coordinator=...)",
    )
