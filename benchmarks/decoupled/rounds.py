"""Measure the sides of a setting in turns, round by round, over the setting's network.

The first round has all sides; later rounds only those that may still be the best of their kind.
Steps that the machine disturbed are repeated at the end of their round, a few times. On a machine
that is too busy there are fewer rounds, so that the benchmark ends in time.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.decoupled.settings import (
    DDP,
    FSDP2,
    NO_SYNC,
    OURS,
    TUNED,
    DecoupledSetting,
    DecoupledSide,
)
from benchmarks.decoupled.worker import work
from benchmarks.harness.network import WIRE_OVERHEAD, set_links, uniform_cluster
from benchmarks.harness.pool import WorkerPool
from benchmarks.harness.report import median_of, ratio_over_rounds, select
from benchmarks.harness.timing import MAX_STOLEN, StolenTime
from polyrhythm.describe.cluster import Cluster
from polyrhythm.lab.lab import Lab
from polyrhythm.sync.fusion.layers import LayerTimes, by_bytes
from polyrhythm.sync.fusion.tuner import FIRST, BucketCandidate
from polyrhythm.types import Bytes, BytesPerSecond, Seconds
from reproduction.dear.ring import Ring, StepTimes
from reproduction.dear.timeline import dear

_FAST: BytesPerSecond = 50e6
_FASTEST: BytesPerSecond = 300e6  # about as much as the switch carries
_SHORT: Seconds = 0.0002
_CALL_TIMEOUT: Seconds = 120.0
_TUNING_TIMEOUT: Seconds = 300.0
# A side continues if its step is at most so many times the best of its kind: the second limit after
# one round, when noise may have made the difference and connections are new; then the first, by
# medians; the next higher limit if the machine disturbed its last steps.
_LIMITS = (1.05, 1.15, 1.4)
_MIN_ROUNDS = 2
_NUM_STEPS = 2  # of a side in a round; the second counts
_TWO_ROUNDS = (NO_SYNC, FSDP2)  # kinds with one side, far from where a hundredth matters
_MAX_REPEATS, _MAX_REPEATS_OF_SIDE = 6, 2  # in a setting
_SMALL: Bytes = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledRow:
    """Steps of one side in one round."""

    setting: str
    side: str
    kind: str
    round: int
    seconds: Seconds  # of a step
    wire_bytes: float  # that all workers together sent in a step, with headers
    stolen: float  # share of the cores' time that the machine's host gave to others meanwhile
    trouble: str | None  # why the emulated network cannot be trusted, if so

    @property
    def doubt(self) -> str | None:
        """Why this row cannot be trusted; None if it can."""
        if self.stolen > MAX_STOLEN:
            return f"the host took {self.stolen:.0%} of the cores' time"
        return self.trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedBucket:
    """The candidate that tuning chose, and the number of trials before."""

    found: BucketCandidate
    num_trials: int

    @classmethod
    def of(cls, candidates: Sequence[BucketCandidate], first: BucketCandidate) -> "TunedBucket":
        """Read it off the candidates after each step; all trials have the same number of steps.

        The second trial has another candidate, so the first change shows that number.
        """
        num_steps = next(
            (n for n, candidate in enumerate(candidates, 1) if candidate != first), len(candidates)
        )
        return cls(found=candidates[-1], num_trials=round(len(candidates) / num_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSetting:
    setting: DecoupledSetting
    rows: tuple[DecoupledRow, ...]
    goodput: BytesPerSecond  # of a plain message
    state: float  # AdamW's, ours over DDP's, on the worker with the most
    difference: float  # of weights between sides, after the first round
    tuned: TunedBucket | None = None  # if a side tunes itself

    @property
    def times(self) -> StepTimes:
        """The measured times in the paper's bounds."""
        return self.setting.times(self.seconds(NO_SYNC), self.goodput)

    @property
    def layered(self) -> Seconds:
        """Return the bound of a decoupled step whose layers wait for their own buckets, the best.

        A first gradient must be computed before anything is sent, and a last layer after all
        arrived. Without latency: messages in flight at the same time share it.
        """
        setting, times = self.setting, self.times
        layer = LayerTimes(
            size=setting.layer_bytes,
            forward=times.forward / setting.num_layers,
            backward=times.backward / setting.num_layers,
        )
        layers = [layer] * setting.num_layers
        sizes = {side.bucket for side in setting.sides if side.kind == OURS}
        ring = Ring(latency=0.0, bandwidth=self.goodput)
        return min(
            dear(
                layers, by_bytes([layer.size] * len(layers), size), ring, setting.num_workers
            ).seconds
            for size in sizes
            if size is not None
        )

    def best(self, kind: str) -> str:
        """Return the fastest side of a kind in its last round, by medians over rounds."""
        rows = select(self.rows, kind=kind)
        last = max(row.round for row in rows)
        return min((row.side for row in rows if row.round == last), key=self.seconds)

    def seconds(self, side: str) -> Seconds:
        return median_of(self.rows, "seconds", side=side)

    def wire_bytes(self, side: str) -> float:
        return median_of(self.rows, "wire_bytes", side=side)

    def ratio(self, kind: str, to: str) -> float:
        """Return the step of one kind's best side over that of another's."""
        return ratio_over_rounds(self.rows, "seconds", self.best(kind), self.best(to))


