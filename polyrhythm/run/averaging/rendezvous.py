"""Rendezvous of the workers of a job, before they average: who is there, and one initial state.

The workers agree over the job's store (`comm/store.py`) on their settings, machines and tensors, on
the address of the coordinator, and on the first error. Tensors go over connections between pairs.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from polyrhythm.errors import LaunchError, PeerError, PolicyError, UserError, peer_errors
from polyrhythm.run.averaging.buffers import FlatBuffer
from polyrhythm.run.averaging.exchange import Peer, PeerConnections
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.launch import own_address, worker_keys
from polyrhythm.run.comm.process_groups import fingerprint
from polyrhythm.run.comm.store import JobStore, Members, job_store_backend
from polyrhythm.run.coordinator.keys import KEYS_VARIABLE, ClientKeys, ServerKeys
from polyrhythm.run.coordinator.server import Coordinator
from polyrhythm.run.coordinator.sessions import TensorShapes, shape_mismatch
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds, Worker

_FAILURE = "the first error"
_EPOCH = 0  # all workers are present from the start
_STARTUP_FACTOR = 1.1  # times the timeout: by then every waiting worker has timed out

_logger = logging.getLogger(__name__)


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
    """One worker's side of a rendezvous.

    Members of the store's agreements are numbered by stage and pipeline; under ssp the parameter
    server is the last one.
    """

    def __init__(
        self,
        setup: Setup,
        worker: Worker,
        *,
        timeout: Seconds,
        name: str,
        process_group: dist.ProcessGroup | None = None,
        num_sockets: int = 1,
    ) -> None:
        """`timeout` bounds every wait for other workers; `name` is unique in the process group.

        `num_sockets`: see PeerConnections.
        """
        check_timeout(timeout)
        if not dist.is_initialized():
            raise LaunchError(
                "group averaging without torch.distributed",
                expected="an initialised torch.distributed",
                fix="start with torchrun, and call torch.distributed.init_process_group first",
            )
        self.setup, self.timeout, self._start = setup, timeout, time.monotonic()
        names = [str(w) for w in setup.workers]
        self.workers = Members(tuple(range(len(names))), _EPOCH)
        if setup.mode.has_server:
            names.append(f"{server_worker(0, setup.num_pipelines)} (the parameter server)")
        self._all = Members(tuple(range(len(names))), _EPOCH)
        is_server = worker not in setup.workers
        number = len(names) - 1 if is_server else setup.workers.index(worker)
        self._name, self._prefix = name, f"polyrhythm/sync/{name}"
        self._num_sockets = num_sockets
        if process_group is not None:  # others may use the same name
            self._prefix += f"/{dist.get_process_group_ranks(process_group)}"
        self.store = JobStore(
            job_store_backend(self._prefix, timeout),
            number,
            timeout=timeout,
            name_of=names.__getitem__,
            check=self.raise_failure,
        )
        self.me, self._keys = self.peer(worker), worker_keys()
        self.nodes: dict[Worker, str] = {}  # of all workers, once they are present
        self._public_keys: list[str] = []
        self.connections = self.connections_of(self.me)
        token = secrets.token_hex(8)
        if self.store.set_once(f"the process of {worker}", token, self._all) != token:
            raise LaunchError(
                f"another GroupSync with the name {name!r} for {worker}",
                expected="a name for each GroupSync of a job, the same in all its processes",
                fix=f"pass a new one: GroupSync(..., name={f'{name}-2'!r})",
            )

    def connections_of(self, me: Peer) -> PeerConnections:
        """Return new connections, for one thread."""
        # A store of torch.distributed, which is initialised: gloo needs it as well.
        store = cast("Store", job_store_backend(self._prefix, self.timeout))
        return PeerConnections(store, me, num_sockets=self._num_sockets)

    @property
    def stage(self) -> Members:
        """The workers of this worker's stage."""
        stage, size = self.me.worker.stage, self.setup.num_pipelines
        return Members(tuple(range(stage * size, (stage + 1) * size)), _EPOCH)

    def wait_for_all(self, node: str = "") -> None:
        """Wait until all workers, and under ssp the parameter server, are present.

        They exchange the names of their machines and their public keys.
        """
        own = node, self._keys.client.public
        found = self.store.all_gather_object("the workers", own, self._all)[
            : len(self.workers.ranks)
        ]
        self.nodes = {w: at for w, (at, _) in zip(self.setup.workers, found, strict=True)}
        self._public_keys = [public for _, public in found]
        for public, number in zip(self._public_keys, self.workers.ranks, strict=True):
            self._keys.check(public, self.store.name_of(number))

    def check_settings(self, optimizer: str) -> None:
        """Refuse another setup than the first worker's, or another optimizer than the replicas'."""
        shape = f"{self.setup.num_stages} x {self.setup.num_pipelines}"
        settings = {"policy": self.setup.text, "stages x pipelines": shape}
        self.store.check_consistent(f"the settings of name={self._name!r}", settings, self.workers)
        self.store.check_consistent("the optimizer", {"optimizer": optimizer}, self.stage)

    def report_failure(self, error: BaseException) -> str:
        """End the waits of the other workers; return the first error of the job."""
        why = error.wrong if isinstance(error, UserError) else str(error)
        worker = str(self.me.worker)
        with contextlib.suppress(PeerError):  # the store is gone: no worker waits on it
            worker, why = self.store.set_once(_FAILURE, (worker, why), self._all)
        self.connections.abort_all()
        return f"{worker}: {why}"

    def has_failed(self) -> bool:
        return self.store.peek(_FAILURE, self._all) is not None

    def raise_failure(self) -> None:
        """Raise the first error of another worker, if there is one, or that of the epoch."""
        self.store.epoch.check()
        failure = self.store.peek(_FAILURE, self._all)
        if failure is not None:
            worker, why = failure
            waited, cause = time.monotonic() - self._start, f"it could not start: {why}"
            raise PeerError(worker, action="starting", waited=waited, cause=cause)

    def check_same_shapes(self, shape: TensorShapes) -> None:
        """Refuse tensors other than the first pipeline's, before any are sent."""
        expected = self.store.broadcast_object(
            "the tensors", shape, self.stage, as_type=TensorShapes
        )
        if shape != expected:
            first = Worker(self.me.worker.stage, 0)
            raise PolicyError(
                shape_mismatch(self.me.worker, shape, first, expected),
                expected="replicas of one model, with the same parameters to train",
                fix="build the same model in every process",
            )

    def broadcast_initial_state(self, buffers: Sequence[FlatBuffer]) -> None:
        """Copy the state of the stage's first worker to all; only buffers that differ are sent."""
        if self.setup.num_pipelines == 1:
            return
        own = [fingerprint([buffer.read()]) for buffer in buffers]
        by_worker = self.store.all_gather_object("the initial state", own, self.stage)
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

    def start_coordinator(self, log: Path | None) -> tuple[Coordinator | None, str, ClientKeys]:
        """Start the coordinator in the first worker; return it there, its address and the keys.

        It accepts the workers' public keys, which all have published. In a job whose workers may be
        lost it is not started in a worker: then return None, address and keys.
        """
        started, hosting = list[Coordinator](), current_epoch().group_hosting

        def start() -> tuple[str, str]:
            startup_timeout = _STARTUP_FACTOR * self.timeout
            if hosting is not None:
                return hosting.start(self._prefix, self.setup, log, startup_timeout), ""
            if self._keys.trusted is None:
                _warn_unprotected()
            coordinator = Coordinator(
                self.setup,
                bind=f"tcp://{_own_address()}:0",
                keys=ServerKeys(self._keys.server, frozenset(self._public_keys)),
                log=log,
                startup_timeout=startup_timeout,
                log_info=_logger.info,
                log_warning=_logger.warning,
            )
            started.append(coordinator.start())
            return coordinator.address, self._keys.server.public

        address, server = self.store.run_on_leader("the coordinator", start, self.workers)
        if hosting is not None:
            return None, address, ClientKeys(self._keys.client, hosting.public_key)
        self._keys.check(server, self.store.name_of(self.workers.leader))
        return next(iter(started), None), address, ClientKeys(self._keys.client, server)

    def peer(self, worker: Worker) -> Peer:
        """Return a worker in its incarnation: it has one, since the start."""
        return Peer(worker, _EPOCH)

    def _connect(self, worker: Worker) -> Peer:
        """Connect to a worker outside any group; that worker calls this, too."""
        peer = self.peer(worker)
        try:
            self.connections.connect(
                [peer], "start", timeout=self.timeout, should_stop=self.has_failed
            )
        except PeerError:
            self.raise_failure()
            raise
        return peer


