"""JobCoordinator: the process of a local job that owns its membership, and serves its store.

It is no worker, so the loss of rank 0 is a loss like any other. The launcher forks it before the
workers: they inherit neither its listening socket, which would accept connections for a dead
coordinator, nor its keys.
"""

import contextlib
import socket
import threading
from collections.abc import Collection
from functools import partial
from pathlib import Path

import msgspec

from polyrhythm.processes import Child, reserve_port
from polyrhythm.run.coordinator.epoch_client import CoordinatorAccess
from polyrhythm.run.coordinator.epoch_server import EpochServer, LossTimeouts
from polyrhythm.run.coordinator.keys import ClientKeys, KeyPair, ServerKeys
from polyrhythm.sync.epochs import Member


class _Exit(msgspec.Struct, frozen=True):
    """The process of a member has ended; the launcher sends this as a line of JSON."""

    member: Member
    why: str


class JobCoordinator:
    """The launcher's side: starts the process, and reports to it which workers have ended."""

    def __init__(
        self,
        clients: Collection[KeyPair],
        *,
        output: Path,
        log: Path | None = None,
        timeouts: LossTimeouts | None = None,
    ) -> None:
        """`clients` are the keys of the workers, by rank; `log` gets the events of membership."""
        self._keys = KeyPair.new()
        keys = ServerKeys(self._keys, frozenset(pair.public for pair in clients))
        # Held as long as the job: a client that reconnects must not reach another service.
        self._port = reserve_port()
        bind = "tcp://{}:{}".format(*self._port.getsockname())
        self._address = bind
        self._reports, received = socket.socketpair()
        listen_socket = socket.create_server(("127.0.0.1", 0), backlog=len(clients) + 1)
        self.store_address: tuple[str, int] = listen_socket.getsockname()
        num_workers = len(clients)

        def serve() -> None:
            self._reports.close()  # else its end would not be noticed
            server = EpochServer(num_workers, bind=bind, keys=keys, timeouts=timeouts, log=log)
            _serve(server, listen_socket, received)

        with listen_socket, received:
            self.process = Child(serve, output=output)

    def access(self, client: KeyPair) -> CoordinatorAccess:
        """Return what a worker needs to enroll."""
        return CoordinatorAccess(self._address, ClientKeys(client, self._keys.public))

    def report_exit(self, member: Member, why: str) -> None:
        """Report that the process of a worker has ended; without it the others notice later."""
        with contextlib.suppress(OSError):  # the coordinator has ended
            self._reports.sendall(msgspec.json.encode(_Exit(member, why)) + b"\n")

    def close(self) -> None:
        """Close the launcher's sockets; the process must have ended."""
        self._reports.close()
        self._port.close()


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
            server.report_exit(report.member, report.why)
    stop_event.set()  # the launcher has ended
