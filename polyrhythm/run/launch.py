"""Start a job: local processes forked from here, or the place that torchrun gave this process.

Local workers are forked from a parent that has torch loaded: they start in a tenth of a second and
share its memory. The parent owns them: they die with it (whatever kills it), and the first one that
fails ends the job with its reason. Inside a worker nothing tells the two ways apart.
"""

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch._dynamo  # every optimizer imports it: before the fork, or 1 s and 100 MB per worker
import torch.distributed as dist

from polyrhythm.errors import LaunchError, WorkerError
from polyrhythm.processes import PEER_LOST, Child, wait_for_any
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds


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
        self._workers: list[Child] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        gc.collect()
        gc.freeze()  # a collection in a child would touch, and so copy, every shared page
        with socket.create_server(("127.0.0.1", 0), backlog=self._num_workers) as listening:
            for rank in range(self._num_workers):
                place = Place(
                    rank=rank,
                    world_size=self._num_workers,
                    local_rank=rank,
                    listening=listening,
                )
                self._workers.append(
                    Child(partial(_run, self._work, place), output=self._folder / f"rank{rank}.log")
                )
        return self

    def wait(self, timeout: Seconds) -> bool:
        """Wait for an end, `timeout` at the most; True when all are done. Raises WorkerError."""
        ends = time.monotonic() + timeout
        while any(worker.status is None for worker in self._workers):
            self._raise_failure()
            if (left := ends - time.monotonic()) <= 0:
                break
            wait_for_any(self._workers, left)
        self._raise_failure()
        return all(worker.status == 0 for worker in self._workers)

    def _raise_failure(self) -> None:
        failed = {rank: w.status for rank, w in enumerate(self._workers) if w.status}
        if not failed:
            return
        # When one dies its peers fail too: name the one that did not just lose a peer.
        rank = min(failed, key=lambda rank: (failed[rank] == PEER_LOST, rank))
        worker = self._workers[rank]
        raise WorkerError(rank, worker.reason, status=failed[rank], output=str(worker.output))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            if worker.output and worker.output.exists() and not worker.output.stat().st_size:
                worker.output.unlink()  # a job that went well leaves no empty files


def _run(work: Callable[[Place], None], place: Place) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.world_size))
    work(place)
