"""Asynchronous reduce-scatter and all-gather of one buffer, the two phases of an all-reduce.

Over gloo they are point-to-point messages, all posted at once (`DirectExchange`, which group
averages use as well): in the reduce-scatter every worker sends every other worker its shard and
sums the shards that it receives; in the all-gather it sends its own shard to all. Gloo's own
reduce-scatter would move as many bytes as an all-reduce. Over NCCL they are NCCL's own collectives.

Messages have tags by buffer and phase, so that waits may come in any order; they leave in the order
in which they are posted: post first what is needed first.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import PolicyError, peer_errors
from polyrhythm.types import Seconds

HALF_PRECISION = (torch.float16, torch.bfloat16)
_NUM_TAGS = 2**20
_WHOLE = slice(None)
# Torch 2.11 has only the old names; newer releases warn about them.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_P = TypeVar("_P")
_P_contra = TypeVar("_P_contra", contravariant=True)


class Messages(Protocol[_P_contra]):
    """Posts the messages of one collective; its user waits for them."""

    def receive(self, peer: _P_contra, into: Tensor, *, tag: int, shard: int) -> None: ...
    def send(self, peer: _P_contra, tensor: Tensor, *, tag: int) -> None: ...


class DirectExchange(Generic[_P]):
    """Who sends what to whom: one worker's messages to and from the others, in both phases.

    Tensors are given in the order of `others`, the indices of the other members. Each worker starts
    at another peer: no peer gets all messages at once.
    """

    def __init__(self, members: Sequence[_P], rank: int) -> None:
        self.rank, self._members = rank, members
        self.others = [(rank + step) % len(members) for step in range(1, len(members))]

    def receive(
        self, messages: Messages[_P], into: Iterable[Tensor], *, tag: int, first_shard: int = 0
    ) -> None:
        """Post a receive from each other member: of its shard, or of its addend of our own."""
        for other, tensor in zip(self.others, into, strict=True):
            messages.receive(self._members[other], tensor, tag=tag, shard=first_shard + other)

    def send(self, messages: Messages[_P], tensors: Iterable[Tensor], *, tag: int) -> None:
        for other, tensor in zip(self.others, tensors, strict=True):
            messages.send(self._members[other], tensor, tag=tag)


class CollectivePhase(IntEnum):
    REDUCE_SCATTER = 0
    ALL_GATHER = 1
    FLAGS = 2


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective in flight."""

    wait: Callable[[], None]  # for its end; raises PeerError if a peer is lost; called once


class Collectives(Protocol):
    rank: int  # index of the shard that this worker owns
    num_workers: int
    waits_on_host: bool  # a wait blocks the thread; otherwise the current CUDA stream

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """Post the receives of the next collective of this buffer and phase ahead of its call.

        A gloo sender waits for the receive: posting it early saves the latency of that request.
        """

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        """Average: after the wait, this worker's shard of `flat` is the mean over all workers."""

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        """Gather: after the wait, `flat` contains every worker's own shard."""


class GlooCollectives:
    """Collectives made of point-to-point messages of a gloo group."""

    waits_on_host = True

    def __init__(
        self, group: dist.ProcessGroup, *, timeout: Seconds, owners: Sequence[int] | None = None
    ) -> None:
        """`owners` are the ranks in the group that own the shards, by default in order."""
        self.num_workers = group.size()
        owners = range(self.num_workers) if owners is None else owners
        self.rank = owners.index(group.rank())  # of its shard
        self._group, self._timeout = group, timedelta(seconds=timeout)
        self._exchange = DirectExchange(owners, self.rank)
        self._buffers: dict[int, Tensor] = {}  # received addends by number; kept for reuse
        self._expected: dict[tuple[int, CollectivePhase], tuple[_GroupMessages, Tensor]] = {}

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        self._expected[number, phase] = self._post_receives(flat, number, phase)

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        shards = flat.view(self.num_workers, -1)
        addends = [shards[other] for other in self._exchange.others]
        messages, received = self._start(flat, number, CollectivePhase.REDUCE_SCATTER, addends)
        return Pending(partial(_finish_mean, messages, shards[self.rank], received))

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        shards = [flat.view(self.num_workers, -1)[self.rank]] * (self.num_workers - 1)
        messages, _ = self._start(flat, number, CollectivePhase.ALL_GATHER, shards)
        return Pending(messages.wait)

    def all_reduce_flags(self, flags: Tensor, number: int) -> Pending:
        """Reduce one float64, the first 8 bytes, by a sum, and the bytes of 0 and 1 after it by or.

        `flags` has a multiple of 8 bytes.
        """
        own_flags = [flags.clone()] * (self.num_workers - 1)
        messages, received = self._start(flags, number, CollectivePhase.FLAGS, own_flags)
        return Pending(partial(_finish_flags, messages, flags, received))

    def _start(
        self, flat: Tensor, number: int, phase: CollectivePhase, sent: Iterable[Tensor]
    ) -> "tuple[_GroupMessages, Tensor]":
        """Send to each other worker; return the messages and the buffer that they fill."""
        expected = self._expected.pop((number, phase), None)
        messages, received = expected or self._post_receives(flat, number, phase)
        self._exchange.send(messages, sent, tag=_tag(number, phase))
        return messages, received

    def _post_receives(
        self, flat: Tensor, number: int, phase: CollectivePhase
    ) -> "tuple[_GroupMessages, Tensor]":
        """Post one receive per peer; return the messages and the buffer that they fill."""
        match phase:
            case CollectivePhase.ALL_GATHER:
                received = flat.view(self.num_workers, -1)
                into = [received[other] for other in self._exchange.others]
            case CollectivePhase.REDUCE_SCATTER:
                received = self._buffer(flat, number)
                into = list(received)
            case CollectivePhase.FLAGS:
                received = flat.new_empty(self.num_workers - 1, flat.numel())
                into = list(received)
        messages = _GroupMessages(self._group, self._timeout)
        self._exchange.receive(messages, into, tag=_tag(number, phase))
        return messages, received

    def _buffer(self, flat: Tensor, number: int) -> Tensor:
        shape = self.num_workers - 1, flat.numel() // self.num_workers
        buffer = self._buffers.get(number)
        if buffer is None or (buffer.shape, buffer.dtype) != (shape, flat.dtype):
            buffer = self._buffers[number] = flat.new_empty(shape)
        return buffer


