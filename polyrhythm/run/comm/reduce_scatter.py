"""Asynchronous reduce-scatter and all-gather of one buffer, the two phases of an all-reduce.

Over gloo they are point-to-point messages, all posted at once (`DirectExchange`, which group
averages use as well): in the reduce-scatter every worker sends every other worker its shard and
sums the shards that it receives; in the all-gather it sends its own shard to all. Gloo's own
reduce-scatter would move as many bytes as an all-reduce. Over NCCL they are NCCL's own collectives.

Messages have tags by buffer and phase, so that waits may come in any order; they leave in the order
in which they are posted: post first what is needed first. With several sockets per peer, each has
a part of every large message.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from polyrhythm.errors import LaunchError, PeerError, PolicyError, peer_errors
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.process_groups import (
    NUM_SOCKETS,
    abort,
    confirm_nccl,
    split_message,
)
from polyrhythm.types import AUTO, Bytes, Seconds

HALF_PRECISION = (torch.float16, torch.bfloat16)
_NUM_TAGS = 2**20
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

    @property
    def previous(self) -> int:
        """The index of the member whose buddy this worker is."""
        return (self.rank - 1) % len(self._members)

    def receive_from_previous(self, messages: Messages[_P], into: Tensor, *, tag: int) -> None:
        messages.receive(self._members[self.previous], into, tag=tag, shard=self.previous)

    def send_to_next(self, messages: Messages[_P], tensor: Tensor, *, tag: int) -> None:
        """Post a send to the buddy of this worker."""
        messages.send(self._members[(self.rank + 1) % len(self._members)], tensor, tag=tag)


class CollectivePhase(IntEnum):
    REDUCE_SCATTER = 0
    ALL_GATHER = 1
    FLAGS = 2
    BUDDY = 3  # a shard travels from its owner to the next one


def _is_ready() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective in flight."""

    wait: Callable[[], None]  # for its end; raises PeerError if a peer is lost; called once
    # After the wait: let the current CUDA stream wait for copies to the GPU; return whether they
    # are done, for all streams.
    join: Callable[[], bool] = _is_ready


class Collectives(Protocol):
    rank: int  # index of the shard that this worker owns
    num_workers: int
    waits_on_host: bool  # a wait blocks the thread; otherwise the current CUDA stream

    @property
    def pinned_bytes(self) -> Bytes:
        """Pinned memory that is kept for collectives of buckets on a GPU."""

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """Post the receives of the next collective of this buffer and phase ahead of its call.

        A gloo sender waits for the receive: posting it early saves the latency of that request.
        """

    def release_buffers(self) -> None:
        """Free what is kept for the next collectives, if buffers change and none is in flight."""

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        """Average: after the wait, this worker's shard of `flat` is the mean over all workers."""

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        """Gather: after the wait, `flat` contains every worker's own shard."""

    def confirm(self) -> None:
        """Return when all that was waited for and joined has arrived; raises PeerError if not.

        Where a wait does not block the host, only this tells that no peer was lost meanwhile.
        """


