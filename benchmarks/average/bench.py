"""How a group averages: over kept pairs of workers, or over a process group of its own.

Groups are others at nearly each step. Real processes on hosts of the lab average a buffer in four
ways, in turns: over pairs that are there (`pairs`) or yet to be made (`first pairs`), and with
gloo's all-reduce over a process group that is there (`cached group`) or made for it
(`fresh group`). Time is that until the last member has the mean; medians over rounds. Ratios say
how many times as long as `pairs` the others take in a local network. Destroying a fresh group is
mere waiting, about 10 ms per connection, that a thread could do; `fresh, destroyed` counts it, too.

How often a cache would have the group that is asked for follows from the groups that `age` forms.
"""

import dataclasses
import math
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.average.cache import groups_of_age, hit_rate
from benchmarks.average.worker import (
    CACHED_GROUP,
    DESTROYED_GROUP,
    FIRST_PAIRS,
    FRESH_GROUP,
    PAIRS,
    Plan,
    Sample,
    measure,
)
from benchmarks.result import Result
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.errors import LaunchError
from polyrhythm.lab.lab import Lab
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.tables import print_line, print_table
from polyrhythm.types import Seconds

_NUM_WORKERS = 16
FULL = Plan(num_workers=_NUM_WORKERS, group_sizes=(4, 16), buffer=400_000, num_rounds=11)
QUICK = Plan(num_workers=_NUM_WORKERS, group_sizes=(4, 16), buffer=400_000, num_rounds=1)
NETWORKS = {"local": 0.2e-3, "region": 2e-3}  # one-way latency, in seconds
_BANDWIDTH = 125e6  # of each host, in bytes per second
_PORT = 29500  # on a host of the lab, where nobody else is
_PATIENCE: Seconds = 180.0
# With pairs, and under which names.
_OTHERS = {
    CACHED_GROUP: "cached",
    FRESH_GROUP: "fresh",
    DESTROYED_GROUP: "destroyed",
    FIRST_PAIRS: "first_pairs",
}
_IN_RATIOS = (FRESH_GROUP, CACHED_GROUP)  # of the local network; the rest are figures

_BOUND = 64  # groups that a worker keeps
_STEPS = 400  # of a worker that nothing slows
_SLOW = {
    "stalls": Slow(device=EVERY_DEVICE, probability=0.1, sleep_factor=3.0),
    "trace": Slow(device=EVERY_DEVICE, trace="sdpipe_16gpu", trace_duration=1.1 * _STEPS),
}

Medians = Mapping[tuple[str, str, int], Seconds]  # of a network, a way and a size of groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One average."""

    network: str
    way: str
    group_size: int
    round: int
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRow:
    """Of the groups that `age` forms."""

    machines: str
    num_groups: int
    mean_size: float
    hits: float  # with a bound
    hits_unbounded: float


def run(*, quick: bool, console: Console) -> Result:
    plan, networks = (QUICK, ["local"]) if quick else (FULL, list(NETWORKS))
    rows = [row for network in networks for row in _measured(plan, network)]
    medians = _medians(rows)
    _show_times(console, plan, rows, medians)
    caches = [_cache_row(machines) for machines in _SLOW]
    _show_caches(console, caches)
    hits = max(row.hits for row in caches)  # of the machines that suit a cache better
    ratios = {
        f"{_OTHERS[way]}_vs_pairs_{size}": _versus_pairs(medians, "local", way, size)
        for size in plan.group_sizes
        for way in _IN_RATIOS
    }
    if quick:
        print_line(console, "quick: it runs, and its times say nothing; leave --quick out")
    return Result(
        bench="average",
        ratios={**ratios, "cache_hits": hits},
        figures=_figures(medians, caches),
        rows=[*rows, *caches],
    )


def _measured(plan: Plan, network: str) -> list[Row]:
    cluster = Cluster(
        name=network,
        devices=tuple(Device(name=f"w{rank}", region=network) for rank in range(plan.num_workers)),
        regions=(network,),
        latency=((NETWORKS[network],),),
        bandwidth=((_BANDWIDTH,),),
    )
    with tempfile.TemporaryDirectory() as name, Lab(cluster, Scenario(name=network)) as lab:
        folder = Path(name)
        path, first = folder / "samples.json", lab.address(lab.hosts[0])
        workers = [
            lab.spawn(host, _work, rank, first, plan, path, output=folder / f"{rank}.log")
            for rank, host in enumerate(lab.hosts)
        ]
        lab.wait(workers, timeout=_PATIENCE)
        for rank, worker in enumerate(workers):
            if worker.status != 0:
                raise LaunchError(
                    f"the worker of rank {rank} {worker.reason}: "
                    f"{(folder / f'{rank}.log').read_text()[-500:]}",
                    expected=f"all its averages within {_PATIENCE:g} s, on two idle cores",
                    fix="run the benchmark while the machine has nothing else to do",
                )
        samples = msgspec.json.decode(path.read_bytes(), type=list[Sample])
    return [Row(network=network, **dataclasses.asdict(sample)) for sample in samples]