def check_worker_keys(store: JobStore, members: Members) -> None:
    """Refuse an unusable key file, or different ones, on all members; the leader reports none."""
    try:
        trusted = worker_keys().trusted
    except UserError as error:
        store.fail("the keys", error, members)
        raise
    if trusted is None and store.rank == members.leader:
        _warn_unprotected()
    digest = None if trusted is None else sha256(" ".join(sorted(trusted)).encode()).hexdigest()
    fix = f"set {KEYS_VARIABLE} to copies of one file in all processes, or nowhere"
    store.check_consistent("the keys", {"keys of the job": digest}, members, fix=fix)


@cache
def _warn_unprotected() -> None:
    """Warn once: a job may start several coordinators."""
    _logger.warning(
        "control messages are not protected from whoever reaches the store of the job; "
        "`polyrhythm keys FILE` and %s=FILE in all processes protect them",
        KEYS_VARIABLE,
    )


def _own_address() -> str:
    """Return this machine's address on its route to the store, which all workers reach."""
    store = _get_default_store()
    if isinstance(store, PrefixStore):
        store = store._underlying_non_prefix_store  # type: ignore[attr-defined]
    if (address := own_address(getattr(store, "host", ""))) is not None:
        return address
    raise LaunchError(
        "no address of this machine that other workers can reach",
        expected="a store of torch.distributed with an address, or a host name that resolves",
        fix="run `polyrhythm coordinator` and pass its address: GroupSync(..., coordinator=...)",
    )