class GlooCollectives:
    """Collectives made of point-to-point messages of a gloo group."""

    waits_on_host, pinned_bytes = True, 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout: Seconds,
        owners: Sequence[int] | None = None,
        num_sockets: int = 1,
        names: Sequence[str] | None = None,
    ) -> None:
        """`owners` are the ranks in the group that own the shards, by default in order.

        `num_sockets`: of the group, per peer; equal on all workers. `names`: of the members in
        errors; None for ranks in the group.
        """
        self.num_workers = group.size()
        self._names = names or [f"rank {rank}" for rank in range(self.num_workers)]
        owners = range(self.num_workers) if owners is None else owners
        self.rank = owners.index(group.rank())  # of its shard
        self._group, self._num_sockets = group, num_sockets
        self.timeout = timeout  # of the collectives that start from now on
        self._exchange = DirectExchange(owners, self.rank)
        self.others = self._exchange.others  # the shards of the other workers
        self.previous = self._exchange.previous  # the shard whose copy this worker holds
        self._buffers: dict[int, Tensor] = {}  # received addends by number; kept for reuse
        self._expected: dict[tuple[int, CollectivePhase], tuple[_GroupMessages, Tensor]] = {}

    def with_owners(self, owners: Sequence[int] | None) -> "GlooCollectives":
        """Return the same for shards that these ranks in the group own."""
        return GlooCollectives(
            self._group,
            timeout=self.timeout,
            owners=owners,
            num_sockets=self._num_sockets,
            names=self._names,
        )

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        self._expected[number, phase] = self._post_receives(flat, number, phase)

    def release_buffers(self) -> None:
        self._buffers.clear()

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        shards = flat.view(self.num_workers, -1)
        addends = [shards[other] for other in self._exchange.others]
        messages, received = self._start(flat, number, CollectivePhase.REDUCE_SCATTER, addends)
        return Pending(partial(_finish_mean, messages, shards[self.rank], received))

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        shards = [flat.view(self.num_workers, -1)[self.rank]] * (self.num_workers - 1)
        messages, _ = self._start(flat, number, CollectivePhase.ALL_GATHER, shards)
        return Pending(messages.wait)

    def copy_to_buddy(self, flat: Tensor, number: int) -> Pending:
        """Send the own shard to the next worker; receive the shard of the previous one.

        What `flat` has in its place is overwritten: no other collective may still send it.
        """
        own = flat.view(self.num_workers, -1)[self.rank]
        messages, _ = self._start(flat, number, CollectivePhase.BUDDY, [own])
        return Pending(messages.wait)

    def confirm(self) -> None:
        """Do nothing: a wait ends when all has arrived."""

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
        self.send(messages, sent, number, phase)
        return messages, received

    def receive(
        self, into: Iterable[Tensor], number: int, phase: CollectivePhase
    ) -> "_GroupMessages":
        """Post a receive from each other worker, in the order of `others`; or from the previous."""
        timeout, tag = timedelta(seconds=self.timeout), _tag(number, phase)
        messages = _GroupMessages(self._group, timeout, self._num_sockets, self._names)
        if phase is CollectivePhase.BUDDY:
            (shard,) = into
            self._exchange.receive_from_previous(messages, shard, tag=tag)
        else:
            self._exchange.receive(messages, into, tag=tag)
        return messages

    def send(
        self,
        messages: "_GroupMessages",
        tensors: Iterable[Tensor],
        number: int,
        phase: CollectivePhase,
    ) -> None:
        """Send one tensor to each other worker; or the only one to the next."""
        if phase is CollectivePhase.BUDDY:
            (own,) = tensors
            self._exchange.send_to_next(messages, own, tag=_tag(number, phase))
        else:
            self._exchange.send(messages, tensors, tag=_tag(number, phase))

    def _post_receives(
        self, flat: Tensor, number: int, phase: CollectivePhase
    ) -> "tuple[_GroupMessages, Tensor]":
        """Post the receives of a phase; return the messages and the buffer that they fill."""
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
            case CollectivePhase.BUDDY:
                received = flat.view(self.num_workers, -1)[self.previous]
                into = [received]
        return self.receive(into, number, phase), received

    def _buffer(self, flat: Tensor, number: int) -> Tensor:
        shape = self.num_workers - 1, flat.numel() // self.num_workers
        buffer = self._buffers.get(number)
        if buffer is None or (buffer.shape, buffer.dtype) != (shape, flat.dtype):
            buffer = self._buffers[number] = flat.new_empty(shape)
        return buffer


