"""The sync policies that are compared, and the settings in which they are measured.

Prague's "5x slowdown" (one worker takes six times as long), SDPipe's setting B (random sleeps) with
data-parallel workers and with a grid of pipelines, equal machines, and SDPipe's recorded trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.sync.modes import SYNC_MODES, SyncMode
from polyrhythm.types import BytesPerSecond, Seconds

MICROBATCHES_PER_WORKER = 16  # of one sample each, in a step
LAST_GROUPS, MAX_AGE, STALENESS = 10, 10, 4
LATENCY: Seconds = 0.0002
BANDWIDTH: BytesPerSecond = 125e6
_SLOW_WORKER, _SLOWDOWN = 5, 6.0
_ALL_REDUCE_SHARE = 0.1  # of a step, in `homogeneous`


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSide:
    """A sync policy and, in a grid, how its pipelines run."""

    name: str
    policy: str | None  # None: no synchronisation
    options: Mapping[str, object] = field(default_factory=dict)
    overlap: bool = False
    schedule: str = "1f1b"
    flush: bool = False
    num_microbatches: int = 1  # of a step, with a flush
    num_rounds: int = 1

    @property
    def mode(self) -> SyncMode | None:
        """Return the sync mode; None for an unknown one, which GroupSync refuses."""
        return None if self.policy is None else SYNC_MODES.get(self.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSetting:
    """`forward` and `backward`: one step's compute of a worker that nothing slows."""

    name: str
    scenario: Scenario
    sides: tuple[SyncSide, ...]
    warm_up: Seconds
    measured: Seconds
    forward: Seconds = 0.1
    backward: Seconds = 0.2
    num_stages: int = 1
    num_workers: int = 16  # of all stages
    num_floats: int = 2000  # the weights of a worker
    learning_rate: float = 0.1
    num_lanes: int = 1  # sides that run at the same time, on hosts of their own
    latency: Seconds = LATENCY
    bandwidth: BytesPerSecond = BANDWIDTH

    @property
    def num_pipelines(self) -> int:
        return self.num_workers // self.num_stages

    @property
    def step(self) -> Seconds:
        return self.forward + self.backward

    @property
    def length(self) -> Seconds:
        return self.warm_up + self.measured

    def samples_per_step(self, side: SyncSide) -> int:
        return MICROBATCHES_PER_WORKER * side.num_microbatches

    def seeded(self, seed: int) -> "SyncSetting":
        return replace(self, scenario=replace(self.scenario, seed=seed))

    def calibrated(self, all_reduce: Seconds) -> "SyncSetting":
        """Set the compute so that one all-reduce takes its share of a step; measure some steps."""
        step = all_reduce / _ALL_REDUCE_SHARE
        compute = step - all_reduce
        return replace(
            self,
            forward=compute / 3,
            backward=2 * compute / 3,
            warm_up=1.3 * step,  # the end must fall into a step, not on its edge
            measured=5.2 * step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSuite:
    settings: tuple[SyncSetting, ...]
    num_workers: int
    num_stages: int
    num_lanes: int


def device_name(rank: int) -> str:
    return f"w{rank}"


ALL_REDUCE = SyncSide(name="all_reduce", policy="all_reduce")
SMART = SyncSide(name="smart", policy="smart")
AGE = SyncSide(name="age", policy="age", options={"max_age": MAX_AGE})
AGE_OVERLAP = replace(AGE, name="age, overlap", overlap=True)
ADAPTIVE = SyncSide(name="adaptive", policy="adaptive", options={"last_groups": LAST_GROUPS})
ADAPTIVE_OVERLAP = replace(ADAPTIVE, name="adaptive, overlap", overlap=True)
BALANCED = SyncSide(name="balanced", policy="balanced")
STATIC = SyncSide(name="static", policy="static")
PAIRWISE = SyncSide(name="pairwise", policy="pairwise")
SSP = SyncSide(name="ssp", policy="ssp", options={"staleness": STALENESS})
NO_SYNC = SyncSide(name="none", policy=None)


def _with_slack(side: SyncSide, num_stages: int) -> SyncSide:
    """Give a side four times 1F1B's batches in flight."""
    limits = ",".join(str(4 * (num_stages - stage)) for stage in range(num_stages))
    return replace(side, name=f"{side.name}, slack", schedule=f"bounded:{limits}")


def _hetpipe(num_stages: int) -> SyncSide:
    """A pipeline is one virtual worker: flushed inside, in waves of a mini-batch per stage."""
    return SyncSide(
        name="hetpipe",
        policy="ssp",
        options={"staleness": num_stages},
        flush=True,
        num_microbatches=num_stages,
    )


def _twice(*sides: SyncSide) -> tuple[SyncSide, ...]:
    """Measure the sides of a ratio in two rounds."""
    return tuple(replace(side, num_rounds=2) for side in sides)


def _one_slow(num_workers: int) -> Scenario:
    device = device_name(_SLOW_WORKER % num_workers)
    return Scenario(name="one slow", slow=(Slow(device=device, factor=_SLOWDOWN),))


def _compressed_trace(start: Seconds, duration: Seconds) -> Scenario:
    """Play all of SDPipe's nine hours within `duration`."""
    played = Slow(
        device=EVERY_DEVICE,
        trace="sdpipe_16gpu",
        trace_duration=duration,
        start=start,
        until=start + duration,
    )
    return Scenario(name="trace", slow=(played,))


def _grid_sides(num_stages: int) -> tuple[SyncSide, ...]:
    return (
        *_twice(ALL_REDUCE, AGE_OVERLAP, ADAPTIVE_OVERLAP, NO_SYNC),
        AGE,
        ADAPTIVE,
        _with_slack(AGE_OVERLAP, num_stages),
        _with_slack(ADAPTIVE_OVERLAP, num_stages),
        PAIRWISE,
        _hetpipe(num_stages),
    )


DP5X = SyncSetting(
    name="dp5x",
    scenario=_one_slow(16),
    sides=(*_twice(ALL_REDUCE, SMART, AGE, ADAPTIVE, BALANCED), PAIRWISE, SSP),
    forward=0.2,  # at half of this, 50 steps a second of all workers competed for two cores
    backward=0.4,
    warm_up=7.2,  # two steps of the straggler: `adaptive` learns its window from arrivals
    measured=10.8,
    num_lanes=2,
)
DP_B = SyncSetting(
    name="dp_b",
    scenario=Scenario.load("sdpipe_b"),
    sides=(*_twice(ALL_REDUCE, AGE, ADAPTIVE), AGE_OVERLAP, PAIRWISE, SSP),
    warm_up=2.0,
    measured=14.0,
    num_lanes=3,
)
GRID_B = SyncSetting(
    name="grid_b",
    scenario=Scenario.load("sdpipe_b"),
    sides=_grid_sides(4),
    warm_up=4.0,
    measured=14.0,
    num_stages=4,
    num_lanes=3,
    learning_rate=0.05,  # at 0.1, gradients that are 15 steps old make this quadratic unstable
)
HOMOGENEOUS = SyncSetting(
    name="homogeneous",
    scenario=Scenario(name="equal machines"),
    sides=_twice(ALL_REDUCE, NO_SYNC, ADAPTIVE_OVERLAP, STATIC, SMART),
    warm_up=1.0,
    measured=2.0,
    num_floats=20_000,
    latency=0.004,
    bandwidth=25e6,
)
TRACE16 = SyncSetting(
    name="trace16",
    scenario=_compressed_trace(1.2, 18.0),
    sides=_twice(ALL_REDUCE, AGE, AGE_OVERLAP),
    warm_up=1.2,
    measured=18.0,
    num_lanes=3,
)
FULL_SUITE = SyncSuite(
    settings=(DP5X, DP_B, GRID_B, HOMOGENEOUS, TRACE16), num_workers=16, num_stages=4, num_lanes=3
)


def quick_suite() -> SyncSuite:
    """Return a suite of four workers, steps of some milliseconds, and four sides at once."""
    settings = tuple(_quick(setting) for setting in FULL_SUITE.settings)
    return SyncSuite(settings=settings, num_workers=4, num_stages=2, num_lanes=4)


def _quick(setting: SyncSetting) -> SyncSetting:
    warm_up, measured = 0.05, 0.2
    sides = setting.sides if setting.num_stages == 1 else _grid_sides(2)
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