def cluster(num_workers: int) -> Cluster:
    return uniform_cluster((f"w{rank}" for rank in range(num_workers)), _SHORT, _FAST)


class DecoupledPool(WorkerPool):
    """One worker per host of a lab, and the network between them."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab, work, timeout=_CALL_TIMEOUT, serves_orders=True)
        self.lab = lab

    def set_network(
        self,
        latency: Seconds,
        bandwidth: BytesPerSecond,
        *,
        uplink: bool = False,
        node_size: int = 1,
    ) -> None:
        """Set the `bandwidth` of TCP's payload; links inside a node are fast and short."""
        wire = bandwidth * WIRE_OVERHEAD
        self._set_uplink(wire if uplink else None, node_size)
        set_links(self.lab, latency, max(_FAST, 2 * wire) if uplink else wire)
        for pair in itertools.combinations(enumerate(self.lab.hosts), 2):
            (one, source), (other, target) = pair
            if one // node_size == other // node_size:
                set_links(self.lab, _SHORT, _FAST, between=(source, target))

    def set_fast_network(self) -> None:
        """For preparations, which take many messages and are not timed."""
        self._set_uplink(None)
        set_links(self.lab, _SHORT, _FASTEST)

    def _set_uplink(self, bandwidth: BytesPerSecond | None, node_size: int = 1) -> None:
        hosts = self.lab.hosts
        outside = [
            [
                self.lab.address(host)
                for other, host in enumerate(hosts)
                if other // node_size != rank // node_size
            ]
            for rank in range(len(hosts))
        ]
        self.call("set_uplink", bandwidth, outside)


def measure(
    pool: DecoupledPool, setting: DecoupledSetting, *, deadline: Seconds = math.inf
) -> MeasuredSetting:
    """Measure a setting; no round but the first ones starts after `deadline` (monotonic)."""
    pool.set_fast_network()
    states = pool.call("prepare", setting)
    pool.set_network(
        setting.latency, setting.bandwidth, uplink=setting.uplink, node_size=setting.node_size
    )
    sizes = _SMALL, setting.size // 2
    answers = pool.call("time_messages", sizes, setting.num_rounds, setting.latency)
    rate = goodput(sizes, *answers[0], most=setting.bandwidth)  # the same on all workers
    tuned = None
    if setting.has(TUNED):
        candidates = pool.call("tune", DecoupledSide(TUNED), timeout=_TUNING_TIMEOUT)[0]
        tuned = TunedBucket.of(candidates, BucketCandidate(FIRST))
    rows: list[DecoupledRow] = []
    difference, repeated = math.nan, Counter[str]()
    for number in range(setting.num_rounds):
        if number >= _MIN_ROUNDS and time.monotonic() > deadline:
            break
        sides = contenders(setting.sides, rows, number)
        latest = {side.name: _run(pool, setting, side, number) for side in sides}
        if number == 0:  # and before some sides have run more steps than others
            difference = max(pool.call("max_difference"))
        while (name := to_repeat(list(latest.values()), repeated)) is not None:
            if time.monotonic() > deadline:
                break
            repeated[name] += 1
            side = next(side for side in sides if side.name == name)
            latest[name] = better(latest[name], _run(pool, setting, side, number))
        rows += latest.values()
    return MeasuredSetting(
        setting=setting,
        rows=tuple(rows),
        goodput=rate,
        state=max(state[OURS] / state[DDP] for state in states),
        difference=difference,
        tuned=tuned,
    )