class _GroupMessages:
    """The messages of one collective in a gloo group; the wait ends when all have arrived.

    An empty message follows each: a lost peer ends the wait for it, but not that for a message in
    transfer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta,
        num_sockets: int,
        names: Sequence[str],
    ) -> None:
        self._group, self._timeout, self._num_sockets = group, timeout, num_sockets
        self._names = names
        self._works: list[tuple[int, dist.Work]] = []

    def receive(self, peer: int, into: Tensor, *, tag: int, shard: int) -> None:
        with peer_errors(self._names[peer], "averaging"):  # fails at once if the peer is lost
            for part, own_tag in split_message(into, tag, self._num_sockets):
                content = self._group.recv([part], peer, own_tag)
                end = self._group.recv([part.new_empty(0)], peer, own_tag)
                self._works += [(peer, end), (peer, content)]

    def send(self, peer: int, tensor: Tensor, *, tag: int) -> None:
        with peer_errors(self._names[peer], "averaging"):
            for part, own_tag in split_message(tensor, tag, self._num_sockets):
                for sent in (part, part.new_empty(0)):
                    self._works.append((peer, self._group.send([sent], peer, own_tag)))

    def wait(self) -> None:
        current_epoch().wait(self._wait)

    def _wait(self) -> None:
        try:
            for peer, work in self._works:
                with peer_errors(self._names[peer], "averaging"):
                    work.wait(self._timeout)
        except PeerError as error:
            if self._num_sockets > 1 and "imed out" in error.cause:
                abort(self._group)  # the timeout has closed the sockets of one device only
            raise


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
    """Return the first tag of a message."""
    return NUM_SOCKETS * (len(CollectivePhase) * (number % _NUM_TAGS) + phase)


class HierarchicalCollectives:
    """Average inside each node first, then across nodes: fewer bytes travel between nodes.

    `inside` connects the workers of this node, `across` one worker of each node. With two workers
    on each of two nodes, a worker sends half of its gradients to its neighbour, then half of the
    sum to the other node: a quarter of all gradients crosses between nodes instead of half. The
    all-gather runs in reverse order. All nodes have the same number of workers, so that the mean of
    their means is the global mean.

    The wait for one level starts the next one. Over NCCL, which matches collectives by their order,
    the wait starts both: waits come one after the other, in the same order on all workers. The
    order in which a backward fills buckets and all-gathers end would not be the same.
    """

    waits_on_host = True

    def __init__(self, inside: Collectives, across: Collectives) -> None:
        self._inside, self._across = inside, across
        self.num_workers = inside.num_workers * across.num_workers
        self.rank = inside.rank * across.num_workers + across.rank  # of its shard, not in the job

    @property
    def pinned_bytes(self) -> Bytes:
        return self._inside.pinned_bytes + self._across.pinned_bytes

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        self._inside.post_receives(flat, number, phase)
        self._across.post_receives(self._node_shard(flat), number, phase)

    def release_buffers(self) -> None:
        self._inside.release_buffers()
        self._across.release_buffers()

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        first, shard = self._start_inside(flat, number), self._node_shard(flat)
        return _in_sequence(first, lambda: self._across.reduce_scatter(shard, number))

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        first = self._across.all_gather(self._node_shard(flat), number)
        return _in_sequence(lambda: first, lambda: self._inside.all_gather(flat, number))

    def confirm(self) -> None:
        self._across.confirm()
        self._inside.confirm()

    def _start_inside(self, flat: Tensor, number: int) -> Callable[[], Pending]:
        """Start the reduce-scatter of this node, or return how: behind the current CUDA stream."""
        if self._inside.waits_on_host:
            started = self._inside.reduce_scatter(flat, number)
            return lambda: started
        filled = torch.cuda.Event()
        filled.record(torch.cuda.current_stream(flat.device))

        def start() -> Pending:
            torch.cuda.current_stream(flat.device).wait_event(filled)
            return self._inside.reduce_scatter(flat, number)

        return start

    def _node_shard(self, flat: Tensor) -> Tensor:
        return flat.view(self._inside.num_workers, -1)[self._inside.rank]


def _in_sequence(first: Callable[[], Pending], then: Callable[[], Pending]) -> Pending:
    """Start the second collective after the end of the first, in the wait."""
    started: list[Pending] = []

    def wait() -> None:
        pending = first()
        pending.wait()
        pending.join()
        started.append(then())
        started[0].wait()

    return Pending(wait, lambda: started[0].join())


class PinnedCollectives:
    """Collectives of buckets on a GPU over gloo: staged through pinned memory, summed on the GPU.

    Shards for other workers are copied to the host in stream order behind the kernels that compute
    them. A separate thread waits for the copy and sends them, while the network moves the bucket
    before. The thread that waits for the messages starts the copy of what it received to the GPU,
    where a sum takes less time than on a core of the host. So three buckets are under way at once,
    each copy direction in its own stream: in one stream, a copy to the GPU would queue behind that
    of the next bucket to the host, which waits for gradients not computed yet.

    `start` runs a function in the communication thread, which may also start collectives. After a
    wait the result may still be on its way to the GPU: join it in the stream that needs it.
    """

    waits_on_host = True

    def __init__(
        self,
        host: GlooCollectives,
        device: torch.device,
        *,
        start: Callable[[Callable[[], None]], object],
    ) -> None:
        self.rank, self.num_workers = host.rank, host.num_workers
        self._host, self._device = host, device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pinned = _PinnedBuffers()
        self._expected: dict[tuple[int, CollectivePhase], tuple[_GroupMessages, Tensor]] = {}
        self._post_executor = ThreadPoolExecutor(1, thread_name_prefix="decoupled posting")
        start(self._set_thread_stream)

    @property
    def pinned_bytes(self) -> Bytes:
        """Pinned memory: for two workers 1.5 times the gradients, for more less than 3 times.

        Each buffer is rounded up to a power of two.
        """
        return self._pinned.nbytes

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        self._expected[number, phase] = self._post_receives(flat, number, phase)

    def release_buffers(self) -> None:
        self._pinned = _PinnedBuffers()

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        shards = flat.view(self.num_workers, -1)
        others = [shards[other] for other in self._host.others]

        def finish(received: Tensor) -> None:
            own = shards[self.rank]
            total = own.float() if own.dtype in HALF_PRECISION else own
            for row in received:
                total.add_(row.to(self._device, non_blocking=True))
            total.div_(self.num_workers)
            if total is not own:
                own.copy_(total)

        return self._start(flat, number, CollectivePhase.REDUCE_SCATTER, others, finish)

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        shards = flat.view(self.num_workers, -1)

        def finish(received: Tensor) -> None:
            for other, row in zip(self._host.others, received, strict=True):
                shards[other].copy_(row, non_blocking=True)

        own = [shards[self.rank]]
        return self._start(flat, number, CollectivePhase.ALL_GATHER, own, finish)

    def copy_to_buddy(self, flat: Tensor, number: int) -> Pending:
        """Do the same as GlooCollectives."""
        shards = flat.view(self.num_workers, -1)

        def finish(received: Tensor) -> None:
            shards[self._host.previous].copy_(received[0], non_blocking=True)

        own = [shards[self.rank]]
        return self._start(flat, number, CollectivePhase.BUDDY, own, finish)

    def confirm(self) -> None:
        """Do nothing: a wait ends when all has arrived in main memory."""

    def _start(
        self,
        flat: Tensor,
        number: int,
        phase: CollectivePhase,
        sent: Sequence[Tensor],
        finish: Callable[[Tensor], None],
    ) -> Pending:
        """Send each other worker its tensor, or the only one; `finish` copies to the GPU."""
        expected = self._expected.pop((number, phase), None)
        messages, received = expected or self._post_receives(flat, number, phase)
        num_rows = max(1, self.num_workers - 1)
        staged = self._pinned.take((number, None), flat, (num_rows, self._shard_size(flat)))
        rows = list(staged[: len(sent)])
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        # The waiting thread sleeps: the autograd engine needs the core.
        copied, done = (torch.cuda.Event(blocking=True) for _ in range(2))
        with torch.cuda.device(self._device), torch.cuda.stream(self._to_host):
            for row, tensor in zip(rows, sent, strict=True):
                row.copy_(tensor, non_blocking=True)
            copied.record()
        for stream in (self._to_host, self._to_device):
            flat.record_stream(stream)  # after an error `flat` may be freed without a wait

        def send() -> None:
            copied.synchronize()
            is_repeated = len(rows) == 1 and phase is not CollectivePhase.BUDDY
            to_all = rows * len(self._host.others) if is_repeated else rows
            self._host.send(messages, to_all, number, phase)

        posted = self._post_executor.submit(send)

        def wait() -> None:
            posted.result()
            messages.wait()
            with torch.cuda.device(self._device), torch.cuda.stream(self._to_device):
                finish(received)
                done.record()
            self._pinned.give_back((number, None), staged, copied)
            self._pinned.give_back((number, phase), received, done)

        def join() -> bool:
            torch.cuda.current_stream(self._device).wait_event(done)
            return done.query()

        return Pending(wait, join)

    def _post_receives(
        self, flat: Tensor, number: int, phase: CollectivePhase
    ) -> tuple[_GroupMessages, Tensor]:
        num_rows = 1 if phase is CollectivePhase.BUDDY else self.num_workers - 1
        shape = num_rows, self._shard_size(flat)
        received = self._pinned.take((number, phase), flat, shape)
        return self._host.receive(list(received), number, phase), received

    def _shard_size(self, flat: Tensor) -> int:
        return flat.numel() // self.num_workers

    def _set_thread_stream(self) -> None:
        """In the communication thread: order its own sends behind its copies to the GPU.

        In the default stream, which all threads share, they would queue behind all compute.
        """
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._to_device)


def pinned_size(nbytes: Bytes) -> Bytes:
    """Return the size of a pinned allocation: torch rounds it up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class _PinnedBuffers:
    """Pinned buffers by key, which are kept for reuse: pinning takes milliseconds.

    Several threads start and end collectives.
    """

    def __init__(self) -> None:
        self.nbytes: Bytes = 0  # of all, in use or not
        self._lock = threading.Lock()
        self._free: dict[Hashable, tuple[Tensor, torch.cuda.Event]] = {}

    def take(self, key: Hashable, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a buffer of the dtype of `like` that nothing reads or writes any more."""
        with self._lock:
            buffer, last_copy = self._free.pop(key, (None, None))
        if buffer is not None and (buffer.shape, buffer.dtype) == (shape, like.dtype):
            assert last_copy is not None, "each buffer has one"
            last_copy.synchronize()
            return buffer
        pinned = torch.empty(shape, dtype=like.dtype, pin_memory=True)
        with self._lock:
            self.nbytes += pinned_size(pinned.nbytes)
            self.nbytes -= 0 if buffer is None else pinned_size(buffer.nbytes)
        return pinned

    def give_back(self, key: Hashable, buffer: Tensor, last_copy: torch.cuda.Event) -> None:
        """Keep a buffer that `last_copy` still uses; one is kept per key."""
        with self._lock:
            if key in self._free:
                self.nbytes -= pinned_size(self._free[key][0].nbytes)
            self._free[key] = buffer, last_copy


class NcclCollectives:
    """NCCL's own collectives over a process group; used by one thread at a time.

    A wait blocks the current CUDA stream, not the host: wait in the stream that needs the bucket.
    All workers start collectives in the same order, in one stream: an all-gather may be started
    after a reduce-scatter of the same bucket without a wait in between.
    """

    waits_on_host, pinned_bytes = False, 0

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, host: GlooCollectives
    ) -> None:
        """`host` has the timeout of `confirm`."""
        self.rank, self.num_workers, self._group = group.rank(), group.size(), group
        self._device, self._host = device, host

    def post_receives(self, flat: Tensor, number: int, phase: CollectivePhase) -> None:
        """Do nothing: NCCL posts no receives ahead."""

    def release_buffers(self) -> None:
        """Do nothing: NCCL keeps no buffers here."""

    def reduce_scatter(self, flat: Tensor, number: int) -> Pending:
        """Average; divide half-precision numbers before the sum, as DDP does.

        NCCL's mean multiplies by the reciprocal rounded to their type: a third would be 0.2 % off.
        """
        flat = _real(flat)
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        options = dist.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp(dist.ReduceOp.AVG), True
        if flat.dtype in HALF_PRECISION:
            flat.div_(self.num_workers)
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        return _start(lambda: self._group._reduce_scatter_base(own_shard, flat, options))

    def all_gather(self, flat: Tensor, number: int) -> Pending:
        flat = _real(flat)
        own_shard = flat.view(self.num_workers, -1)[self.rank]
        options = AllgatherOptions()
        options.asyncOp = True
        return _start(lambda: self._group._allgather_base(flat, own_shard, options))

    def copy_to_buddy(self, flat: Tensor, number: int) -> Pending:
        """Do the same as GlooCollectives, by an all-to-all in which most pairs send nothing."""
        shards = _real(flat).view(self.num_workers, -1)
        buddy, previous = ((self.rank + step) % self.num_workers for step in (1, -1))
        sent, received = ([0] * self.num_workers for _ in range(2))
        sent[buddy] = received[previous] = shards.shape[1]
        options = dist.AllToAllOptions()
        options.asyncOp = True
        into, own = shards[previous], shards[self.rank]
        return _start(lambda: self._group.alltoall_base(into, own, received, sent, options))

    def confirm(self) -> None:
        confirm_nccl([self._group], self._device, self._host.timeout)

    def all_reduce_sum(self, numbers: Tensor) -> None:
        """Sum `numbers` over all workers, for later work in the current stream."""
        _start(lambda: self._group.allreduce([numbers])).wait()


def _start(collective: Callable[[], dist.Work]) -> Pending:
    with peer_errors("another worker", "averaging"):  # the first collective connects all workers
        work = collective()

    def wait() -> None:
        with peer_errors("another worker", "averaging"):
            work.wait()  # with a timeout it would block the host

    def join() -> bool:
        work.wait()  # the stream of this thread may be another one
        return work.is_completed()

    return Pending(wait, join)


def _real(flat: Tensor) -> Tensor:
    """View complex numbers as real ones: NCCL has no complex types."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


SingleLevel = GlooCollectives | PinnedCollectives | NcclCollectives  # no hierarchy


def select_backend(
    device: torch.device,
    nccl: dist.ProcessGroup | None,
    host: GlooCollectives,
    *,
    start: Callable[[Callable[[], None]], object],
) -> SingleLevel:
    """Select the collectives for buckets on `device`, the device of the parameters.

    `nccl` is a group that sends tensors on it over NCCL, if there is one; `host` are the
    collectives of buckets in main memory; `start` runs a function in the communication thread.
    """
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        raise PolicyError(
            f"parameters on {device}",
            expected="parameters on the CPU, or on a CUDA device",
            fix="use DDP on other devices",
        )
    if nccl is not None:
        return NcclCollectives(nccl, device, host)
    return PinnedCollectives(host, device, start=start)


def site_of(site: str | None, device: torch.device, group: dist.ProcessGroup | None) -> str | None:
    """Return the site of a worker: auto is that of all whose process group has NCCL, or none."""
    if site == AUTO:
        return AUTO if group is not None and uses_nccl(device, group) else None
    if site is not None and not (device.type == "cuda" and dist.is_nccl_available()):
        raise LaunchError(
            f"site={site!r} of a worker on {device}",
            expected="a CUDA device, and a torch with NCCL, over which a site communicates",
            fix="pass site=None here: gloo connects it with the others",
        )
    return site


def uses_nccl(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether `group` sends tensors on `device` over NCCL."""
    # Torch normalises every backend name to this form: "cpu:gloo,cuda:nccl".
    backends = dist.get_backend_config(group).split(",")
    return device.type == "cuda" and "cuda:nccl" in backends
