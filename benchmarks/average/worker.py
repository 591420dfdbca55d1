"""Workers that average a buffer by each method in turn, and time it.

Before each average all workers agree on a start; it takes until the last member has the mean. What
must exist beforehand is made outside that time, and the mean is checked outside it. Averaging over
a fresh group and destroying the group is a method of its own in the rows.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from benchmarks.harness.pool import PoolWorker
from benchmarks.harness.timing import max_over_workers, time_together
from polyrhythm.errors import peer_errors
from polyrhythm.run.averaging.exchange import Peer, PeerConnections, all_reduce_mean
from polyrhythm.run.comm.process_groups import all_reduce, new_gloo_group
from polyrhythm.types import Bytes, Seconds, Worker

PAIRS, FIRST_PAIRS = "pairs", "first pairs"
CACHED_GROUP, FRESH_GROUP = "cached group", "fresh group"
METHODS = (PAIRS, CACHED_GROUP, FRESH_GROUP, FIRST_PAIRS)
DESTROYED_GROUP = "fresh, destroyed"  # a fresh group, until it is destroyed

_TIMEOUT: Seconds = 30.0  # of any wait for another worker
_HEAD_START: Seconds = 0.03  # from agreeing on a start until it comes


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageSetting:
    network: str
    num_workers: int
    group_sizes: tuple[int, ...]
    buffer: Bytes
    num_rounds: int  # a warm-up round goes before them
    methods: tuple[str, ...] = METHODS


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageTrial:
    method: str
    members: tuple[int, ...]  # ranks
    round: int  # 0 is the warm-up
    number: int  # of all trials


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageRow:
    """One average."""

    network: str
    method: str
    group_size: int
    round: int
    seconds: Seconds


def trials(setting: AverageSetting) -> Iterator[AverageTrial]:
    """Yield the same trials on all workers; members and the order of methods are random."""
    chance, number = random.Random(0), 0
    for round_number in range(setting.num_rounds + 1):
        for size in setting.group_sizes:
            members = tuple(sorted(chance.sample(range(setting.num_workers), size)))
            for method in chance.sample(setting.methods, len(setting.methods)):
                yield AverageTrial(
                    method=method, members=members, round=round_number, number=number
                )
                number += 1


def work(worker: PoolWorker, setting: AverageSetting) -> None:
    """Send the rows of all trials to the driver; those of rank 0 are complete."""
    torch.set_num_threads(1)
    with worker.process_group():
        everybody = _peers(range(worker.world_size))
        connections = PeerConnections(_get_default_store(), everybody[worker.rank])
        others = [peer for peer in everybody if peer != connections.me]
        connections.connect(others, "all", timeout=_TIMEOUT)
        flat = torch.full((setting.buffer // 4,), float(worker.rank))
        rows: list[AverageRow] = []
        for trial in trials(setting):
            times = _times(trial, worker.rank, flat, connections)
            if trial.round > 0:
                rows += [
                    AverageRow(
                        network=setting.network,
                        method=method,
                        group_size=len(trial.members),
                        round=trial.round,
                        seconds=seconds,
                    )
                    for method, seconds in times.items()
                ]
        worker.send(rows)


def _times(
    trial: AverageTrial, rank: int, flat: Tensor, connections: PeerConnections
) -> dict[str, Seconds]:
    """Time one trial by method; all workers take part, members or not."""
    method = _prepared(trial, flat, connections) if rank in trial.members else None
    seconds = time_together(None if method is None else method.run, head_start=_HEAD_START)
    if method is not None:
        expected = torch.full_like(flat, sum(trial.members) / len(trial.members))
        torch.testing.assert_close(method.mean, expected)
    if trial.method != FRESH_GROUP:
        return {trial.method: seconds}
    start = time.monotonic()
    del method  # the last reference to the group
    destroying = max_over_workers(time.monotonic() - start)
    return {FRESH_GROUP: seconds, DESTROYED_GROUP: seconds + destroying}


def _prepared(trial: AverageTrial, flat: Tensor, connections: PeerConnections) -> "_Average":
    """Average once over pairs before any method: none starts with colder memory."""
    _Average(trial, flat, connections).run()
    if trial.method == FIRST_PAIRS:
        connections = PeerConnections(_get_default_store(), connections.me)
    is_over_pairs = trial.method in (PAIRS, FIRST_PAIRS)
    average = _Average(trial, flat, connections if is_over_pairs else None)
    if trial.method == CACHED_GROUP:
        average.run()
    return average


@dataclass(slots=True)
class _Average:
    """Averages over `connections`, as GroupSync does, or over a process group of its own.

    Not by torch.distributed.new_group: with local synchronisation it names a group after its
    members and the number of groups they have. Members with unequal numbers never find each other,
    and a group that is made again after it was destroyed finds the addresses of the old one.
    """

    trial: AverageTrial
    flat: Tensor
    connections: PeerConnections | None
    group: dist.ProcessGroup | None = None
    mean: Tensor = field(init=False)

    def run(self) -> None:
        ranks, number = self.trial.members, self.trial.number
        if self.connections is not None:
            members, weights = _peers(ranks), [1 / len(ranks)] * len(ranks)
            others = [peer for peer in members if peer != self.connections.me]
            self.connections.connect(others, str(number), timeout=_TIMEOUT)
            self.mean = all_reduce_mean(
                self.connections, members, weights, self.flat, number=number, timeout=_TIMEOUT
            )
            self.connections.flush(_TIMEOUT)
            return
        if self.group is None:
            self.group = new_gloo_group(ranks, "an average", timeout=_TIMEOUT)
        total = self.flat.clone()  # out of place, as over pairs: an average may be aborted
        with peer_errors("another member", "averaging"):
            all_reduce(self.group, total, dist.ReduceOp.SUM)
        self.mean = total.div_(len(ranks))


def _peers(ranks: Sequence[int]) -> list[Peer]:
    return [Peer(Worker(0, rank), 1) for rank in ranks]
