"""The ratios of the benchmark of decoupled all-reduce, and the bar of each."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.decoupled.collectives import ALL_REDUCE, HalfRow
from benchmarks.decoupled.settings import DDP, FIRST_GUESS, FSDP2, NESTED, OURS, TUNED, Side
from benchmarks.decoupled.steps import Measured
from polyrhythm.types import Seconds

AT_MOST = ("bytes", "tuned", "state")  # where less is better
BARS: Mapping[str, float] = {
    "bytes": 1.02,
    "speed": 1.15,
    "of_theory": 0.90,
    "latency20_2": 1.20,
    "latency20_4": 1.30,
    "slow_backward": 0.97,
    "fsdp2": 1.8,
    "of_smax": 0.90,
    "tuned": 1.05,
    "state": 1.02 / 4,  # of four workers
}

Settings = Mapping[str, Measured]  # by name


def ratios_of(found: Settings) -> dict[str, float]:
    speed = found["speed"]
    return {
        "bytes": max(_bytes(m) for m in found.values() if m.setting.has(DDP)),
        "speed": speed.ratio(DDP, OURS),
        "of_theory": speed.ratio(DDP, OURS) / theory(speed),
        "latency20_2": found["latency20_2"].ratio(DDP, OURS),
        "latency20_4": found["latency20_4"].ratio(DDP, OURS),
        "slow_backward": found["slow_backward"].ratio(DDP, OURS),
        "fsdp2": speed.ratio(FSDP2, OURS),
        "of_smax": of_smax(speed),
        "tuned": found["tuned"].ratio(TUNED, OURS),
        "state": found["latency20_4"].state,
    }


def theory(measured: Measured) -> float:
    """Equation 8 over equation 7, of the network as it was measured."""
    return measured.times.coupled / measured.times.decoupled


def of_smax(measured: Measured) -> float:
    """The speedup of all workers over one, as a part of what equation 6 allows."""
    num_workers = measured.setting.num_workers
    times = measured.times
    speedup = num_workers * times.compute / measured.seconds(measured.best(OURS))
    return speedup / times.max_speedup(num_workers)


def first_guess(measured: Measured) -> float:
    """The step with the size that nobody has tuned, over the best of the grid."""
    return measured.side_ratio(Side(OURS, FIRST_GUESS).name, measured.best(OURS))


def layered(measured: Measured) -> Seconds:
    """What layers leave of equation 7, with the bucket that does best here.

    A first gradient has to be computed before anything can travel, and a last layer after it has.
    """
    buckets = {side.bucket for side in measured.setting.sides if side.kind == OURS}
    return min(measured.layered(bucket) for bucket in buckets if bucket is not None)


def figures(found: Settings, halves: Sequence[HalfRow]) -> dict[str, float]:
    """Beside the ratios: steps in seconds, the network as measured, sums that prove sanity."""
    figures: dict[str, float] = {}
    for name, measured in found.items():
        for side in dict.fromkeys(row.side for row in measured.rows):
            figures[f"{name}_{side.replace(' ', '_')}_s"] = measured.seconds(side)
        figures |= {f"{name}_{of}": figure for of, figure in _figures(measured).items()}
        figures[f"state_{measured.setting.num_workers}"] = measured.state
    for num_workers, size in dict.fromkeys((row.num_workers, row.size) for row in halves):
        for whose, what in dict.fromkeys((row.whose, row.what) for row in halves):
            ratio = to_all_reduce(halves, num_workers, size, whose, what)
            figures[f"halves_{num_workers}_{size}_{whose}_{what}"] = ratio
    return figures


def _figures(measured: Measured) -> dict[str, float]:
    figures = {"goodput_mbit": measured.goodput / 125e3, "difference": measured.difference}
    if measured.setting.has(DDP):
        figures["theory"] = theory(measured)
        figures["of_smax"] = of_smax(measured)
        figures["of_layered"] = layered(measured) / measured.seconds(measured.best(OURS))
        figures["bytes"] = _bytes(measured)
    if measured.setting.has(NESTED):
        figures["gain"] = measured.ratio(OURS, NESTED)
    if measured.tuned is not None:
        figures["trials"] = measured.tuned.num_trials
        figures["bucket_bytes"] = measured.tuned.found.bucket_bytes
        figures["first_guess"] = first_guess(measured)
    return figures


def to_all_reduce(
    rows: Sequence[HalfRow], num_workers: int, size: int, whose: str, what: str
) -> float:
    """How many times longer it takes: of medians."""
    return milliseconds(rows, num_workers, size, whose, what) / milliseconds(
        rows, num_workers, size, "gloo", ALL_REDUCE
    )


def milliseconds(
    rows: Sequence[HalfRow], num_workers: int, size: int, whose: str, what: str
) -> float:
    case = (num_workers, size, whose, what)
    return 1e3 * statistics.median(
        r.seconds for r in rows if (r.num_workers, r.size, r.whose, r.what) == case
    )


def verdict(name: str, measured: float) -> str:
    bar = BARS[name]
    reached = measured <= bar if name in AT_MOST else measured >= bar
    return "reached" if reached else "MISSED"


def _bytes(measured: Measured) -> float:
    return measured.wire_bytes(measured.best(OURS)) / measured.wire_bytes(measured.best(DDP))
