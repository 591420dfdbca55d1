"""The ratios of the synchronisation benchmark: which side against which, where, and the bar."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.sync.figures import Row
from benchmarks.sync.settings import (
    ADAPTIVE,
    ADAPTIVE_OVERLAP,
    AGE,
    AGE_OVERLAP,
    ALL_REDUCE,
    BALANCED,
    NOBODY,
    SMART,
    STATIC,
    Side,
    with_slack,
)

MOST_GRADIENT_ERROR = 1e-6
AT_MOST = ("scheduler_p99_ms",)  # where less is better


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of the throughput of the best of `sides` to that of `other`."""

    setting: str
    sides: tuple[str, ...]
    other: str
    bar: float


def _ratio(setting: str, sides: Sequence[Side], other: Side, bar: float) -> Ratio:
    return Ratio(setting, tuple(side.name for side in sides), other.name, bar)


_GROUPS = (AGE, ADAPTIVE, AGE_OVERLAP, ADAPTIVE_OVERLAP)
_SLACK = [with_slack(side, 1) for side in _GROUPS]  # by name alone

RATIOS: Mapping[str, Ratio] = {
    "dp5x_smart": _ratio("dp5x", [SMART], ALL_REDUCE, 4.3),
    "dp5x_age": _ratio("dp5x", [AGE], ALL_REDUCE, 4.3),
    "dp5x_adaptive": _ratio("dp5x", [ADAPTIVE], ALL_REDUCE, 3.0),
    "dp5x_balanced": _ratio("dp5x", [BALANCED], ALL_REDUCE, 5.0),
    "dp_b": _ratio("dp_b", _GROUPS, ALL_REDUCE, 2.2),
    "grid_b": _ratio("grid_b", _GROUPS, ALL_REDUCE, 1.25),
    "grid_b_vs_nosync": _ratio("grid_b", _GROUPS, NOBODY, 0.85),
    "grid_b_combined": _ratio("grid_b", _SLACK, ALL_REDUCE, 1.65),
    "homogeneous": _ratio("homogeneous", [ADAPTIVE_OVERLAP, STATIC, SMART], ALL_REDUCE, 1.03),
    "homogeneous_vs_nosync": _ratio("homogeneous", [ADAPTIVE_OVERLAP, STATIC, SMART], NOBODY, 0.92),
    "trace16": _ratio("trace16", [AGE], ALL_REDUCE, 2.1),
    "trace16_overlap": _ratio("trace16", [AGE_OVERLAP], ALL_REDUCE, 2.3),
}
BARS: Mapping[str, float] = {
    **{name: ratio.bar for name, ratio in RATIOS.items()},
    "scheduler_per_s": 10_000,
    "scheduler_p99_ms": 10,
}


def speed(rows: Sequence[Row], setting: str, side: str) -> float:
    """Samples per second: the median over rounds."""
    return statistics.median(
        row.samples_per_s for row in rows if (row.setting, row.side) == (setting, side)
    )


def ratio_to(rows: Sequence[Row], setting: str, side: str, other: str) -> float:
    """Of two throughputs: the median over the rounds, with a seed each, that both were in."""
    speeds = {(r.side, r.round): r.samples_per_s for r in rows if r.setting == setting}
    return statistics.median(
        fast / speeds[other, number]
        for (name, number), fast in speeds.items()
        if name == side and (other, number) in speeds
    )


def best(rows: Sequence[Row], ratio: Ratio) -> str:
    """The side with the highest ratio, of those that were measured."""
    measured = {row.side for row in rows if row.setting == ratio.setting}
    candidates = [side for side in ratio.sides if side in measured]
    return max(candidates, key=lambda side: ratio_to(rows, ratio.setting, side, ratio.other))


def ratios_of(rows: Sequence[Row]) -> dict[str, float]:
    return {
        name: ratio_to(rows, ratio.setting, best(rows, ratio), ratio.other)
        for name, ratio in RATIOS.items()
    }


def distance(rows: Sequence[Row], setting: str, side: str) -> float:
    """Of the models at the end: the median over rounds."""
    return statistics.median(
        row.consensus_distance for row in rows if (row.setting, row.side) == (setting, side)
    )


def gradient_error(rows: Sequence[Row]) -> float:
    """Of `balanced`, in all settings and rounds."""
    return max(row.gradient_error for row in rows)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Of every side in every setting, its throughput and the distance of its models."""
    found = {"dp5x_balanced_gradient_error": gradient_error(rows)}
    for setting, side in dict.fromkeys((row.setting, row.side) for row in rows):
        name = f"{setting}_{side}".replace(", ", "_").replace(" ", "_")
        found[f"{name}_samples_per_s"] = speed(rows, setting, side)
        found[f"{name}_distance"] = distance(rows, setting, side)
    return found


def verdict(name: str, measured: float) -> str:
    bar = BARS[name]
    reached = measured <= bar if name in AT_MOST else measured >= bar
    return "reached" if reached else "MISSED"
