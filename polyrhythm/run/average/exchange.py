"""Partial all-reduce: the weighted mean of a buffer over any group, in two direct exchanges.

Each member owns one part of the buffer. First everybody sends every owner its part, and the owner
adds them up (`scatter`); then every owner sends the mean to everybody (`post_gather`). That moves
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
from polyrhythm.run.average.pairs import Message, Pairs, Peer
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Bytes, Seconds

Parts = list[list[slice]]  # of each bucket, what each member owns

_HALVES = (torch.float16, torch.bfloat16)
_SHORTEST: Seconds = 0.001  # to gloo, 0 is no limit
_NUM_GROUPS, _NUM_BUCKETS = 2**12, 2**16  # that tags tell apart; a tag is below 2**30


class Kind(IntEnum):
    """Of a message."""

    SCATTER = 0
    GATHER = 1
    END = 2
    SIZE = 3


def tag(kind: Kind, number: int, bucket: int = 0) -> int:
    """Messages of a pair have one order per tag, and those of different groups never mix."""
    group = kind * _NUM_GROUPS + number % _NUM_GROUPS
    return group * _NUM_BUCKETS + bucket % _NUM_BUCKETS


def cut(num: int, size: int, element_bytes: Bytes, bucket: Bytes | None = None) -> Parts:
    """What each of `size` members owns of `num` numbers, in buckets; in one without `bucket`.

    What is left over is the first bucket, which is waited for.
    """
    most = max(num if bucket is None else bucket // element_bytes, 1)
    stops = sorted(range(num, 0, -most))
    return [_cut_one(*ends, size, element_bytes) for ends in pairwise([0, *stops])]


def mean(
    pairs: Pairs,
    members: Sequence[Peer],
    weights: Sequence[float],
    flat: Tensor,
    *,
    number: int,  # of the group
    timeout: Seconds,
) -> Tensor:
    """The weighted mean of the members' `flat`; raises PeerError if a member is lost.

    And PolicyError, in both, if two of them have buffers of different size. What this one sends may
    still be on its way: its pairs keep it until `Pairs.release`.
    """
    parts = cut(flat.numel(), len(members), flat.element_size())
    result = scatter(pairs, members, weights, flat, parts, number=number, timeout=timeout)
    messages = Messages(pairs)
    post_gather(messages, members, result, parts, number=number)
    messages.wait_until(time.monotonic() + timeout)
    return result


def scatter(
    pairs: Pairs,
    members: Sequence[Peer],
    weights: Sequence[float],
    flat: Tensor,
    parts: Parts,
    *,
    number: int,
    timeout: Seconds,
) -> Tensor:
    """A buffer that has the mean where this member owns it, and nothing elsewhere."""
    place = members.index(pairs.me)
    others = [(i, peer) for i, peer in enumerate(members) if i != place]
    size_tag = tag(Kind.SIZE, number)
    pairs.compare([peer for _, peer in others], flat.nbytes, tag=size_tag, timeout=timeout)
    on_their_way: deque[tuple[slice, list[Tensor], Messages]] = deque()
    for bucket, owned in enumerate(parts):
        own, messages = flat[owned[place]], Messages(pairs)
        rows = [own if peer == pairs.me else torch.empty_like(own) for peer in members]
        bucket_tag = tag(Kind.SCATTER, number, bucket)
        for i, peer in others:
            messages.receive(peer, rows[i], tag=bucket_tag)
        for i, peer in others:
            messages.send(peer, flat[owned[i]], tag=bucket_tag)
        on_their_way.append((owned[place], rows, messages))
    result, ends = torch.empty_like(flat), time.monotonic() + timeout
    while on_their_way:
        part, rows, messages = on_their_way.popleft()
        messages.wait_until(ends)
        result[part] = _weighted(rows, weights)
    return result


def post_gather(
    messages: "Messages", members: Sequence[Peer], result: Tensor, parts: Parts, *, number: int
) -> None:
    """All messages of the second half, bucket by bucket; each part has a number of its own."""
    me, size = messages.me, len(members)
    for bucket, owned in enumerate(parts):
        bucket_tag = tag(Kind.GATHER, number, bucket)
        for i, peer in enumerate(members):
            if peer != me:
                into = result[owned[i]]
                messages.receive(peer, into, tag=bucket_tag, part=bucket * size + i)
        for peer in members:
            if peer != me:
                messages.send(peer, result[owned[members.index(me)]], tag=bucket_tag)


class Messages:
    """Posted at once; those that are received are waited for in order, and none of them twice.

    What is empty is not sent.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.me, self._pairs = pairs.me, pairs
        self._received: deque[tuple[Peer, Message, int]] = deque()

    def receive(self, peer: Peer, into: Tensor, *, tag: int, part: int = -1) -> None:
        if into.numel():
            message = self._pairs.receive(peer, _raw(into), tag=tag)
            self._received.append((peer, message, part))

    def send(self, peer: Peer, tensor: Tensor, *, tag: int) -> None:
        if tensor.numel():
            self._pairs.post(peer, _raw(tensor), tag=tag)

    def wait_until(self, ends: Seconds) -> None:
        for _ in self.landing(ends):
            pass

    def landing(self, ends: Seconds) -> Iterator[int]:
        """Parts as they are received. Raises PeerError if somebody is lost."""
        while self._received:
            peer, message, part = self._received.popleft()
            left = max(ends - time.monotonic(), _SHORTEST)
            with waiting_for(peer.worker, "averaging"):
                message.wait(timedelta(seconds=left))
            yield part

    def landed(self) -> Iterator[int]:
        """After a failure, with all connections broken off: parts that are there nevertheless."""
        while self._received:
            _, message, part = self._received.popleft()
            try:
                message.content.wait(timedelta(seconds=_SHORTEST))
            except RuntimeError:  # it was on its way
                continue
            yield part


def _cut_one(start: int, stop: int, size: int, element_bytes: Bytes) -> list[slice]:
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
    wide = torch.float32 if dtype in _HALVES else dtype
    total = rows[0].to(wide) * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total += row.to(wide) * weight
    return total.to(dtype)


def _raw(tensor: Tensor) -> Tensor:
    """As bytes: gloo need not know the type."""
    return tensor.view(torch.uint8)
