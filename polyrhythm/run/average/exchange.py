"""Partial all-reduce: the weighted mean of a buffer over any group, in two direct exchanges.

Each member owns one part of the buffer. First everybody sends every owner its part, and the owner
adds them up; then every owner sends the mean to everybody. That moves as many bytes as a ring, with
two messages one after the other instead of 2(g-1). A buffer so small that the number of messages
counts, not their size, has one owner, the first member. All members get the same bits, since each
part is added up in one place. The buffer given is left as it is.

Sums of half-precision numbers are made in single precision, and rounded once.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch
from torch import Tensor

from polyrhythm.run.average.pairs import Pairs, Peer
from polyrhythm.run.peers import waiting_for
from polyrhythm.types import Bytes, Seconds

_HALVES = (torch.float16, torch.bfloat16)
_MOST_TAGS = 2**28  # a tag is a 32-bit number
_SIZES = 2**30  # added to it where sizes are compared
_SMALL: Bytes = 16 * 2**10  # takes 0.1 ms at 1 Gbit/s, about as long as any message


def mean(
    pairs: Pairs,
    members: Sequence[Peer],
    weights: Sequence[float],
    flat: Tensor,
    *,
    number: int,  # of the group: messages of different groups never mix
    timeout: Seconds,
) -> Tensor:
    """The weighted mean of the members' `flat`; raises PeerError if a member is lost.

    And PolicyError, in both, if two of them have buffers of different size.
    """
    place, size = members.index(pairs.me), len(members)
    others = [(i, peer) for i, peer in enumerate(members) if i != place]
    parts = _parts(flat.numel(), size, flat.element_size())
    tag = 2 * (number % _MOST_TAGS)
    pairs.compare([peer for _, peer in others], flat.nbytes, tag=_SIZES + tag, timeout=timeout)

    own = flat[parts[place]]
    theirs = own.new_empty(size, own.numel())
    _exchange(
        pairs,
        received=[(peer, theirs[i]) for i, peer in others],
        sent=[(peer, flat[parts[i]]) for i, peer in others],
        tag=tag,
        timeout=timeout,
    )
    theirs[place] = own

    result = torch.empty_like(flat)
    result[parts[place]] = _weighted(theirs, weights)
    _exchange(
        pairs,
        received=[(peer, result[parts[i]]) for i, peer in others],
        sent=[(peer, result[parts[place]]) for _, peer in others],
        tag=tag + 1,
        timeout=timeout,
    )
    return result


def _parts(num: int, size: int, element_bytes: int) -> list[slice]:
    """Of each member; that of the first is all of a small buffer."""
    if num * element_bytes <= _SMALL:
        cuts = [0, *[num] * size]
    else:
        cuts = [num * i // size for i in range(size + 1)]
    return [slice(start, end) for start, end in pairwise(cuts)]


def _exchange(
    pairs: Pairs,
    *,
    received: Sequence[tuple[Peer, Tensor]],
    sent: Sequence[tuple[Peer, Tensor]],
    tag: int,
    timeout: Seconds,
) -> None:
    """All at once; what is empty is not sent."""
    works = [(p, pairs.receive(p, _raw(t), tag=tag)) for p, t in received if t.numel()]
    works += [(p, pairs.send(p, _raw(t), tag=tag)) for p, t in sent if t.numel()]
    for peer, work in works:
        with waiting_for(peer.worker, "averaging"):
            work.wait(timedelta(seconds=timeout))


def _weighted(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """In the order of members, whoever adds them up."""
    wide = torch.float32 if rows.dtype in _HALVES else rows.dtype
    return (torch.tensor(weights, dtype=wide) @ rows.to(wide)).to(rows.dtype)


def _raw(tensor: Tensor) -> Tensor:
    """As bytes: gloo need not know the type."""
    return tensor.view(torch.uint8)
