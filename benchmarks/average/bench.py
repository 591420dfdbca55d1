"""Averages over kept pairs of workers against averages over a process group per group.

The members of a group change at nearly each step. Real processes on hosts of the lab average a
buffer by four methods, in turns: over pairs that exist (`pairs`) or are made first (`first pairs`),
and by gloo's all-reduce over a process group that exists (`cached group`) or is made first (`fresh
group`). A time lasts until the last member has the mean; medians over rounds. Ratios are times over
that of `pairs` in a local network. Destroying a fresh group only waits, about 10 ms per connection,
and a thread could do it; `fresh, destroyed` includes it.

How often a cache holds the group that is needed follows from the groups that `age` forms.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from benchmarks.average.group_cache import groups_of_age, hit_rate
from benchmarks.average.worker import (
    CACHED_GROUP,
    DESTROYED_GROUP,
    FIRST_PAIRS,
    FRESH_GROUP,
    PAIRS,
    AverageRow,
    AverageSetting,
    work,
)
from benchmarks.harness.network import uniform_cluster
from benchmarks.harness.pool import WorkerPool
from benchmarks.harness.report import Bar, Result, median_of, print_bars, print_rows, select
from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.lab.lab import Lab
from polyrhythm.tables import print_table
from polyrhythm.types import Seconds

_NUM_WORKERS = 16
FULL = AverageSetting(
    network="local", num_workers=_NUM_WORKERS, group_sizes=(4, 16), buffer=400_000, num_rounds=11
)
QUICK = replace(FULL, num_rounds=1)
NETWORKS = {"local": 0.2e-3, "region": 2e-3}  # one-way latency, in seconds
_BANDWIDTH = 125e6  # of each host, in bytes per second
_TIMEOUT: Seconds = 180.0  # for all averages
# The methods beside pairs, and their names in ratios and figures.
_OTHERS = {
    CACHED_GROUP: "cached",
    FRESH_GROUP: "fresh",
    DESTROYED_GROUP: "destroyed",
    FIRST_PAIRS: "first_pairs",
}
_IN_RATIOS = (FRESH_GROUP, CACHED_GROUP)  # of the local network; the rest are figures

_CACHE_SIZE = 64  # groups that a worker keeps
_STEPS = 400  # of a worker that nothing slows
_SLOW = {
    "stalls": Slow(device=EVERY_DEVICE, probability=0.1, sleep_factor=3.0),
    "trace": Slow(device=EVERY_DEVICE, trace="sdpipe_16gpu", trace_duration=1.1 * _STEPS),
}
BARS = (
    *(
        Bar(f"{_OTHERS[method]}_vs_pairs_{size}", ">=", None, f"{method}: time over that of pairs")
        for size in FULL.group_sizes
        for method in _IN_RATIOS
    ),
    Bar("cache_hits", ">=", None, f"share of groups in a cache of {_CACHE_SIZE}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRow:
    """How often a cache holds the groups that `age` forms."""

    machines: str
    num_groups: int
    mean_size: float
    hits: float  # of a cache of bounded size
    hits_unbounded: float


def run(*, quick: bool, console: Console) -> Result:
    setting, networks = (QUICK, ["local"]) if quick else (FULL, list(NETWORKS))
    rows = [row for network in networks for row in _measure(replace(setting, network=network))]
    _print_times(console, setting, rows)
    caches = [_cache_row(machines) for machines in _SLOW]
    _print_caches(console, caches)
    ratios = {
        f"{_OTHERS[method]}_vs_pairs_{size}": _versus_pairs(rows, "local", method, size)
        for size in setting.group_sizes
        for method in _IN_RATIOS
    }
    ratios["cache_hits"] = max(row.hits for row in caches)  # of the machines that suit a cache best
    print_bars(console, BARS, ratios, quick=quick)
    figures = _figures(rows, caches)
    return Result(bench="average", ratios=ratios, figures=figures, rows=[*rows, *caches])


def _measure(setting: AverageSetting) -> list[AverageRow]:
    names = (f"w{rank}" for rank in range(setting.num_workers))
    cluster = uniform_cluster(names, NETWORKS[setting.network], _BANDWIDTH)
    with Lab(cluster) as lab, WorkerPool(lab, work, setting, timeout=_TIMEOUT) as pool:
        rows: list[AverageRow] = pool.gather("averaging")[0]
    return rows


def _versus_pairs(rows: Sequence[AverageRow], network: str, method: str, size: int) -> float:
    """Return the median time of a method over that of pairs."""
    one, pairs = (
        median_of(rows, "seconds", network=network, method=each, group_size=size)
        for each in (method, PAIRS)
    )
    return one / pairs


def _cache_row(machines: str) -> CacheRow:
    scenario = Scenario(name=machines, seed=0, slow=(_SLOW[machines],))
    groups = list(groups_of_age(scenario, _NUM_WORKERS, duration=_STEPS))
    return CacheRow(
        machines=machines,
        num_groups=len(groups),
        mean_size=statistics.fmean(map(len, groups)),
        hits=hit_rate(groups, _CACHE_SIZE),
        hits_unbounded=hit_rate(groups, math.inf),
    )


def _figures(rows: Sequence[AverageRow], caches: Sequence[CacheRow]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for case in dict.fromkeys((r.network, r.method, r.group_size) for r in rows):
        network, method, size = case
        name = f"{network}_{_OTHERS.get(method, method)}"
        of_case = {"network": network, "method": method, "group_size": size}
        figures[f"{name}_{size}_ms"] = 1e3 * median_of(rows, "seconds", **of_case)
        if method != PAIRS:
            figures[f"{name}_vs_pairs_{size}"] = _versus_pairs(rows, *case)
    for row in caches:
        figures[f"cache_hits_{row.machines}"] = row.hits
        figures[f"cache_hits_{row.machines}_unbounded"] = row.hits_unbounded
    return figures


def _print_times(console: Console, setting: AverageSetting, rows: Sequence[AverageRow]) -> None:
    methods, networks = (PAIRS, *_OTHERS), dict.fromkeys(row.network for row in rows)
    ratios = (f"{name} / pairs" for name in _OTHERS.values())
    print_table(
        console,
        ["latency", "members", *(f"{method}, ms" for method in methods), *ratios],
        [
            [
                f"{1e3 * NETWORKS[network]:g} ms",
                f"{size}",
                *(
                    _quartiles(select(rows, network=network, method=method, group_size=size))
                    for method in methods
                ),
                *(f"{_versus_pairs(rows, network, method, size):.2f}" for method in _OTHERS),
            ]
            for network in networks
            for size in setting.group_sizes
        ],
        title=f"an average of {setting.buffer / 1e3:g} kB among {setting.num_workers} workers "
        f"until the last member has it: median (quartiles) of {setting.num_rounds} rounds",
    )


def _quartiles(rows: Sequence[AverageRow]) -> str:
    times = [1e3 * row.seconds for row in rows]
    if len(times) < 2:
        return f"{times[0]:.1f}"
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return f"{middle:.1f} ({low:.1f}-{high:.1f})"


def _print_caches(console: Console, rows: Sequence[CacheRow]) -> None:
    print_rows(
        console,
        rows,
        {
            "machines": lambda row: row.machines,
            "groups": lambda row: f"{row.num_groups:,}",
            "members": lambda row: f"{row.mean_size:.1f}",
            f"hits, {_CACHE_SIZE} kept": lambda row: f"{row.hits:.1%}",
            "hits, all kept": lambda row: f"{row.hits_unbounded:.1%}",
        },
        title="groups of `age` that a cache would hold",
    )