def contenders(
    sides: Sequence[DecoupledSide], rows: Sequence[DecoupledRow], number: int
) -> list[DecoupledSide]:
    """Return the sides of round `number`, given the rows of all rounds before."""
    if number == 0:
        return list(sides)
    latest = {row.side: row for row in select(rows, round=number - 1)}
    medians = {name: median_of(rows, "seconds", side=name) for name in latest}
    best = _best(medians, rows)

    def continues(side: DecoupledSide) -> bool:
        if side.name not in latest or (number > 1 and side.kind in _TWO_ROUNDS):
            return False
        leniency = (number == 1) + (latest[side.name].doubt is not None)
        return medians[side.name] <= _LIMITS[leniency] * best[side.kind]

    return [side for side in sides if continues(side)]


def to_repeat(latest: Sequence[DecoupledRow], repeated: Mapping[str, int]) -> str | None:
    """Return the side of a round to measure again: of the doubtful rows, the most promising."""
    if sum(repeated.values()) >= _MAX_REPEATS:
        return None
    best = _best({row.side: row.seconds for row in latest}, latest)
    doubtful = [
        row
        for row in latest
        if row.doubt is not None and repeated.get(row.side, 0) < _MAX_REPEATS_OF_SIDE
    ]
    return min(doubtful, key=lambda r: r.seconds / best[r.kind]).side if doubtful else None


def better(one: DecoupledRow, other: DecoupledRow) -> DecoupledRow:
    """Return the row without a doubt; else the shorter one, since noise only adds time."""
    return min(one, other, key=lambda row: (row.doubt is not None, row.seconds))


def _best(times: Mapping[str, Seconds], rows: Sequence[DecoupledRow]) -> dict[str, Seconds]:
    """Return the shortest time of each kind."""
    kinds = {row.side: row.kind for row in rows}
    return {
        kind: min((s for side, s in times.items() if kinds[side] == kind), default=math.inf)
        for kind in set(kinds.values())
    }


def _run(
    pool: DecoupledPool, setting: DecoupledSetting, side: DecoupledSide, number: int
) -> DecoupledRow:
    """Time the second of two steps: in the first, no message of a step before is in flight."""
    pool.lab.report(reset=True)
    stolen = StolenTime()
    ends = pool.call("run", side, _NUM_STEPS)
    share, report = stolen.share(), pool.lab.report(reset=True)
    first, last = map(max, zip(*ends, strict=True))
    return DecoupledRow(
        setting=setting.name,
        side=side.name,
        kind=side.kind,
        round=number,
        seconds=last - first,
        wire_bytes=sum(pair.wire_bytes for pair in report.pairs) / _NUM_STEPS,
        stolen=share,
        trouble=report.switch_timing.trouble,
    )


def goodput(
    sizes: tuple[Bytes, Bytes],
    small: Sequence[Seconds],
    large: Sequence[Seconds],
    *,
    most: BytesPerSecond,
) -> BytesPerSecond:
    """Return the bandwidth that messages of two sizes show, without the fixed part of their time.

    By the fastest of each: noise only adds time, and TCP finds the bandwidth gradually. At `most`
    the described one, which noise in the small messages could exceed.
    """
    longer = min(large) - min(small)
    rate = (sizes[1] - sizes[0]) / longer if longer > 0 else math.inf
    return min(rate, most)
