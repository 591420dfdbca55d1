"""Exchange buffers in a group: a connection per pair of workers, a partial all-reduce over them.

A connection is made when a group first needs it, and kept for later groups. With one process group
per group of workers, most groups would have to be created first, which takes three times as long as
the average itself (`polyrhythm bench average`); with one process group for all workers, one lost
worker would break all connections. A pair breaks alone, and a worker has at most one per peer.

Both sides must name the same connection: by the two workers, their incarnations (a restarted worker
has none of the old connections) and the group that first needed it; and when a group fails, all its
members drop all connections among them. Before the first exchange of a buffer size, both compare
it: gloo aborts a process that receives more than it expects.

When a connection breaks, gloo wakes a thread that waits for a message not yet started, but not one
that waits for a message in transfer, in either direction. So an empty message, which is never in
transfer, follows each message, and the receiver waits for the empty one. A sender does not wait; it
holds the tensor until the receiver is known to have it. Two workers with GPUs have two sockets, and
a large message travels half in each.

The weighted mean of a buffer takes two direct exchanges. Each member owns one shard of the buffer.
First every member sends each owner its shard, and the owner sums them (`reduce_scatter`); then each
owner sends its mean to all (`post_all_gather`). That moves as many bytes as a ring, with two
messages in sequence instead of 2(g-1). A buffer so small that the number of messages matters, not
their size, has one owner, the first member. All members get the same bits, since each shard is
summed by one member. The input buffer is not modified.

Other work may run between reduce-scatter and all-gather. Then the buffer is split into buckets, and
each member owns a shard of each: the first bucket uses all links and arrives first.

Half-precision numbers are summed in single precision and rounded once. Every product and every sum
is rounded separately, so that a mean does not depend on the bucket boundaries.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from polyrhythm.cost.sync import SMALL
from polyrhythm.errors import PeerError, PolicyError, peer_errors
from polyrhythm.run.comm.epoch import current_epoch
from polyrhythm.run.comm.process_groups import (
    INTERFACES,
    NUM_SOCKETS,
    abort,
    gloo_device,
    split_message,
)
from polyrhythm.run.comm.reduce_scatter import HALF_PRECISION, DirectExchange
from polyrhythm.run.comm.store import JobStore, Members, StoreBackend
from polyrhythm.types import Bytes, Seconds, Worker

ShardSlices = list[list[slice]]  # per bucket, the shard of each member

_MIN_TIMEOUT: Seconds = 0.001  # for gloo, 0 means no limit
_SUM_BLOCK = 2**17  # numbers
# That a tag can distinguish; a tag is below 2**30.
_NUM_GROUPS, _NUM_BUCKETS = 2**12, 2**16 // NUM_SOCKETS
_HANDSHAKE_TIMEOUT: Seconds = 20.0  # of two peers that are both present
_PAIR = Members((0, 1))  # of a connection
_CONNECTING, _DECISION = "connecting", "over how many sockets both connect"
_PAIR_KEYS = (  # all that connecting leaves in the store: gloo's addresses, and the rendezvous
    f"{_PAIR.epoch}/{_DECISION}",
    *(f"{device}/{rank}" for device in range(NUM_SOCKETS) for rank in _PAIR.ranks),
    *(
        f"{_PAIR.epoch}/{_CONNECTING}/{rank}{suffix}"
        for rank in _PAIR.ranks
        for suffix in ("", "/heartbeats")
    ),
)


class Peer(NamedTuple):
    """A worker in one of its incarnations."""

    worker: Worker
    incarnation: int


class Message(NamedTuple):
    """A send or receive in flight, in parts: see `split_message`."""

    contents: list[dist.Work]
    ends: list[dist.Work]  # of each part, the empty message that follows

    def wait(self, timeout: timedelta) -> None:
        _wait_for(self.ends, timeout)
        self.wait_for_contents(timeout)  # complete: messages keep their order

    def wait_for_contents(self, timeout: timedelta) -> None:
        _wait_for(self.contents, timeout)


def _wait_for(works: Sequence[dist.Work], timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    for work in works:
        left = max(deadline - time.monotonic(), _MIN_TIMEOUT)
        work.wait(timedelta(seconds=left))


class _PeerConnection(NamedTuple):
    group: dist.ProcessGroup
    sizes: set[Bytes]  # that both have compared
    posted: list[Message]  # that the peer may not have received yet
    num_sockets: int


class PeerConnections:
    """The connections of one worker; used by one thread, but any may call `abort` and `post`."""

    def __init__(self, store: Store, me: Peer, *, num_sockets: int = 1) -> None:
        """`store`: a connection for this object alone; a wait for a key blocks all its users.

        A pair has `num_sockets`, or those of the peer if these are fewer; NUM_SOCKETS at most.
        """
        self.store, self.me, self._num_sockets = store, me, num_sockets
        self._by_peer: dict[Peer, _PeerConnection] = {}
        self._old_keys: list[tuple[set[Worker], list[str]]] = []  # and who may still read them

    def connect(
        self,
        peers: Iterable[Peer],
        name: str,
        *,
        timeout: Seconds,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the missing connections; each peer does so under the same name.

        All workers make pairs in one global order, which rules out a deadlock. Raises PeerError
        after `timeout`, or once `should_stop` returns True.
        """
        deadline = time.monotonic() + timeout
        missing = [tuple(sorted((self.me, peer))) for peer in peers if peer not in self._by_peer]
        for lower, upper in sorted(missing):
            other = upper if lower == self.me else lower
            pair_prefix = (
                f"{lower.worker}.{lower.incarnation}+{upper.worker}.{upper.incarnation}/{name}"
            )
            if lower == self.me:
                self.delete_later([other.worker], [f"{pair_prefix}/{key}" for key in _PAIR_KEYS])
            group, num_sockets = self._make_group(other, pair_prefix, deadline, should_stop)
            self._by_peer[other] = _PeerConnection(group, set(), [], num_sockets)

    def delete_later(self, readers: Iterable[Worker], keys: list[str]) -> None:
        """Delete keys of the store once each reader has committed a later group with this worker.

        Before that it may still read them.
        """
        self._old_keys.append(({*readers} - {self.me.worker}, keys))

    def commit(self, members: Iterable[Worker]) -> None:
        """Free what was kept for members of a group: all of them are done with it."""
        self.release()
        if self._old_keys:
            committed, waiting = set(members), []
            for readers, keys in self._old_keys:
                if left := readers - committed:
                    waiting.append((left, keys))
                    continue
                with peer_errors("the store", "deleting keys"):
                    for key in keys:
                        self.store.delete_key(key)
            self._old_keys = waiting

    def check_sizes(
        self, peers: Iterable[Peer], size: Bytes, *, tag: int, timeout: Seconds
    ) -> None:
        """Compare `size` with peers that have not compared it before; PolicyError if it differs."""
        unchecked = [peer for peer in peers if size not in self._by_peer[peer].sizes]
        own_size, peer_sizes = (
            torch.tensor([size]),
            {peer: torch.zeros(1, dtype=torch.int64) for peer in unchecked},
        )
        messages = [(peer, self.receive(peer, peer_sizes[peer], tag=tag)) for peer in unchecked]
        for peer in unchecked:
            self.post(peer, own_size, tag=tag)
        for peer, message in messages:
            with peer_errors(peer.worker, "comparing sizes"):
                message.wait(timedelta(seconds=timeout))
        for peer in unchecked:
            if (other := int(peer_sizes[peer])) != size:
                raise PolicyError(
                    f"{self.me.worker} has {size:,} bytes to average, {peer.worker} has {other:,}",
                    expected="the same tensors in both",
                    fix='use state="local" if workers may skip their first optimizer step, and '
                    "freeze the same parameters in all workers",
                )
            self._by_peer[peer].sizes.add(size)

    def post(self, peer: Peer, tensor: Tensor, *, tag: int) -> None:
        """Send `tensor`, and hold it until `release` or until the connection is dropped."""
        self._by_peer[peer].posted.append(self.send(peer, tensor, tag=tag))

    def release(self) -> None:
        """Free the posted tensors; call once the receivers are known to have them."""
        for connection in self._by_peer.values():
            connection.posted.clear()

    def flush(self, timeout: Seconds) -> None:
        """Wait until all posted tensors are sent; for use without acknowledgements."""
        for peer, connection in self._by_peer.items():
            for message in connection.posted:
                with peer_errors(peer.worker, "sending"):
                    message.wait(timedelta(seconds=timeout))
        self.release()

    def send(self, peer: Peer, tensor: Tensor, *, tag: int) -> Message:
        """Send `tensor`; hold the returned message, since dropping it blocks the pair for good."""
        connection, message = self._by_peer[peer], Message([], [])
        group, to = connection.group, 1 - connection.group.rank()
        try:
            with peer_errors(peer.worker, "sending"):  # fails at once if the connection has closed
                for part, own_tag in split_message(tensor, tag, connection.num_sockets):
                    message.contents.append(group.send([part], to, own_tag))
                    message.ends.append(group.send([part.new_empty(0)], to, own_tag))
        except PeerError:
            connection.posted.append(message)  # another part may be on its way
            raise
        return message

    def receive(self, peer: Peer, tensor: Tensor, *, tag: int) -> Message:
        connection, message = self._by_peer[peer], Message([], [])
        group, sender = connection.group, 1 - connection.group.rank()
        try:
            with peer_errors(peer.worker, "receiving"):
                for part, own_tag in split_message(tensor, tag, connection.num_sockets):
                    message.contents.append(group.recv([part], sender, own_tag))
                    message.ends.append(group.recv([part.new_empty(0)], sender, own_tag))
        except PeerError:
            connection.posted.append(message)
            raise
        return message

    def abort(self, peers: Sequence[Peer]) -> None:
        """Wake all threads that wait for these peers, on both sides; `drop` them afterwards."""
        for connection in [self._by_peer.get(peer) for peer in peers]:
            if connection is not None:
                abort(connection.group)

    def abort_all(self) -> None:
        self.abort(list(self._by_peer))

    def drop(self, workers: Iterable[Worker]) -> None:
        """Forget the connections to these workers, in any incarnation."""
        dropped = set(workers)
        self._by_peer = {
            p: connection for p, connection in self._by_peer.items() if p.worker not in dropped
        }

    def close(self) -> None:
        self._by_peer.clear()

    def _make_group(
        self, other: Peer, pair_prefix: str, deadline: Seconds, should_stop: Callable[[], bool]
    ) -> tuple[dist.ProcessGroup, int]:
        """Return a group of the two, and its number of sockets."""
        store, rank = PrefixStore(pair_prefix, self.store), int(other < self.me)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._threads = 1  # they run collectives, which a pair does not use
        options._timeout = timedelta(seconds=_HANDSHAKE_TIMEOUT)
        with peer_errors(other.worker, "connecting"):  # the store may be gone as well
            num_sockets = self._rendezvous(store, rank, other, deadline, should_stop)
            interfaces = os.environ.get(INTERFACES, "")
            options._devices = [_device(interfaces, number) for number in range(num_sockets)]
            made: Any = dist.ProcessGroupGloo(store, rank, 2, options)
            current_epoch().add(made)
            return made, num_sockets

    def _rendezvous(
        self,
        store: Store,
        rank: int,
        other: Peer,
        deadline: Seconds,
        should_stop: Callable[[], bool],
    ) -> int:
        """Wait until both peers are present, and agree: either both connect now, or neither.

        Returns the number of sockets. Gloo would wait for a peer that has stopped or died, and that
        wait cannot be aborted.
        """
        names, start = sorted([self.me, other]), time.monotonic()

        def check() -> None:
            if should_stop():
                raise self._lost_error(other, start, "the group was aborted")

        pair = JobStore(
            cast("StoreBackend", store),
            rank,
            timeout=deadline - start,
            name_of=lambda index: str(names[index].worker),
            check=check,
        )
        error: PeerError | None = None
        agreed = 0  # sockets
        try:
            found = pair.all_gather_object(_CONNECTING, self._num_sockets, _PAIR, as_type=int)
            agreed = min(found)
        except PeerError as lost:
            error = lost
        agreed = pair.set_once(_DECISION, agreed, _PAIR)
        if not agreed:
            raise error or self._lost_error(other, start, "it has aborted the group")
        return agreed

    def _lost_error(self, other: Peer, start: Seconds, cause: str) -> PeerError:
        waited = time.monotonic() - start
        return PeerError(str(other.worker), action="connecting", waited=waited, cause=cause)


