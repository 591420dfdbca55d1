"""Partial all-reduce: the weighted mean of a buffer over any group, in two direct exchanges.

Each member owns one shard of the buffer. First every member sends each owner its shard, and the
owner sums them (`reduce_scatter`); then every owner sends its mean to all (`post_all_gather`). That
moves as many bytes as a ring, with two messages in sequence instead of 2(g-1). A buffer so small
that the number of messages matters, not their size, has one owner, the first member. All members
get the same bits, since each shard is summed by one member. The input buffer is not modified.

Other work may run between reduce-scatter and all-gather. Then the buffer is split into buckets, and
each member owns a shard of each: the first bucket uses all links and arrives first.

Half-precision numbers are summed in single precision and rounded once. Every product and every sum
is rounded separately, so that a mean does not depend on the bucket boundaries.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from polyrhythm.cost.sync import SMALL
from polyrhythm.run.averaging.peer_connections import Message, Peer, PeerConnections
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.reduce_scatter import HALF_PRECISION, DirectExchange
from polyrhythm.types import Bytes, Seconds

ShardSlices = list[list[slice]]  # per bucket, the shard of each member

_MIN_TIMEOUT: Seconds = 0.001  # for gloo, 0 means no limit
_NUM_GROUPS, _NUM_BUCKETS = 2**12, 2**16  # that a tag can distinguish; a tag is below 2**30


class MessageKind(IntEnum):
    """The part of an exchange that a message belongs to."""

    REDUCE_SCATTER = 0
    ALL_GATHER = 1
    END = 2
    SIZE = 3


def tag(kind: MessageKind, number: int, bucket: int = 0) -> int:
    """Return the tag of a message: order is kept per tag, and groups have different tags."""
    group = kind * _NUM_GROUPS + number % _NUM_GROUPS
    return group * _NUM_BUCKETS + bucket % _NUM_BUCKETS


def shard_slices(
    num: int, size: int, element_bytes: Bytes, bucket: Bytes | None = None
) -> ShardSlices:
    """Split `num` numbers into buckets of `bucket` bytes (None: one), each into `size` shards.

    The first bucket is the remainder: training waits for it, so it is the smallest.
    """
    bucket_size = max(num if bucket is None else bucket // element_bytes, 1)
    stops = sorted(range(num, 0, -bucket_size))
    return [_shard_bucket(*bounds, size, element_bytes) for bounds in pairwise([0, *stops])]


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
    result, deadline = torch.empty_like(flat), time.monotonic() + timeout
    while in_flight:
        shard, rows, messages = in_flight.popleft()
        messages.wait_until(deadline)
        result[shard] = _weighted_sum(rows, weights)
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
                message.content.wait(timedelta(seconds=_MIN_TIMEOUT))
            except RuntimeError:  # still in flight
                continue
            yield shard


def _shard_bucket(start: int, stop: int, size: int, element_bytes: Bytes) -> list[slice]:
    """Return the shard of each member; the first member owns all of a small bucket."""
    num = stop - start
    if num * element_bytes <= SMALL:
        bounds = [start, *[stop] * size]
    else:
        bounds = [start + num * i // size for i in range(size + 1)]
    return [slice(first, end) for first, end in pairwise(bounds)]


def _weighted_sum(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Sum in the order of members, so that the result does not depend on the owner."""
    dtype = rows[0].dtype
    sum_dtype = torch.float32 if dtype in HALF_PRECISION else dtype
    total = rows[0].to(sum_dtype) * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total += row.to(sum_dtype) * weight
    return total.to(dtype)


def _as_bytes(tensor: Tensor) -> Tensor:
    """View as bytes, so that gloo needs no support for the dtype."""
    return tensor.view(torch.uint8)
