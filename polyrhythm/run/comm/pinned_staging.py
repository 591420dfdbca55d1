"""Collectives of buckets on a GPU over gloo: staged through pinned host memory.

A bucket is copied to the host in stream order behind the kernels that compute it. A separate thread
waits for the copy and posts the messages, which travel while the previous bucket is summed. The
thread that waits for the bucket copies the result back.

The copies in the two directions have separate streams: in one stream, a copy to the GPU would queue
behind the copy of the next bucket to the host, which waits for gradients not computed yet.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.reduce_scatter import CollectivePhase, Collectives, Pending

_WHOLE = slice(None)


class PinnedCollectives:
    """Wraps the collectives of buckets in main memory.

    `start` runs a function in the communication thread, which may also start collectives. After a
    wait the bucket is on the GPU: no stream has to wait.
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
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # Pinned buffers that are not in use.
        self._pinned_buffers: dict[tuple[int, CollectivePhase], Tensor] = {}
        self._post_executor = ThreadPoolExecutor(1, thread_name_prefix="decoupled posting")
        start(self._set_thread_stream)

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """Do nothing: a bucket has no buffer in main memory before its collective starts."""

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        post, own_shard = partial(self._host.reduce_scatter, number=number), self._own_shard(flat)
        return self._start_send(
            flat,
            (number, CollectivePhase.REDUCE_SCATTER),
            post,
            to_host=[_WHOLE],
            to_device=[own_shard],
        )

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        post, own_shard = partial(self._host.all_gather, number=number), self._own_shard(flat)
        others = [slice(0, own_shard.start), slice(own_shard.stop, len(flat))]
        return self._start_send(
            flat, (number, CollectivePhase.ALL_GATHER), post, to_host=[own_shard], to_device=others
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
        to_host: Sequence[slice],
        to_device: Sequence[slice],
    ) -> Pending:
        staged = self._pinned(flat, key)
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        copied = self._copy(flat, staged, to_host, self._to_host)
        for stream in (self._to_host, self._to_device):
            flat.record_stream(stream)  # after an error `flat` may be freed without a wait
        return _StagedWork(
            posted=self._post_executor.submit(_post, copied, post, staged),
            copy_back=partial(self._copy_back, staged, flat, to_device, key),
        )

    def _pinned(self, flat: Tensor, key: tuple[int, CollectivePhase]) -> Tensor:
        """Take a pinned buffer of the size of `flat`; `_copy_back` returns it after the wait."""
        staged = self._pinned_buffers.pop(key, None)
        if staged is not None and (staged.shape, staged.dtype) == (flat.shape, flat.dtype):
            return staged
        if staged is not None:  # the buckets have changed
            self._pinned_buffers.clear()
        return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)

    def _copy_back(
        self,
        staged: Tensor,
        flat: Tensor,
        shards: Sequence[slice],
        key: tuple[int, CollectivePhase],
    ) -> None:
        # Waits here, not in the consumer's stream: a copy is short compared with the messages.
        self._copy(staged, flat, shards, self._to_device).synchronize()
        self._pinned_buffers[key] = staged

    def _copy(
        self, source: Tensor, into: Tensor, shards: Sequence[slice], stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        """Start the copy; return the event of its end."""
        done = torch.cuda.Event(blocking=True)  # the waiting thread sleeps: sums need the core
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for shard in shards:
                into[shard].copy_(source[shard], non_blocking=True)
            done.record(stream)
        return done

    def _set_thread_stream(self) -> None:
        """In the communication thread: order its own sends behind its copies to the GPU.

        In the default stream, which all threads share, they would queue behind all compute.
        """
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._to_device)


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
