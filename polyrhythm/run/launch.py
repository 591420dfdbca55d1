"""Start a job: local processes forked from here, or the place that torchrun gave this process.

Local workers are forked from a parent that has torch loaded: they start in a tenth of a second and
share its memory. The parent owns them: they die with it (whatever kills it), and the first one that
fails ends the job with its reason. Inside a worker nothing tells the two ways apart.
"""

import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch._dynamo  # every optimizer imports it: before the fork, or 1 s and 100 MB per worker
import torch.distributed as dist

from polyrhythm.errors import LaunchError, PeerError, UserError, WorkerError
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds

# Exit statuses of a worker
FAILED, BAD_INPUT, PEER_LOST = 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which process of the job this is, and how it finds the others."""

    rank: int
    world_size: int
    local_rank: int
    listening: socket.socket | None = None  # local jobs: where rank 0 serves the rendezvous

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self | None:
        """The place that torchrun (or whatever sets its variables) gave; None outside of it."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        try:
            return cls(
                rank=int(environ["RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
            )
        except ValueError as error:
            raise LaunchError(
                f"RANK, WORLD_SIZE or LOCAL_RANK in the environment: {error}",
                expected="whole numbers, as torchrun sets them",
                fix="start with torchrun, or unset them to run on this machine alone",
            ) from None

    @contextmanager
    def joined(self, deadline: Seconds) -> Iterator[None]:
        """Meet the other processes; inside, torch.distributed works and every wait is bounded.

        All leave together: rank 0 serves the rendezvous, and must not go while another needs it.
        """
        with waiting_for("another process of the job", "joining"):
            self._join(deadline)
        yield
        # Not after a failure: a live exception holds the group, and its sockets would stay open.
        with waiting_for("another process of the job", "leaving together"):
            dist.barrier()
        dist.destroy_process_group()

    def _join(self, deadline: Seconds) -> None:
        timeout = timedelta(seconds=deadline)
        if self.listening is None:
            dist.init_process_group("gloo", init_method="env://", timeout=timeout)
            return
        host, port = self.listening.getsockname()
        serving = self.listening.detach() if self.rank == 0 else None
        self.listening.close()  # a copy left open elsewhere would accept for a rank 0 that died
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed as such
            host,
            port,
            self.world_size,
            is_master=self.rank == 0,
            timeout=timeout,
            master_listen_fd=serving,
        )
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )


class LocalJob:
    """`work(place)` in `num_workers` processes of this machine, while a `with` block lasts."""

    def __init__(
        self, work: Callable[[Place], None], num_workers: int, *, output_folder: Path
    ) -> None:
        self._work, self._num_workers, self._folder = work, num_workers, output_folder
        self._workers: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        gc.collect()
        gc.freeze()  # a collection in a child would touch, and so copy, every shared page
        fork = multiprocessing.get_context("fork")
        with socket.create_server(("127.0.0.1", 0), backlog=self._num_workers) as listening:
            for rank in range(self._num_workers):
                place = Place(
                    rank=rank,
                    world_size=self._num_workers,
                    local_rank=rank,
                    listening=listening,
                )
                worker = fork.Process(
                    target=_child, args=(self._work, place, os.getpid(), self.output(rank))
                )
                worker.start()
                self._workers.append(worker)
        return self

    def output(self, rank: int) -> Path:
        """Where a worker's stdout and stderr go; the file is gone after a job that went well."""
        return self._folder / f"rank{rank}.log"

    def wait(self, timeout: Seconds) -> bool:
        """Wait for an end, `timeout` at the most; True when all are done. Raises WorkerError."""
        ends = time.monotonic() + timeout
        while running := [worker.sentinel for worker in self._workers if worker.is_alive()]:
            self._raise_failure()
            left = ends - time.monotonic()
            if left <= 0 or not multiprocessing.connection.wait(running, left):
                break
        self._raise_failure()
        return not any(worker.is_alive() for worker in self._workers)

    def _raise_failure(self) -> None:
        codes = {rank: w.exitcode for rank, w in enumerate(self._workers) if w.exitcode}
        if not codes:
            return
        # When one dies its peers fail too: name the one that did not just lose a peer.
        rank = min(codes, key=lambda rank: (codes[rank] == PEER_LOST, rank))
        raise WorkerError(
            rank,
            _reason(codes[rank], self.output(rank)),
            status=codes[rank],
            output=str(self.output(rank)),
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for rank in range(len(self._workers)):
            if self.output(rank).exists() and not self.output(rank).stat().st_size:
                self.output(rank).unlink()


def _reason(status: int, output: Path) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    text = output.read_text(errors="replace").strip()
    if status == BAD_INPUT:
        return f"refused: {text}"
    unindented = [line for line in text.splitlines() if line[:1].strip()]
    return f"failed: {unindented[-1] if unindented else f'exit status {status}'}"


def _child(work: Callable[[Place], None], place: Place, parent: int, output: Path) -> None:
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    sys.stdout = sys.stderr = output.open("w", buffering=1)  # the parent may have replaced them
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.world_size))
    status = FAILED
    try:
        work(place)
        status = 0
    except UserError as error:
        print(error, file=sys.stderr)
        status = BAD_INPUT
    except PeerError:
        traceback.print_exc()
        status = PEER_LOST
    except BaseException:
        traceback.print_exc()
    os._exit(status)  # without the parent's exit handlers


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends, however it ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)
