"""Workers that average in each of four ways in turn, and take the time.

Before each average all agree on a moment to begin at; it has taken as long as until the last member
has the mean. Everything else is outside of that time: making what is to be there already, checking
the mean. What a fresh group takes until it is destroyed, too, is a sample of its own.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from polyrhythm.run.averaging.exchange import all_reduce_mean
from polyrhythm.run.averaging.peer_connections import Peer, PeerConnections
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import all_reduce, new_gloo_group
from polyrhythm.types import Bytes, Seconds, Worker

PAIRS, FIRST_PAIRS = "pairs", "first pairs"
CACHED_GROUP, FRESH_GROUP = "cached group", "fresh group"
WAYS = (PAIRS, CACHED_GROUP, FRESH_GROUP, FIRST_PAIRS)
DESTROYED_GROUP = "fresh, destroyed"  # a fresh group, until it is gone again

DEADLINE: Seconds = 30.0  # of any wait for another worker
_NOTICE: Seconds = 0.03  # from agreeing on a moment until it comes: all know of it by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    num_workers: int
    group_sizes: tuple[int, ...]
    buffer: Bytes
    num_rounds: int  # one more goes before them, which does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    way: str
    members: tuple[int, ...]  # ranks
    round: int  # 0 does not count
    number: int  # of all trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One average."""

    way: str
    group_size: int
    round: int
    seconds: Seconds


def trials(plan: Plan) -> Iterator[Trial]:
    """The same for all workers, with members and the order of the ways drawn anew each time."""
    chance, number = random.Random(0), 0
    for turn in range(plan.num_rounds + 1):
        for size in plan.group_sizes:
            members = tuple(sorted(chance.sample(range(plan.num_workers), size)))
            for way in chance.sample(WAYS, len(WAYS)):
                yield Trial(way=way, members=members, round=turn, number=number)
                number += 1


def measure(ctx: DistContext, plan: Plan, path: Path) -> None:
    """As one of the workers; the first writes the samples to `path`."""
    torch.set_num_threads(1)
    with ctx.process_group(DEADLINE):
        kept, flat = _pairs_to_all(ctx), torch.full((plan.buffer // 4,), float(ctx.rank))
        samples: list[Sample] = []
        for trial in trials(plan):
            found = _timed(trial, ctx.rank, flat, kept)
            if trial.round > 0:
                samples += found
        if ctx.rank == 0:
            path.write_bytes(msgspec.json.encode(samples))


def _timed(trial: Trial, rank: int, flat: Tensor, kept: PeerConnections) -> list[Sample]:
    """Every worker of the job takes part, so that all know when the last member was done."""
    way = _prepared(trial, flat, kept) if rank in trial.members else None
    began = _latest(time.monotonic() + _NOTICE)
    if way is not None:
        time.sleep(max(0.0, began - time.monotonic()))
        found = way.mean()
    seconds = _latest(time.monotonic() if way else 0.0) - began
    if way is not None:
        torch.testing.assert_close(
            found, torch.full_like(found, sum(trial.members) / len(trial.members))
        )
    samples = [_sample(trial, trial.way, seconds)]
    if trial.way == FRESH_GROUP:
        began = time.monotonic()
        del way  # and with it the group, now that nobody needs it
        destroying = _latest(time.monotonic() - began)
        samples.append(_sample(trial, DESTROYED_GROUP, seconds + destroying))
    return samples


def _sample(trial: Trial, way: str, seconds: Seconds) -> Sample:
    return Sample(
        way=way,
        group_size=len(trial.members),
        round=trial.round,
        seconds=seconds,
    )


def _latest(time_of_mine: Seconds) -> Seconds:
    """The largest of all workers, who have the same clock; a barrier, too."""
    largest = torch.tensor(time_of_mine, dtype=torch.float64)
    with peer_errors("another worker", "beginning or ending an average"):
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


class _Way(Protocol):
    def mean(self) -> Tensor: ...


def _prepared(trial: Trial, flat: Tensor, kept: PeerConnections) -> _Way:
    """Every way has just averaged so much, in one way or the other: none has colder memory."""
    over_kept = _OverPairs(trial, flat, kept)
    over_kept.mean()
    if trial.way == PAIRS:
        return over_kept
    if trial.way == FIRST_PAIRS:
        return _OverPairs(trial, flat, PeerConnections(_get_default_store(), kept.me))
    over_group = _OverGroup(trial, flat)
    if trial.way == CACHED_GROUP:
        over_group.mean()
    return over_group


@dataclass(slots=True)
class _OverPairs:
    """As the averager does."""

    trial: Trial
    flat: Tensor
    connections: PeerConnections

    def mean(self) -> Tensor:
        members = _peers(self.trial.members)
        others = [peer for peer in members if peer != self.connections.me]
        self.connections.connect(others, str(self.trial.number), timeout=DEADLINE)
        weights = [1 / len(members)] * len(members)
        number = self.trial.number
        found = all_reduce_mean(
            self.connections, members, weights, self.flat, number=number, timeout=DEADLINE
        )
        self.connections.flush(DEADLINE)
        return found


@dataclass(slots=True)
class _OverGroup:
    """A process group, made when it is first needed.

    Not with torch.distributed.new_group: with local synchronisation it names a group after its
    members and how many groups they have. Members with unequal numbers never meet, and a group made
    again after it was destroyed finds the addresses of the old one. What is made is the same.
    """

    trial: Trial
    flat: Tensor
    group: dist.ProcessGroup | None = None

    def mean(self) -> Tensor:
        members = self.trial.members
        if self.group is None:
            self.group = new_gloo_group(members, "an average", timeout=DEADLINE)
        total = self.flat.clone()  # out of place, as over pairs: an average may be given up
        with peer_errors("another member", "averaging"):
            all_reduce(self.group, total, dist.ReduceOp.SUM)
        return total.div_(len(members))


def _pairs_to_all(ctx: DistContext) -> PeerConnections:
    everybody = _peers(range(ctx.world_size))
    connections = PeerConnections(_get_default_store(), everybody[ctx.rank])
    others = [peer for peer in everybody if peer != connections.me]
    connections.connect(others, "all", timeout=DEADLINE)
    return connections


def _peers(ranks: Sequence[int]) -> list[Peer]:
    return [Peer(Worker(0, rank), 1) for rank in ranks]
