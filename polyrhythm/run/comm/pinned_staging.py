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

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.reduce_scatter import CollectivePhase, Collectives, Pending

_ALL = slice(None)


class PinnedCollectives:
    """Around the halves of buckets in main memory.

    `start` runs something in the thread that is to wait for what is on its way. Buckets may also
    be sent from there. Once a wait is over, the bucket is on the GPU: no stream has to wait.
    """

    waits_on_host = True

    def __init__(
        self,
        host: Collectives,
        device: torch.device,
        *,
        start: Callable[[Callable[[], None]], object],
    ) -> None:
        self.rank, self.num_workers = host.rank, host.num_workers
        self._host, self._device = host, device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pinned_buffers: dict[
            tuple[int, CollectivePhase], Tensor
        ] = {}  # pinned, and not in use
        self._post_executor = ThreadPoolExecutor(1, thread_name_prefix="decoupled posting")
        start(self._set_thread_stream)

    def expect(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """Nothing yet: there is no room for it in main memory before it leaves."""

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        post, own_shard = partial(self._host.reduce_scatter, number=number), self._own_shard(flat)
        return self._start_send(
            flat, (number, CollectivePhase.REDUCE_SCATTER), post, out=[_ALL], back=[own_shard]
        )

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        post, own_shard = partial(self._host.all_gather, number=number), self._own_shard(flat)
        others = [slice(0, own_shard.start), slice(own_shard.stop, len(flat))]
        return self._start_send(
            flat, (number, CollectivePhase.ALL_GATHER), post, out=[own_shard], back=others
        )

    def _own_shard(self, flat: Tensor) -> slice:
        shard = len(flat) // self.num_workers
        return slice(self.rank * shard, (self.rank + 1) * shard)

    def _start_send(
        self,
        flat: Tensor,
        key: tuple[int, CollectivePhase],
        post: Callable[[Tensor], Pending],
        *,
        out: Sequence[slice],
        back: Sequence[slice],
    ) -> Pending:
        staged = self._pinned(flat, key)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        copied = self._copy(flat, staged, out, self._out)
        for stream in (self._out, self._back):
            flat.record_stream(stream)  # should nobody wait, after an error, and it be freed
        return _StagedWork(
            posted=self._post_executor.submit(_post, copied, post, staged),
            copy_back=partial(self._copy_back, staged, flat, back, key),
        )

    def _pinned(self, flat: Tensor, key: tuple[int, CollectivePhase]) -> Tensor:
        """One of the size of `flat`. It is kept again when its wait is over, and not before."""
        staged = self._pinned_buffers.pop(key, None)
        if staged is not None and (staged.shape, staged.dtype) == (flat.shape, flat.dtype):
            return staged
        if staged is not None:  # there are other buckets now
            self._pinned_buffers.clear()
        return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)

    def _copy_back(
        self,
        staged: Tensor,
        flat: Tensor,
        shards: Sequence[slice],
        key: tuple[int, CollectivePhase],
    ) -> None:
        # Here, and not in the stream of whoever needs it: it is short, beside the messages.
        self._copy(staged, flat, shards, self._back).synchronize()
        self._pinned_buffers[key] = staged

    def _copy(
        self, source: Tensor, into: Tensor, shards: Sequence[slice], stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        """The end of it."""
        done = torch.cuda.Event(blocking=True)  # its waiter sleeps: the sums need the core
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for shard in shards:
                into[shard].copy_(source[shard], non_blocking=True)
            done.record(stream)
        return done

    def _set_thread_stream(self) -> None:
        """In the thread that waits: what it sends itself follows what it has copied back.

        In a thread's first stream, which is that of all threads, it would follow all of compute.
        """
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._back)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedWork:
    posted: Future[Pending]
    copy_back: Callable[[], None]

    def wait(self) -> None:
        self.posted.result().wait()
        self.copy_back()


def _post(copied: torch.cuda.Event, post: Callable[[Tensor], Pending], staged: Tensor) -> Pending:
    copied.synchronize()
    with peer_errors("another worker", "averaging"):
        return post(staged)