class _GroupMessages:
    """The messages of one collective in a gloo group; the wait ends when all have arrived."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self._works: list[tuple[int, dist.Work]] = []

    def receive(self, peer: int, into: Tensor, *, tag: int, shard: int) -> None:
        with peer_errors(f"rank {peer}", "averaging"):  # fails at once if the peer is lost
            self._works.append((peer, self._group.recv([into], peer, tag)))

    def send(self, peer: int, tensor: Tensor, *, tag: int) -> None:
        with peer_errors(f"rank {peer}", "averaging"):
            self._works.append((peer, self._group.send([tensor], peer, tag)))

    def wait(self) -> None:
        for peer, work in self._works:
            with peer_errors(f"rank {peer}", "averaging"):
                work.wait(self._timeout)


def _finish_mean(messages: _GroupMessages, own_shard: Tensor, received: Tensor) -> None:
    """Average the shards; half-precision numbers in single precision, rounded once."""
    messages.wait()
    num_workers = len(received) + 1
    if own_shard.dtype in HALF_PRECISION:
        own_shard.copy_((own_shard.float() + received.float().sum(0)) / num_workers)
    else:
        for row in received:
            own_shard.add_(row)
        own_shard.div_(num_workers)


def _finish_flags(messages: _GroupMessages, flags: Tensor, received: Tensor) -> None:
    messages.wait()
    flags[:8].view(torch.float64).add_(received[:, :8].contiguous().view(torch.float64).sum(0))
    for row in received:
        flags[8:].bitwise_or_(row[8:])


def _tag(number: int, phase: CollectivePhase) -> int:
    return len(CollectivePhase) * (number % _NUM_TAGS) + phase


class HierarchicalCollectives:
    """Average inside each node first, then across nodes: fewer bytes travel between nodes.

    `inside` connects the workers of this node, `across` one worker of each node. With two workers
    on each of two nodes, a worker sends half of its gradients to its neighbour, then half of the
    sum to the other node: a quarter of all gradients crosses between nodes instead of half. The
    all-gather runs in reverse order. All nodes have the same number of workers, so that the mean of
    their means is the global mean.
    """

    waits_on_host = True

    def __init__(self, inside: Collectives, across: Collectives) -> None:
        self._inside, self._across = inside, across
        self.num_workers = inside.num_workers * across.num_workers
        self.rank = inside.rank * across.num_workers + across.rank  # of its shard, not in the job

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        self._inside.post_receives(flat, number, phase)
        self._across.post_receives(self._node_shard(flat), number, phase)

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        first, shard = self._inside.reduce_scatter(flat, number), self._node_shard(flat)
        return _in_sequence(first, lambda: self._across.reduce_scatter(shard, number))

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        first = self._across.all_gather(self._node_shard(flat), number)
        return _in_sequence(first, lambda: self._inside.all_gather(flat, number))

    def _node_shard(self, flat: Tensor) -> Tensor:
        return flat.view(self._inside.num_workers, -1)[self._inside.rank]


def _in_sequence(first: Pending, then: Callable[[], Pending]) -> Pending:
    """Start the second collective after the end of the first."""

    def wait() -> None:
        first.wait()
        then().wait()

    return Pending(wait)


class PinnedCollectives:
    """Collectives of buckets on a GPU over gloo: staged through pinned memory for `host`.

    A bucket is copied to the host in stream order behind the kernels that compute it. A separate
    thread waits for the copy and posts the messages, which travel while the previous bucket is
    summed. The thread that waits for the bucket copies the result back. The copies in the two
    directions have separate streams: in one stream, a copy to the GPU would queue behind the copy
    of the next bucket to the host, which waits for gradients not computed yet.

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
        post, key = self._host.reduce_scatter, (number, CollectivePhase.REDUCE_SCATTER)
        return self._start_send(
            flat, key, post, to_host=[_WHOLE], to_device=[self._own_shard(flat)]
        )

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        own, key = self._own_shard(flat), (number, CollectivePhase.ALL_GATHER)
        others = [slice(0, own.start), slice(own.stop, len(flat))]
        return self._start_send(flat, key, self._host.all_gather, to_host=[own], to_device=others)

    def _own_shard(self, flat: Tensor) -> slice:
        shard = len(flat) // self.num_workers
        return slice(self.rank * shard, (self.rank + 1) * shard)

    def _start_send(
        self,
        flat: Tensor,
        key: tuple[int, CollectivePhase],
        post: Callable[[Tensor, int], Pending],
        *,
        to_host: Sequence[slice],
        to_device: Sequence[slice],
    ) -> Pending:
        staged = self._pinned(flat, key)
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        copied = self._copy(flat, staged, to_host, self._to_host)
        for stream in (self._to_host, self._to_device):
            flat.record_stream(stream)  # after an error `flat` may be freed without a wait

        def start_posting() -> Pending:
            copied.synchronize()
            with peer_errors("another worker", "averaging"):
                return post(staged, key[0])

        posted = self._post_executor.submit(start_posting)

        def wait() -> None:
            posted.result().wait()
            # Here, not in the consumer's stream: a copy is short compared with the messages.
            self._copy(staged, flat, to_device, self._to_device).synchronize()
            self._pinned_buffers[key] = staged

        return Pending(wait)

    def _pinned(self, flat: Tensor, key: tuple[int, CollectivePhase]) -> Tensor:
        """Take a pinned buffer of the size of `flat`; the wait returns it."""
        staged = self._pinned_buffers.pop(key, None)
        if staged is not None and (staged.shape, staged.dtype) == (flat.shape, flat.dtype):
            return staged
        if staged is not None:  # the buckets have changed
            self._pinned_buffers.clear()
        return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)

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


