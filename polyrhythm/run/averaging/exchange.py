"""Partial all-reduce: the weighted mean of a buffer over any group, in two direct exchanges.

Each member owns one part of the buffer. First everybody sends every owner its part, and the owner
adds them up (`reduce_scatter`); then every owner sends the all_reduce_mean to everybody (`post_all_gather`). That moves
as many bytes as a ring, with two messages one after the other instead of 2(g-1). A buffer so small
that the number of messages counts, not their size, has one owner, the first member. All members get
the same bits, since each part is added up in one place. The buffer given is left as it is.

The two halves may be far apart. Then the buffer is cut into buckets, and each member owns a part of
each: the first bucket comes over all links, and before the others.

Sums of half-precision numbers are made in single precision, and rounded once. Every product and
every sum is rounded by itself, so that a mean does not depend on where the buffer is cut.
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
from polyrhythm.types import Bytes, Seconds

ShardSlices = list[list[slice]]  # of each bucket, what each member owns

_HALF_PRECISION = (torch.float16, torch.bfloat16)
_MIN_TIMEOUT: Seconds = 0.001  # to gloo, 0 is no limit
_NUM_GROUPS, _NUM_BUCKETS = 2**12, 2**16  # that tags tell apart; a tag is below 2**30


class MessageKind(IntEnum):
    """Of a message."""

    REDUCE_SCATTER = 0
    ALL_GATHER = 1
    END = 2
    SIZE = 3


def tag(kind: MessageKind, number: int, bucket: int = 0) -> int:
    """Messages of a pair have one order per tag, and those of different groups never mix."""
    group = kind * _NUM_GROUPS + number % _NUM_GROUPS
    return group * _NUM_BUCKETS + bucket % _NUM_BUCKETS


def shard_slices(
    num: int, size: int, element_bytes: Bytes, bucket: Bytes | None = None
) -> ShardSlices:
    """What each of `size` members owns of `num` numbers, in buckets; in one without `bucket`.

    What is left over is the first bucket, which is waited for.
    """
    most = max(num if bucket is None else bucket // element_bytes, 1)
    stops = sorted(range(num, 0, -most))
    return [_shard_bucket(*deadline, size, element_bytes) for deadline in pairwise([0, *stops])]


def all_reduce_mean(
    connections: PeerConnections,
    members: Sequence[Peer],
    weights: Sequence[float],
    flat: Tensor,
    *,
    number: int,  # of the group
    timeout: Seconds,
) -> Tensor:
    """The weighted mean of the members' `flat`; raises PeerError if a member is lost.

    And PolicyError, in both, if two of them have buffers of different size. What this one sends may
    still be on its way: its pairs keep it until `PeerConnections.release`.
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
    """A buffer that has the mean where this member owns it, and nothing elsewhere."""
    place = members.index(connections.me)
    others = [(i, peer) for i, peer in enumerate(members) if i != place]
    size_tag = tag(MessageKind.SIZE, number)
    connections.check_sizes(
        [peer for _, peer in others], flat.nbytes, tag=size_tag, timeout=timeout
    )
    in_flight: deque[tuple[slice, list[Tensor], PostedMessages]] = deque()
    for bucket, owned in enumerate(shards):
        own, messages = flat[owned[place]], PostedMessages(connections)
        rows = [own if peer == connections.me else torch.empty_like(own) for peer in members]
        bucket_tag = tag(MessageKind.REDUCE_SCATTER, number, bucket)
        for i, peer in others:
            messages.receive(peer, rows[i], tag=bucket_tag)
        for i, peer in others:
            messages.send(peer, flat[owned[i]], tag=bucket_tag)
        in_flight.append((owned[place], rows, messages))
    result, deadline = torch.empty_like(flat), time.monotonic() + timeout
    while in_flight:
        shard, rows, messages = in_flight.popleft()
        messages.wait_until(deadline)
        result[shard] = _weighted(rows, weights)
    return result


def post_all_gather(
    messages: "PostedMessages",
    members: Sequence[Peer],
    result: Tensor,
    shards: ShardSlices,
    *,
    number: int,
) -> None:
    """All messages of the second half, bucket by bucket; each part has a number of its own."""
    me, size = messages.me, len(members)
    for bucket, owned in enumerate(shards):
        bucket_tag = tag(MessageKind.ALL_GATHER, number, bucket)
        for i, peer in enumerate(members):
            if peer != me:
                into = result[owned[i]]
                messages.receive(peer, into, tag=bucket_tag, shard=bucket * size + i)
        for peer in members:
            if peer != me:
                messages.send(peer, result[owned[members.index(me)]], tag=bucket_tag)


class PostedMessages:
    """Posted at once; those that are received are waited for in order, and none of them twice.

    What is empty is not sent.
    """

    def __init__(self, connections: PeerConnections) -> None:
        self.me, self._connections = connections.me, connections
        self._received: deque[tuple[Peer, Message, int]] = deque()

    def receive(self, peer: Peer, into: Tensor, *, tag: int, shard: int = -1) -> None:
        if into.numel():
            message = self._connections.receive(peer, _raw(into), tag=tag)
            self._received.append((peer, message, shard))

    def send(self, peer: Peer, tensor: Tensor, *, tag: int) -> None:
        if tensor.numel():
            self._connections.post(peer, _raw(tensor), tag=tag)

    def wait_until(self, deadline: Seconds) -> None:
        for _ in self.iter_received(deadline):
            pass

    def iter_received(self, deadline: Seconds) -> Iterator[int]:
        """Parts as they are received. Raises PeerError if somebody is lost."""
        while self._received:
            peer, message, shard = self._received.popleft()
            left = max(deadline - time.monotonic(), _MIN_TIMEOUT)
            with peer_errors(peer.worker, "averaging"):
                message.wait(timedelta(seconds=left))
            yield shard

    def iter_completed(self) -> Iterator[int]:
        """After a failure, with all connections broken off: parts that are there nevertheless."""
        while self._received:
            _, message, shard = self._received.popleft()
            try:
                message.content.wait(timedelta(seconds=_MIN_TIMEOUT))
            except RuntimeError:  # it was on its way
                continue
            yield shard


def _shard_bucket(start: int, stop: int, size: int, element_bytes: Bytes) -> list[slice]:
    """Of each member; that of the first is all of a small bucket."""
    num = stop - start
    if num * element_bytes <= SMALL:
        cuts = [start, *[stop] * size]
    else:
        cuts = [start + num * i // size for i in range(size + 1)]
    return [slice(first, end) for first, end in pairwise(cuts)]


def _weighted(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """In the order of members, whoever adds them up."""
    dtype = rows[0].dtype
    wide = torch.float32 if dtype in _HALF_PRECISION else dtype
    total = rows[0].to(wide) * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total += row.to(wide) * weight
    return total.to(dtype)


def _raw(tensor: Tensor) -> Tensor:
    """As bytes: gloo need not know the type."""
    return tensor.view(torch.uint8)
