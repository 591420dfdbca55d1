"""Messages between two processes of a probe: every wait is bounded, and a loss is told by name.

Who loses a peer writes so into the job's store and hangs up, so that whoever waits for it in turn
notices at once, looks there, and names the one that was lost first. The store may be lost as well:
it is asked in a thread, and not waited for longer than for news.
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
from polyrhythm.run.groups import break_off
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Seconds

# What a message is about. From PING on, one for each of many.
NUMBER, LENGTH, CONTENT, SIZE, PING, PONG, STREAM = 1, 2, 3, 4, 10_000, 20_000, 30_000
_NEWS: Seconds = 2.0  # until what another process knows has reached the store
_LOST = "polyrhythm/probe/lost/"
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Talk:
    rank: int
    world_size: int
    deadline: Seconds  # for one message, unless another is given
    names: list[str] = field(init=False)  # of all processes, by rank, as far as they are known

    def __post_init__(self) -> None:
        self.names = [f"rank {rank}" for rank in range(self.world_size)]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def start_send(self, tensor: Tensor, to: int, *, tag: int, action: str) -> Any:
        with self._waiting(to, action):
            return dist.isend(tensor, to, tag=tag)

    def start_receive(self, tensor: Tensor, sender: int, *, tag: int, action: str) -> Any:
        """Best before it is sent: gloo sends nothing to whoever has not asked for it."""
        with self._waiting(sender, action):
            return dist.irecv(tensor, sender, tag=tag)

    def finish(self, work: Any, peer: int, *, action: str, within: Seconds | None = None) -> None:
        """Wait for a send or a receive; raises PeerError."""
        left = max(1e-3, self.deadline if within is None else within)
        with self._waiting(peer, action):
            work.wait(timedelta(seconds=left))

    def finish_all(
        self, works: list[Any], peer: int, *, action: str, within: Seconds
    ) -> list[Seconds]:
        """Wait for all, `within` for them together; the times at which each was done."""
        ends, times = time.monotonic() + within, []
        for work in works:
            self.finish(work, peer, action=action, within=ends - time.monotonic())
            times.append(time.perf_counter())
        return times

    def send(self, tensor: Tensor, to: int, *, tag: int, action: str, within: Seconds) -> None:
        work = self.start_send(tensor, to, tag=tag, action=action)
        self.finish(work, to, action=action, within=within)

    def receive(
        self, tensor: Tensor, sender: int, *, tag: int, action: str, within: Seconds
    ) -> None:
        work = self.start_receive(tensor, sender, tag=tag, action=action)
        self.finish(work, sender, action=action, within=within)

    def tell(self, message: bytes, to: int, *, action: str, within: Seconds) -> None:
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for tensor, tag in ((torch.tensor([len(content)]), LENGTH), (content, CONTENT)):
            self.send(tensor, to, tag=tag, action=action, within=within)

    def hear(self, sender: int, *, action: str, within: Seconds) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self.receive(length, sender, tag=LENGTH, action=action, within=within)
        content = torch.zeros(int(length), dtype=torch.uint8)
        self.receive(content, sender, tag=CONTENT, action=action, within=within)
        return content.numpy().tobytes()

    def go_on_together(self, action: str, within: Seconds) -> None:
        """Wait until all are here. By way of rank 0, which then knows who is not."""
        nothing = torch.zeros(1)
        if self.rank > 0:
            self.send(nothing, 0, tag=NUMBER, action=action, within=within)
            self.receive(nothing, 0, tag=NUMBER, action=action, within=within)
            return
        # To and from all at once: one after the other, each would take a round trip.
        ends, words = time.monotonic() + within, torch.zeros(self.world_size, 1)
        heard = [
            (rank, self.start_receive(words[rank], rank, tag=NUMBER, action=action))
            for rank in self.others
        ]
        for rank, work in heard:
            self.finish(work, rank, action=action, within=ends - time.monotonic())
        told = [
            (rank, self.start_send(nothing, rank, tag=NUMBER, action=action))
            for rank in self.others
        ]
        for rank, work in told:
            self.finish(work, rank, action=action, within=within)

    @contextmanager
    def _waiting(self, peer: int, action: str) -> Iterator[None]:
        try:
            with waiting_for(self.names[peer], action):
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
        """Who was lost by the one that was lost by ... `peer`, as far as the store can tell."""
        store, culprit, heard = _get_default_store(), peer, {self.rank, peer}
        _answer(lambda: store.set(f"{_LOST}{self.rank}", str(peer)), within=_NEWS)
        assert dist.group.WORLD is not None, "joined"
        break_off(dist.group.WORLD)
        while (
            reported := _answer(partial(_reported, store, culprit), within=2 * _NEWS)
        ) is not None:
            if reported in heard:
                break
            culprit = reported
            heard.add(culprit)
        if self.rank == 0:
            time.sleep(_NEWS)  # it may serve the store, where the others are to look
        return culprit


def _reported(store: Any, rank: int) -> int | None:
    """Whom this process has lost; None if it does not say so in time."""
    key, ends = f"{_LOST}{rank}", time.monotonic() + _NEWS
    while not store.check([key]):
        if time.monotonic() > ends:
            return None
        time.sleep(0.05)
    return int(store.get(key))


def _answer(ask: Callable[[], T], *, within: Seconds) -> T | None:
    """What the store says; None if it is gone, or silent.

    No timeout of a store's covers a server that was stopped. The thread that waits for one stays
    behind, outside of Python, and does not keep the interpreter from ending.
    """
    answers: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def wait() -> None:
        try:
            answers.put(ask())
        except RuntimeError:  # rank 0 is gone, and the store with it
            answers.put(None)

    threading.Thread(target=wait, name="asking the store", daemon=True).start()
    try:
        return answers.get(timeout=within)
    except queue.Empty:
        return None
