"""Messages between two processes of a probe: every wait has a timeout, errors name the lost peer.

A process that loses a peer writes the peer's rank into the job's store and aborts its process
group, so that processes waiting for it notice at once, read the store, and name the process that
was lost first. The store may be lost as well: calls to it run in a thread, with a timeout.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import abort
from polyrhythm.types import Seconds

# Tags of messages. PING, PONG and STREAM are the first of many, one per message.
NUMBER, LENGTH, CONTENT, SIZE, PING, PONG, STREAM = 1, 2, 3, 4, 10_000, 20_000, 30_000
_STORE_TIMEOUT: Seconds = 2.0  # for another process's loss to reach the store
_LOST = "polyrhythm/probe/lost/"
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class PeerChannel:
    rank: int
    world_size: int
    timeout: Seconds  # for one message, by default
    names: list[str] = field(init=False)  # of all processes, by rank, once known

    def __post_init__(self) -> None:
        self.names = [f"rank {rank}" for rank in range(self.world_size)]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def start_send(self, tensor: Tensor, to: int, *, tag: int, action: str) -> Any:
        with self._waiting(to, action):
            return dist.isend(tensor, to, tag=tag)

    def start_receive(self, tensor: Tensor, sender: int, *, tag: int, action: str) -> Any:
        """Post a receive, best before the send: gloo sends only after the receive is posted."""
        with self._waiting(sender, action):
            return dist.irecv(tensor, sender, tag=tag)

    def finish(self, work: Any, peer: int, *, action: str, timeout: Seconds | None = None) -> None:
        """Wait for a send or a receive; raises PeerError."""
        remaining = max(1e-3, self.timeout if timeout is None else timeout)
        with self._waiting(peer, action):
            work.wait(timedelta(seconds=remaining))

    def finish_all(
        self, works: list[Any], peer: int, *, action: str, timeout: Seconds
    ) -> list[Seconds]:
        """Wait for all within `timeout`; return the times at which each finished."""
        deadline, times = time.monotonic() + timeout, []
        for work in works:
            self.finish(work, peer, action=action, timeout=deadline - time.monotonic())
            times.append(time.perf_counter())
        return times

    def send(self, tensor: Tensor, to: int, *, tag: int, action: str, timeout: Seconds) -> None:
        work = self.start_send(tensor, to, tag=tag, action=action)
        self.finish(work, to, action=action, timeout=timeout)

    def receive(
        self, tensor: Tensor, sender: int, *, tag: int, action: str, timeout: Seconds
    ) -> None:
        work = self.start_receive(tensor, sender, tag=tag, action=action)
        self.finish(work, sender, action=action, timeout=timeout)

    def send_bytes(self, message: bytes, to: int, *, action: str, timeout: Seconds) -> None:
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for tensor, tag in ((torch.tensor([len(content)]), LENGTH), (content, CONTENT)):
            self.send(tensor, to, tag=tag, action=action, timeout=timeout)

    def receive_bytes(self, sender: int, *, action: str, timeout: Seconds) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self.receive(length, sender, tag=LENGTH, action=action, timeout=timeout)
        content = torch.zeros(int(length), dtype=torch.uint8)
        self.receive(content, sender, tag=CONTENT, action=action, timeout=timeout)
        return content.numpy().tobytes()

    def barrier(self, action: str, timeout: Seconds) -> None:
        """Wait for all processes. Rank 0 collects the messages, so that it can name a lost one."""
        message = torch.zeros(1)
        if self.rank > 0:
            self.send(message, 0, tag=NUMBER, action=action, timeout=timeout)
            self.receive(message, 0, tag=NUMBER, action=action, timeout=timeout)
            return
        # All concurrently: one after the other, each would take a round trip.
        deadline, messages = time.monotonic() + timeout, torch.zeros(self.world_size, 1)
        receives = [
            (rank, self.start_receive(messages[rank], rank, tag=NUMBER, action=action))
            for rank in self.others
        ]
        for rank, work in receives:
            self.finish(work, rank, action=action, timeout=deadline - time.monotonic())
        sends = [
            (rank, self.start_send(message, rank, tag=NUMBER, action=action))
            for rank in self.others
        ]
        for rank, work in sends:
            self.finish(work, rank, action=action, timeout=timeout)

    @contextmanager
    def _waiting(self, peer: int, action: str) -> Iterator[None]:
        try:
            with peer_errors(self.names[peer], action):
                yield
        except PeerError as error:
            culprit = self._first_lost(peer)
            cause = error.cause
            if culprit != peer:
                cause = f"{self.names[peer]} has lost it"
            raise PeerError(
                self.names[culprit], action=action, waited=error.waited, cause=cause
            ) from None

    def _first_lost(self, peer: int) -> int:
        """Follow the losses reported in the store from `peer` to the first lost process."""
        store, culprit, seen = _get_default_store(), peer, {self.rank, peer}
        _call_with_timeout(
            lambda: store.set(f"{_LOST}{self.rank}", str(peer)), timeout=_STORE_TIMEOUT
        )
        assert dist.group.WORLD is not None, "the process group is initialised"
        abort(dist.group.WORLD)
        while (
            reported := _call_with_timeout(
                partial(_reported_loss, store, culprit), timeout=2 * _STORE_TIMEOUT
            )
        ) is not None:
            if reported in seen:
                break
            culprit = reported
            seen.add(culprit)
        if self.rank == 0:
            time.sleep(_STORE_TIMEOUT)  # rank 0 may host the store, which the others read
        return culprit


def _reported_loss(store: Any, rank: int) -> int | None:
    """Return the rank that process `rank` has lost; None if it reports none in time."""
    key, deadline = f"{_LOST}{rank}", time.monotonic() + _STORE_TIMEOUT
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return int(store.get(key))


def _call_with_timeout(call: Callable[[], T], *, timeout: Seconds) -> T | None:
    """Return the store's answer; None if the store is lost or does not answer.

    The store's own timeouts do not cover a server that was stopped. The thread that waits for it
    stays blocked outside of Python, and does not keep the interpreter from exiting.
    """
    answers: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def wait() -> None:
        try:
            answers.put(call())
        except RuntimeError:  # rank 0 is lost, and the store with it
            answers.put(None)

    threading.Thread(target=wait, name="store call", daemon=True).start()
    try:
        return answers.get(timeout=timeout)
    except queue.Empty:
        return None