@cache
def _device(interfaces: str, number: int) -> dist.ProcessGroupGloo.Device:
    """Return the device with this number, which all pairs share."""
    return gloo_device(interfaces, number)


class MessageKind(IntEnum):
    """The part of an exchange that a message belongs to."""

    REDUCE_SCATTER = 0
    ALL_GATHER = 1
    END = 2
    SIZE = 3


def tag(kind: MessageKind, number: int, bucket: int = 0) -> int:
    """Return the first tag of a message: order is kept per tag; groups have different tags."""
    group = kind * _NUM_GROUPS + number % _NUM_GROUPS
    return NUM_SOCKETS * (group * _NUM_BUCKETS + bucket % _NUM_BUCKETS)


def shard_slices(
    num: int, size: int, element_bytes: Bytes, bucket: Bytes | None = None
) -> ShardSlices:
    """Split `num` numbers into buckets of `bucket` bytes (None: one), each into `size` shards.

    The first bucket is the remainder: training waits for it, so it is the smallest.
    """
    bucket_size = max(num if bucket is None else bucket // element_bytes, 1)
    stops = sorted(range(num, 0, -bucket_size))
    return [shard_bucket(*bounds, size, element_bytes) for bounds in pairwise([0, *stops])]


def all_reduce_mean(
    connections: PeerConnections,
    members: Sequence[Peer],
    weights: Sequence[float],
    flat: Tensor,
    *,
    number: int,  # of the group
    timeout: Seconds,
) -> Tensor:
    """Return the weighted mean of the members' `flat`; raises PeerError if a member is lost.

    Two members whose buffers differ in size both raise PolicyError. Sends may still be in flight:
    the connections hold their tensors until `PeerConnections.release`.
    """
    shards = shard_slices(flat.numel(), len(members), flat.element_size())
    result = reduce_scatter(
        connections, members, weights, flat, shards, number=number, timeout=timeout
    )
    messages = PostedMessages(connections)
    post_all_gather(messages, members, result, shards, number=number)
    messages.wait_until(time.monotonic() + timeout)
    return result


def reduce_scatter(
    connections: PeerConnections,
    members: Sequence[Peer],
    weights: Sequence[float],
    flat: Tensor,
    shards: ShardSlices,
    *,
    number: int,
    timeout: Seconds,
) -> Tensor:
    """Return a buffer with the mean in this member's shards, uninitialised elsewhere."""
    index = members.index(connections.me)
    exchange, others = DirectExchange(members, index), [*members[:index], *members[index + 1 :]]
    size_tag = tag(MessageKind.SIZE, number)
    connections.check_sizes(others, flat.nbytes, tag=size_tag, timeout=timeout)
    in_flight: deque[tuple[slice, list[Tensor], PostedMessages]] = deque()
    for bucket, owned in enumerate(shards):
        own, messages = flat[owned[index]], PostedMessages(connections)
        rows = [own if peer == connections.me else torch.empty_like(own) for peer in members]
        bucket_tag = tag(MessageKind.REDUCE_SCATTER, number, bucket)
        exchange.receive(messages, [rows[i] for i in exchange.others], tag=bucket_tag)
        exchange.send(messages, [flat[owned[i]] for i in exchange.others], tag=bucket_tag)
        in_flight.append((owned[index], rows, messages))
    result = torch.empty_like(flat, pin_memory=flat.is_pinned())
    deadline = time.monotonic() + timeout
    while in_flight:
        shard, rows, messages = in_flight.popleft()
        messages.wait_until(deadline)
        weighted_sum(rows, weights, result[shard])
    return result


def post_all_gather(
    messages: "PostedMessages",
    members: Sequence[Peer],
    result: Tensor,
    shards: ShardSlices,
    *,
    number: int,
) -> None:
    """Post all messages of the all-gather, bucket by bucket; each shard has its own number."""
    index, size = members.index(messages.me), len(members)
    exchange = DirectExchange(members, index)
    for bucket, owned in enumerate(shards):
        bucket_tag = tag(MessageKind.ALL_GATHER, number, bucket)
        into = [result[owned[i]] for i in exchange.others]
        exchange.receive(messages, into, tag=bucket_tag, first_shard=bucket * size)
        exchange.send(messages, [result[owned[index]]] * (size - 1), tag=bucket_tag)


class PostedMessages:
    """Messages posted at once; received ones are waited for in order, each once.

    Empty tensors are not sent.
    """

    def __init__(self, connections: PeerConnections) -> None:
        self.me, self._connections = connections.me, connections
        self._received: deque[tuple[Peer, Message, int]] = deque()

    def receive(self, peer: Peer, into: Tensor, *, tag: int, shard: int = -1) -> None:
        if into.numel():
            message = self._connections.receive(peer, _as_bytes(into), tag=tag)
            self._received.append((peer, message, shard))

    def send(self, peer: Peer, tensor: Tensor, *, tag: int) -> None:
        if tensor.numel():
            self._connections.post(peer, _as_bytes(tensor), tag=tag)

    def wait_until(self, deadline: Seconds) -> None:
        for _ in self.iter_received(deadline):
            pass

    def iter_received(self, deadline: Seconds) -> Iterator[int]:
        """Yield the number of each received shard; raises PeerError if a peer is lost."""
        while self._received:
            peer, message, shard = self._received.popleft()
            left = max(deadline - time.monotonic(), _MIN_TIMEOUT)
            with peer_errors(peer.worker, "averaging"):
                message.wait(timedelta(seconds=left))
            yield shard

    def iter_completed(self) -> Iterator[int]:
        """Yield the shards that had arrived before all connections were aborted."""
        while self._received:
            _, message, shard = self._received.popleft()
            try:
                message.wait_for_contents(timedelta(seconds=_MIN_TIMEOUT))
            except RuntimeError:  # still in flight
                continue
            yield shard


def shard_bucket(start: int, stop: int, size: int, element_bytes: Bytes) -> list[slice]:
    """Return the shard of each member; the first member owns all of a small bucket."""
    num = stop - start
    if num * element_bytes <= SMALL:
        bounds = [start, *[stop] * size]
    else:
        bounds = [start + num * i // size for i in range(size + 1)]
    return [slice(first, end) for first, end in pairwise(bounds)]


def weighted_sum(rows: Sequence[Tensor], weights: Sequence[float], into: Tensor) -> None:
    """Sum in the order of members, so that the result does not depend on the owner.

    With equal weights numbers are summed first: a sum beyond the largest float is infinite then.
    """
    is_half = into.dtype in HALF_PRECISION
    has_equal_weights = len(set(weights)) == 1  # one product in place of one per row
    # By blocks: what is allocated for a product stays in the cache.
    for block, *parts in zip(*(row.split(_SUM_BLOCK) for row in (into, *rows)), strict=True):
        total = torch.empty_like(block, dtype=torch.float32) if is_half else block
        if has_equal_weights and len(parts) > 1:
            torch.add(parts[0].to(total.dtype), parts[1].to(total.dtype), out=total)
            for part in parts[2:]:
                total += part.to(total.dtype)
            total *= weights[0]
        else:
            torch.mul(parts[0].to(total.dtype), weights[0], out=total)
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                total += part.to(total.dtype) * weight
        if is_half:
            block.copy_(total)


def _as_bytes(tensor: Tensor) -> Tensor:
    """View as bytes, so that gloo needs no support for the dtype."""
    return tensor.view(torch.uint8)