class NcclCollectives:
    """NCCL's own collectives over a group of torch.distributed; used by one thread at a time.

    A wait blocks the current CUDA stream, not the host: wait in the stream that needs the bucket.
    All workers start collectives in the same order, in one stream: an all-gather may be started
    after a reduce-scatter of the same bucket without a wait in between. NCCL's watchdog notices a
    lost peer and ends the process.
    """

    waits_on_host = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.num_workers, self._group = group.rank(), group.size(), group

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """Do nothing: NCCL posts no receives ahead."""

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        """Average; divide half-precision numbers before the sum, as DDP does.

        NCCL's mean multiplies by the reciprocal rounded to their type: a third would be 0.2 % off.
        """
        flat = _real(flat)
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        operation = dist.ReduceOp.AVG
        if flat.dtype in HALF_PRECISION:
            flat.div_(self.num_workers)
            operation = dist.ReduceOp.SUM
        return _start(
            lambda: _reduce_scatter(own_shard, flat, op=operation, group=self._group, async_op=True)
        )

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        flat = _real(flat)
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        return _start(lambda: _all_gather(flat, own_shard, group=self._group, async_op=True))

    def all_reduce_sum(self, numbers: Tensor) -> None:
        """Sum `numbers` over all workers, for later work in the current stream."""
        _start(lambda: dist.all_reduce(numbers, group=self._group, async_op=True)).wait()


def _start(collective: Callable[[], dist.Work]) -> Pending:
    with peer_errors("another worker", "averaging"):  # the first collective connects all workers
        work = collective()

    def wait() -> None:
        with peer_errors("another worker", "averaging"):
            work.wait()  # with a timeout it would block the host

    return Pending(wait)


def _real(flat: Tensor) -> Tensor:
    """View complex numbers as real ones: NCCL has no complex types."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def select_backend(
    device: torch.device,
    group: dist.ProcessGroup | None,
    host: Collectives,
    *,
    start: Callable[[Callable[[], None]], object],
) -> Collectives:
    """Select the collectives for buckets on `device`, the device of the parameters.

    `group` is the user's process group, if there is one; `host` are the collectives of buckets in
    main memory; `start` runs a function in the communication thread.
    """
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        raise PolicyError(
            f"parameters on {device}",
            expected="parameters on the CPU, or on a CUDA device",
            fix="use DDP on other devices",
        )
    if group is not None and uses_nccl(device, group):
        return NcclCollectives(group)
    return PinnedCollectives(host, device, start=start)


def uses_nccl(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether `group` sends tensors on `device` over NCCL."""
    # Torch normalises every backend name to this form: "cpu:gloo,cuda:nccl".
    backends = dist.get_backend_config(group).split(",")
    return device.type == "cuda" and "cuda:nccl" in backends
