"""Times of an all-reduce and of its two halves by size, gloo's and ours: the paper's Figure 5."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.decoupled.settings import CollectiveSetting
from benchmarks.harness.pool import TIMEOUT
from benchmarks.harness.report import median_of
from benchmarks.harness.timing import time_together
from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.comm.reduce_scatter import GlooCollectives
from polyrhythm.types import Bytes, Seconds

ALL_REDUCE = "all-reduce"
SCATTER, GATHER, BOTH = "reduce-scatter", "all-gather", "both"
GLOO, PEERS = "gloo", "ours"
_HEAD_START: Seconds = 0.02  # from agreeing on a start until it comes
_TRIPS = 9  # one-way messages that agreeing takes at most, among four workers

Collective = tuple[str, str]  # GLOO or PEERS, and its name


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One collective, until the last worker has the result."""

    num_workers: int
    size: Bytes
    whose: str
    what: str
    round: int
    seconds: Seconds


def time_collectives(setting: CollectiveSetting) -> list[CollectiveRow]:
    """Return the same rows on all workers; a warm-up round goes before them."""
    group = new_gloo_group(range(dist.get_world_size()), "halves", timeout=TIMEOUT)
    peers = GlooCollectives(group, timeout=TIMEOUT)
    rows = []
    for size in setting.sizes:
        collectives = _collectives(torch.ones(size // 4), peers)
        for number in range(setting.num_rounds + 1):
            for (whose, what), parts in collectives.items():
                row = CollectiveRow(
                    num_workers=peers.num_workers,
                    size=size,
                    whose=whose,
                    what=what,
                    round=number,
                    seconds=time_together(partial(_run, parts), head_start=_HEAD_START),
                )
                if number > 0:
                    rows.append(row)
    return rows


def _run(parts: Sequence[Callable[[], Any]]) -> None:
    for start in parts:
        start().wait()


def _collectives(
    flat: Tensor, peers: GlooCollectives
) -> dict[Collective, Sequence[Callable[[], Any]]]:
    """Return what starts the parts of each collective, which run one after the other."""
    own = flat.view(peers.num_workers, -1)[peers.rank].clone()
    world = dist.group.WORLD
    assert world is not None, "the process group is initialised"
    # The public name depends on torch's release.
    scatter = partial(world._reduce_scatter_base, own, flat, dist.ReduceScatterOptions())
    gather = partial(world._allgather_base, flat, own)
    scatter_to_peers = partial(peers.reduce_scatter, flat, 0)
    gather_from_peers = partial(peers.all_gather, flat, 0)
    return {
        (GLOO, ALL_REDUCE): [partial(dist.all_reduce, flat, async_op=True)],
        (GLOO, SCATTER): [scatter],
        (PEERS, SCATTER): [scatter_to_peers],
        (GLOO, GATHER): [gather],
        (PEERS, GATHER): [gather_from_peers],
        (GLOO, BOTH): [scatter, gather],
        (PEERS, BOTH): [scatter_to_peers, gather_from_peers],
    }


def message_time(size: Bytes, latency: Seconds) -> Seconds:
    """Time a plain message from the first worker to the last; `latency` is that of their link.

    In one direction only: with traffic in both, acknowledgements wait behind data, and TCP gets
    about three quarters of the bandwidth. That counts against a side which sends so.
    """
    message, last = torch.ones(size // 4), dist.get_world_size() - 1

    def send() -> None:
        if dist.get_rank() == 0:
            dist.send(message, last)
        elif dist.get_rank() == last:
            dist.recv(message, 0)

    return time_together(send, head_start=_HEAD_START + _TRIPS * latency)


def milliseconds(rows: Sequence[CollectiveRow], of: Collective) -> float:
    """Return the median time of a collective."""
    return 1e3 * median_of(rows, "seconds", whose=of[0], what=of[1])