def _work(rank: int, first: str, plan: Plan, path: Path) -> None:
    """As torchrun would set it up on that host."""
    os.environ |= {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{plan.num_workers}",
        "MASTER_ADDR": first,
        "MASTER_PORT": f"{_PORT}",
    }
    measure(DistContext(rank=rank, world_size=plan.num_workers, local_rank=0), plan, path)


def _medians(rows: Sequence[Row]) -> dict[tuple[str, str, int], Seconds]:
    cases = dict.fromkeys((r.network, r.way, r.group_size) for r in rows)
    return {case: statistics.median(_times(rows, case)) for case in cases}


def _times(rows: Sequence[Row], case: tuple[str, str, int]) -> list[Seconds]:
    return [r.seconds for r in rows if (r.network, r.way, r.group_size) == case]


def _versus_pairs(medians: Medians, network: str, way: str, size: int) -> float:
    return medians[network, way, size] / medians[network, PAIRS, size]


def _cache_row(machines: str) -> CacheRow:
    scenario = Scenario(name=machines, seed=0, slow=(_SLOW[machines],))
    groups = list(groups_of_age(scenario, _NUM_WORKERS, duration=_STEPS))
    return CacheRow(
        machines=machines,
        num_groups=len(groups),
        mean_size=statistics.fmean(map(len, groups)),
        hits=hit_rate(groups, _BOUND),
        hits_unbounded=hit_rate(groups, math.inf),
    )


def _figures(medians: Medians, caches: Sequence[CacheRow]) -> dict[str, float]:
    found: dict[str, float] = {}
    for (network, way, size), seconds in medians.items():
        found[f"{network}_{_OTHERS.get(way, way)}_{size}_ms"] = 1e3 * seconds
        if way != PAIRS:
            ratio = _versus_pairs(medians, network, way, size)
            found[f"{network}_{_OTHERS[way]}_vs_pairs_{size}"] = ratio
    for row in caches:
        found[f"cache_hits_{row.machines}"] = row.hits
        found[f"cache_hits_{row.machines}_unbounded"] = row.hits_unbounded
    return found


def _show_times(console: Console, plan: Plan, rows: Sequence[Row], medians: Medians) -> None:
    ways = (PAIRS, *_OTHERS)
    print_table(
        console,
        [
            "latency",
            "members",
            *(f"{way}, ms" for way in ways),
            *(f"{name} / pairs" for name in _OTHERS.values()),
        ],
        [
            [
                f"{1e3 * NETWORKS[network]:g} ms",
                f"{size}",
                *(_cell(_times(rows, (network, way, size))) for way in ways),
                *(f"{_versus_pairs(medians, network, way, size):.2f}" for way in _OTHERS),
            ]
            for network in dict.fromkeys(row.network for row in rows)
            for size in plan.group_sizes
        ],
        title=f"an average of {plan.buffer / 1e3:g} kB among {plan.num_workers} workers until the "
        f"last member has it: median (quartiles) of {plan.num_rounds} rounds",
    )


def _cell(times: Sequence[Seconds]) -> str:
    if len(times) < 2:
        return f"{1e3 * times[0]:.1f}"
    low, middle, high = (1e3 * t for t in statistics.quantiles(times, n=4, method="inclusive"))
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


def _show_caches(console: Console, rows: Sequence[CacheRow]) -> None:
    print_table(
        console,
        ["machines", "groups", "members", f"hits, {_BOUND} kept", "hits, all kept"],
        [
            [
                row.machines,
                f"{row.num_groups:,}",
                f"{row.mean_size:.1f}",
                f"{row.hits:.1%}",
                f"{row.hits_unbounded:.1%}",
            ]
            for row in rows
        ],
        title="groups of `age` that a cache would have",
        numbers=True,
    )
