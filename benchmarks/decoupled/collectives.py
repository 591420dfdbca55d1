"""An all-reduce and its two halves by size, gloo's and ours: the paper's Figure 5."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.decoupled.settings import HalvesPlan
from benchmarks.decoupled.training import DEADLINE
from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.comm.reduce_scatter import GlooCollectives
from polyrhythm.types import Bytes, Seconds

ALL_REDUCE = "all-reduce"
SCATTER, GATHER, BOTH = "reduce-scatter", "all-gather", "both"
GLOO, PEERS = "gloo", "ours"
_NOTICE: Seconds = 0.02  # from agreeing on a moment until it comes
_TRIPS = 9  # that agreeing takes, at most, of messages between four workers

Way = tuple[str, str]  # whose, and what


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfRow:
    """One collective, until the last worker has it."""

    num_workers: int
    size: Bytes
    whose: str
    what: str
    round: int
    seconds: Seconds


def measure_halves(plan: HalvesPlan) -> list[HalfRow]:
    """As one of the workers: all have the same rows."""
    group = new_gloo_group(range(dist.get_world_size()), "halves", timeout=DEADLINE)
    peers = GlooCollectives(group, timeout=DEADLINE)
    rows = []
    for size in plan.sizes:
        ways = _ways(torch.ones(size // 4), peers)
        for number in range(plan.num_rounds + 1):
            for (whose, what), actions in ways.items():
                row = HalfRow(
                    num_workers=peers.num_workers,
                    size=size,
                    whose=whose,
                    what=what,
                    round=number,
                    seconds=_timed(actions),
                )
                if number > 0:
                    rows.append(row)
    return rows


def _ways(flat: Tensor, peers: GlooCollectives) -> dict[Way, Sequence[Callable[[], object]]]:
    """What each does, one thing after the other."""
    own = flat.view(peers.num_workers, -1)[peers.rank].clone()
    world = dist.group.WORLD
    assert world is not None, "the job has begun"

    def scatter() -> None:
        # Its public name depends on the release.
        world._reduce_scatter_base(own, flat, dist.ReduceScatterOptions()).wait()

    def gather() -> None:
        world._allgather_base(flat, own).wait()

    def scatter_to_peers() -> None:
        peers.reduce_scatter(flat, 0).wait()

    def gather_from_peers() -> None:
        peers.all_gather(flat, 0).wait()

    return {
        (GLOO, ALL_REDUCE): [lambda: dist.all_reduce(flat)],
        (GLOO, SCATTER): [scatter],
        (PEERS, SCATTER): [scatter_to_peers],
        (GLOO, GATHER): [gather],
        (PEERS, GATHER): [gather_from_peers],
        (GLOO, BOTH): [scatter, gather],
        (PEERS, BOTH): [scatter_to_peers, gather_from_peers],
    }


def message_time(size: Bytes, latency: Seconds) -> Seconds:
    """Of a plain message from the first worker to the last; `latency` is what they are apart.

    In one direction: with traffic in both, acknowledgements wait behind data, and TCP gets about
    three quarters of it. That is to count against whoever sends so.
    """
    message, last = torch.ones(size // 4), dist.get_world_size() - 1

    def pass_on() -> None:
        if dist.get_rank() == 0:
            dist.send(message, last)
        elif dist.get_rank() == last:
            dist.recv(message, 0)

    return _timed([pass_on], notice=_NOTICE + _TRIPS * latency)


def _timed(actions: Sequence[Callable[[], object]], *, notice: Seconds = _NOTICE) -> Seconds:
    """From a moment that all agree on until the last is done."""
    began = _latest(time.monotonic() + notice)
    time.sleep(max(0.0, began - time.monotonic()))
    for action in actions:
        action()
    return _latest(time.monotonic()) - began


def _latest(time_of_mine: Seconds) -> Seconds:
    """The largest of all workers, who have the same clock; a barrier, too."""
    largest = torch.tensor(time_of_mine, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
