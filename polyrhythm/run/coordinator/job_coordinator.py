"""JobCoordinator: the process of a job that owns its membership, and serves its store.

It is no worker, so the loss of rank 0 is a loss like any other. Our launcher forks it before the
workers: they inherit neither its listening socket, which would accept connections for a dead
coordinator, nor its keys.

Under torchrun rank 0 starts it (`start_detached`) as a new interpreter, since a process with the
threads of torch and CUDA must not fork. It is in no session of rank 0's, ends by itself, and gets
its keys through a pipe: arguments and environment can be read by others.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from polyrhythm.errors import LaunchError
from polyrhythm.processes import Child, reserve_port
from polyrhythm.run.coordinator.epoch_client import CoordinatorAccess
from polyrhythm.run.coordinator.epoch_server import EpochServer, LossTimeouts
from polyrhythm.run.coordinator.keys import ClientKeys, KeyPair, ServerKeys, WorkerKeys
from polyrhythm.sync.epochs import Member
from polyrhythm.types import Seconds

if TYPE_CHECKING:  # it imports torch, which the new interpreter loads after its fork
    from polyrhythm.run.comm.store import JobStore, Members

_START_TIMEOUT: Seconds = 60.0  # of a new interpreter on a slow disk
_ABSENCE_TIMEOUT: Seconds = 60.0  # without any member, if not all have been present
_WATCH_INTERVAL: Seconds = 0.2
_MODULE = "polyrhythm.run.coordinator.job_coordinator"


class _Exit(msgspec.Struct, frozen=True):
    """The process of a member has ended; the launcher sends this as a line of JSON."""

    member: Member
    why: str
    incarnation: int = 0


class LabHost(NamedTuple):
    """A host of the lab, and two ports that are free in its network."""

    address: str
    ports: tuple[int, int]
    start: Callable[..., Child]  # starts a process there, as Child does


class JobCoordinator:
    """The launcher's side: starts the process, and reports to it which workers have ended."""

    def __init__(
        self,
        clients: Collection[KeyPair],
        *,
        output: Path,
        log: Path | None = None,
        timeouts: LossTimeouts | None = None,
        lab_host: LabHost | None = None,
    ) -> None:
        """`clients` are the keys of the workers, by rank; `log` gets the events of membership.

        With `lab_host` it serves there, and the workers, on other hosts, may connect before.
        """
        self._pair, self._timeouts = KeyPair.new(), timeouts or LossTimeouts()
        self._keys = ServerKeys(self._pair, frozenset(pair.public for pair in clients))
        self._num_workers, self._output, self._log = len(clients), output, log
        self._lab_host, self._num_restarts = lab_host, 0
        # Held as long as the job: a client that reconnects must not reach another service.
        self._ports = list[socket.socket]()
        self.store_address: tuple[str, int]
        if lab_host is None:
            self._ports = [reserve_port(), reserve_port()]
            self._address = "tcp://{}:{}".format(*self._ports[0].getsockname())
            self.store_address = self._ports[1].getsockname()
        else:
            self._address = f"tcp://{lab_host.address}:{lab_host.ports[0]}"
            self.store_address = lab_host.address, lab_host.ports[1]
        self._reports, self.process = self._start(output, resumes=False)

    @property
    def can_restart(self) -> bool:
        """Whether its successor knows what it has decided."""
        return self._log is not None and self._lab_host is None

    def restart(self) -> None:
        """Start the process again after its end, from its log; workers reconnect to it."""
        self._num_restarts += 1
        self._reports.close()
        name = f"{self._output.stem}.{self._num_restarts}{self._output.suffix}"
        self._reports, self.process = self._start(self._output.with_name(name), resumes=True)

    def _start(self, output: Path, *, resumes: bool) -> tuple[socket.socket, Child]:
        ours, received = socket.socketpair()
        # Listens before the workers start, or they would have to try again.
        listen_socket = None
        if self._lab_host is None:
            listen_socket = _listen(self.store_address, self._num_workers)

        def serve() -> None:
            ours.close()  # else its end would not be noticed
            server = EpochServer(
                self._num_workers,
                bind=self._address,
                keys=self._keys,
                timeouts=self._timeouts,
                log=self._log,
                resumes=resumes,
            )
            serving = listen_socket or _listen(self.store_address, self._num_workers)
            _serve(server, serving, received)

        with listen_socket or contextlib.nullcontext(), received:
            start = Child if self._lab_host is None else self._lab_host.start
            return ours, start(serve, output=output)

    def access(self, client: KeyPair) -> CoordinatorAccess:
        """Return what a worker needs to enroll."""
        keys = ClientKeys(client, self._pair.public)
        return CoordinatorAccess(self._address, keys, self._timeouts, is_restarted=self.can_restart)

    def report_exit(self, member: Member, why: str, *, incarnation: int = 0) -> None:
        """Report that the process of a worker has ended; without it the others notice later."""
        report = _Exit(member, why, incarnation)
        with contextlib.suppress(OSError):  # the coordinator has ended
            self._reports.sendall(msgspec.json.encode(report) + b"\n")

    def close(self) -> None:
        """Close the launcher's sockets; the process must have ended."""
        self._reports.close()
        for port in self._ports:
            port.close()


