"""Buckets on a GPU, over workers who can only send from main memory: through pinned buffers.

A bucket is copied out behind the kernels that compute it, without anybody waiting. A thread of its
own waits for that and posts the messages, so that they travel while the bucket before is added up.
Whoever waits for the bucket copies back what has become of it.

Copies out and copies back have streams of their own: in one, a copy back would stand behind the
copy out of the next bucket, which stands behind gradients that are not computed yet.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from polyrhythm.run.decoupled.halves import Half, Halves, Pending
from polyrhythm.run.peers import waiting_for

_EVERYTHING = slice(None)


class StagedHalves:
    """Around the halves of buckets in main memory.

    `start` runs something in the thread that is to wait for what is on its way. Buckets may also
    be sent from there. Once a wait is over, the bucket is on the GPU: no stream has to wait.
    """

    waits_on_host = True

    def __init__(
        self,
        host: Halves,
        device: torch.device,
        *,
        start: Callable[[Callable[[], None]], object],
    ) -> None:
        self.rank, self.num_workers = host.rank, host.num_workers
        self._host, self._device = host, device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._kept: dict[tuple[int, Half], Tensor] = {}  # pinned, and not in use
        self._posting = ThreadPoolExecutor(1, thread_name_prefix="decoupled posting")
        start(self._settle)

    def expect(self, flat: Tensor, number: int, half: Half) -> None:
        """Nothing yet: there is no room for it in main memory before it leaves."""

    def scatter(self, flat: Tensor, number: int) -> Pending:
        post, own = partial(self._host.scatter, number=number), self._own(flat)
        return self._sent(flat, (number, Half.SCATTER), post, out=[_EVERYTHING], back=[own])

    def gather(self, flat: Tensor, number: int) -> Pending:
        post, own = partial(self._host.gather, number=number), self._own(flat)
        others = [slice(0, own.start), slice(own.stop, len(flat))]
        return self._sent(flat, (number, Half.GATHER), post, out=[own], back=others)

    def _own(self, flat: Tensor) -> slice:
        part = len(flat) // self.num_workers
        return slice(self.rank * part, (self.rank + 1) * part)

    def _sent(
        self,
        flat: Tensor,
        key: tuple[int, Half],
        post: Callable[[Tensor], Pending],
        *,
        out: Sequence[slice],
        back: Sequence[slice],
    ) -> Pending:
        staged = self._pinned(flat, key)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        left = self._copy(flat, staged, out, self._out)
        for stream in (self._out, self._back):
            flat.record_stream(stream)  # should nobody wait, after an error, and it be freed
        return _Staged(
            posted=self._posting.submit(_post, left, post, staged),
            land=partial(self._land, staged, flat, back, key),
        )

    def _pinned(self, flat: Tensor, key: tuple[int, Half]) -> Tensor:
        """One of the size of `flat`. It is kept again when its wait is over, and not before."""
        staged = self._kept.pop(key, None)
        if staged is not None and (staged.shape, staged.dtype) == (flat.shape, flat.dtype):
            return staged
        if staged is not None:  # there are other buckets now
            self._kept.clear()
        return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)

    def _land(
        self, staged: Tensor, flat: Tensor, parts: Sequence[slice], key: tuple[int, Half]
    ) -> None:
        # Here, and not in the stream of whoever needs it: it is short, beside the messages.
        self._copy(staged, flat, parts, self._back).synchronize()
        self._kept[key] = staged

    def _copy(
        self, source: Tensor, into: Tensor, parts: Sequence[slice], stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        """The end of it."""
        done = torch.cuda.Event(blocking=True)  # its waiter sleeps: the sums need the core
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for part in parts:
                into[part].copy_(source[part], non_blocking=True)
            done.record(stream)
        return done

    def _settle(self) -> None:
        """In the thread that waits: what it sends itself follows what it has copied back.

        In a thread's first stream, which is that of all threads, it would follow all of compute.
        """
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._back)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    posted: Future[Pending]
    land: Callable[[], None]

    def wait(self) -> None:
        self.posted.result().wait()
        self.land()


def _post(left: torch.cuda.Event, post: Callable[[Tensor], Pending], staged: Tensor) -> Pending:
    left.synchronize()
    with waiting_for("another worker", "averaging"):
        return post(staged)
