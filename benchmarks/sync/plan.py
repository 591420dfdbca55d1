"""The settings that are measured, for how long, and small versions that only show that it runs.

Prague's "5x slowdown" (one worker takes six times as long), SDPipe's setting B (random sleeps) with
data-parallel workers and with a grid of pipelines, equal machines, and SDPipe's recorded trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.sync.settings import (
    ADAPTIVE,
    ADAPTIVE_OVERLAP,
    AGE,
    AGE_OVERLAP,
    ALL_REDUCE,
    BALANCED,
    BANDWIDTH,
    LATENCY,
    NOBODY,
    PAIRWISE,
    SMART,
    SSP,
    STATIC,
    Setting,
    Side,
    device_name,
    hetpipe,
    with_slack,
)
from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.types import Seconds

SLOW_WORKER, SLOWDOWN = 5, 6.0
ALL_REDUCE_SHARE = 0.1  # of a step, in `homogeneous`


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    settings: tuple[Setting, ...]
    num_workers: int
    num_stages: int
    num_lanes: int


def _twice(*sides: Side) -> tuple[Side, ...]:
    """Sides whose ratio matters are measured in two rounds."""
    return tuple(replace(side, num_rounds=2) for side in sides)


def _one_slow(num_workers: int) -> Scenario:
    device = device_name(SLOW_WORKER % num_workers)
    return Scenario(name="one slow", slow=(Slow(device=device, factor=SLOWDOWN),))


def _compressed_trace(start: Seconds, duration: Seconds) -> Scenario:
    """All of SDPipe's nine hours within `duration`."""
    played = Slow(
        device=EVERY_DEVICE,
        trace="sdpipe_16gpu",
        trace_duration=duration,
        start=start,
        until=start + duration,
    )
    return Scenario(name="trace", slow=(played,))


def _grid_sides(num_stages: int) -> tuple[Side, ...]:
    return (
        *_twice(ALL_REDUCE, AGE_OVERLAP, ADAPTIVE_OVERLAP, NOBODY),
        AGE,
        ADAPTIVE,
        with_slack(AGE_OVERLAP, num_stages),
        with_slack(ADAPTIVE_OVERLAP, num_stages),
        PAIRWISE,
        hetpipe(num_stages),
    )


DP5X = Setting(
    name="dp5x",
    scenario=_one_slow(16),
    sides=(*_twice(ALL_REDUCE, SMART, AGE, ADAPTIVE, BALANCED), PAIRWISE, SSP),
    warm_up=1.2,
    measured=4.8,
)
DP_B = Setting(
    name="dp_b",
    scenario=Scenario.load("sdpipe_b"),
    sides=(*_twice(ALL_REDUCE, AGE, ADAPTIVE), AGE_OVERLAP, PAIRWISE, SSP),
    warm_up=2.0,
    measured=14.0,
    num_lanes=3,
)
GRID_B = Setting(
    name="grid_b",
    scenario=Scenario.load("sdpipe_b"),
    sides=_grid_sides(4),
    warm_up=4.0,
    measured=14.0,
    num_stages=4,
    num_lanes=3,
    learning_rate=0.05,  # at 0.1, gradients that are 15 steps old make this quadratic unstable
)
HOMOGENEOUS = Setting(
    name="homogeneous",
    scenario=Scenario(name="equal machines"),
    sides=_twice(ALL_REDUCE, NOBODY, ADAPTIVE_OVERLAP, STATIC, SMART),
    warm_up=1.0,
    measured=2.0,
    num_floats=20_000,
    latency=0.004,
    bandwidth=25e6,
)
TRACE16 = Setting(
    name="trace16",
    scenario=_compressed_trace(1.2, 18.0),
    sides=_twice(ALL_REDUCE, AGE, AGE_OVERLAP),
    warm_up=1.2,
    measured=18.0,
    num_lanes=3,
)
FULL_PLAN = Plan(
    settings=(DP5X, DP_B, GRID_B, HOMOGENEOUS, TRACE16), num_workers=16, num_stages=4, num_lanes=3
)


def quick_plan() -> Plan:
    """Four workers, steps of some milliseconds, and all sides of a setting at once."""
    settings = tuple(_quick(setting) for setting in FULL_PLAN.settings)
    return Plan(settings=settings, num_workers=4, num_stages=2, num_lanes=4)


def _quick(setting: Setting) -> Setting:
    warm_up, measured = 0.05, 0.2
    sides: Sequence[Side] = setting.sides if setting.num_stages == 1 else _grid_sides(2)
    scenario = {"dp5x": _one_slow(4), "trace16": _compressed_trace(warm_up, measured)}
    return replace(
        setting,
        scenario=scenario.get(setting.name, setting.scenario),
        sides=tuple(replace(side, num_rounds=1) for side in sides),
        warm_up=warm_up,
        measured=measured,
        forward=0.004,
        backward=0.008,
        num_stages=min(setting.num_stages, 2),
        num_workers=4,
        num_floats=2000,
        num_lanes=4,
        latency=LATENCY,
        bandwidth=BANDWIDTH,
    )


def calibrated(setting: Setting, all_reduce: Seconds) -> Setting:
    """With compute to which one all-reduce adds its share of a step, and time for some steps."""
    step = all_reduce / ALL_REDUCE_SHARE
    compute = step - all_reduce
    return replace(
        setting,
        forward=compute / 3,
        backward=2 * compute / 3,
        warm_up=1.3 * step,  # the end is to fall into a step, not on its edge
        measured=5.2 * step,
    )