class _Setup(msgspec.Struct, frozen=True):
    """What a detached coordinator reads from its standard input."""

    host: str
    num_members: int
    keys: ServerKeys
    absence_timeout: Seconds


class Addresses(NamedTuple):
    """Where a coordinator serves the epochs and the store of its job."""

    epochs: str
    store: tuple[str, int]


def start_detached(
    host: str,
    keys: ServerKeys,
    num_members: int,
    *,
    absence_timeout: Seconds = _ABSENCE_TIMEOUT,
) -> Addresses:
    """Start a coordinator that outlives this process, on an address of this machine.

    It ends when all members have finished or are lost, or when none is present for
    `absence_timeout` although not all have been.
    """
    setup = _Setup(host, num_members, keys, absence_timeout)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", _MODULE],
            input=msgspec.json.encode(setup),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            stdout=subprocess.PIPE,
            timeout=_START_TIMEOUT,
        )
        return msgspec.json.decode(done.stdout, type=Addresses)
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        raise LaunchError(
            f"the job's coordinator cannot be started on {host}: {error}",
            expected="a new Python process on the machine of rank 0, which the others reach there",
            fix="see its error above; without it a loss ends the job: "
            "set POLYRHYTHM_KEEP_SURVIVORS=0 in all processes",
        ) from None


def share_detached(
    store: "JobStore", members: "Members", keys: WorkerKeys, host: Callable[[], str]
) -> tuple[CoordinatorAccess, tuple[str, int]]:
    """Let the leader start a coordinator, and return a member's access to it, and its store.

    The members' store has public keys only. `host()` is the leader's address for the others.
    """
    public = store.all_gather_object("the keys of the members", keys.client.public, members)
    for rank, key in zip(members.ranks, public, strict=True):
        keys.check(key, store.name_of(rank))

    def start() -> tuple[str, str, tuple[str, int]]:
        server_keys = ServerKeys(keys.server, frozenset(public))
        addresses = start_detached(host(), server_keys, len(members.ranks))
        return addresses.epochs, keys.server.public, addresses.store

    address, server, store_address = store.run_on_leader("the job's coordinator", start, members)
    keys.check(server, store.name_of(members.leader))
    return CoordinatorAccess(address, ClientKeys(keys.client, server)), store_address


def _serve_detached() -> None:
    """Serve as `start_detached` says; runs in the new interpreter."""
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=_Setup)
    if os.fork():  # the parent of this process has only a child that ends at once
        os._exit(0)
    os.setsid()
    listen_socket = _listen((setup.host, 0), setup.num_members)
    server = EpochServer(setup.num_members, bind=f"tcp://{setup.host}:0", keys=setup.keys)
    found = Addresses(server.address, listen_socket.getsockname())
    with os.fdopen(os.dup(1), "wb") as output:
        output.write(msgspec.json.encode(found))
    unused = os.open(os.devnull, os.O_RDWR)
    os.dup2(unused, 0)
    os.dup2(unused, 1)  # the starter reads to the end
    ends, received = socket.socketpair()
    watched = server, ends, setup.absence_timeout
    threading.Thread(target=_watch_members, args=watched, name="members", daemon=True).start()
    _serve(server, listen_socket, received)


def _watch_members(server: EpochServer, ends: socket.socket, absence_timeout: Seconds) -> None:
    """Close `ends`, which ends the service, when the job needs it no more."""
    present_at = time.monotonic()
    while not server.is_over and time.monotonic() - present_at < absence_timeout:
        time.sleep(_WATCH_INTERVAL)
        if server.epochs.present:
            present_at = time.monotonic()
    ends.close()


def _listen(address: tuple[str, int], num_clients: int) -> socket.socket:
    return socket.create_server(address, backlog=num_clients + 1)


def _serve(server: EpochServer, listen_socket: socket.socket, reports: socket.socket) -> None:
    """Serve the store and the epochs of a job until its launcher ends."""
    import torch.distributed as dist

    stop_event = threading.Event()
    reader = threading.Thread(
        target=partial(_read_reports, reports, server, stop_event), name="reports", daemon=True
    )
    host, port = listen_socket.getsockname()
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed as such
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listen_socket.detach(),
    )
    reader.start()
    server.serve(stop_event)
    del store


def _read_reports(reports: socket.socket, server: EpochServer, stop_event: threading.Event) -> None:
    with reports.makefile("rb") as lines:
        for line in lines:
            report = msgspec.json.decode(line, type=_Exit)
            server.report_exit(report.member, report.why, incarnation=report.incarnation)
    stop_event.set()  # the launcher has ended


if __name__ == "__main__":
    _serve_detached()
