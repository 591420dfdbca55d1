"""Measuring: the sides of a setting in turns, round by round, over the setting's network.

All sides are there in the first round. After it, those that take clearly longer than the best of
their kind are left out: they could not become it.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polyrhythm.bench.decoupled.settings import ALONE, Setting, Side
from polyrhythm.bench.decoupled.worker import Compare, MeasureRate, Prepare, Run
from polyrhythm.bench.decoupled.workers import Workers
from polyrhythm.cost.decoupled import Ring, StepTimes
from polyrhythm.sync.fusion.layers import LayerTimes, by_bytes
from polyrhythm.sync.fusion.timeline import dear
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

_CONTENDERS = 1.05  # of the best of their kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Steps of one side in one round."""

    setting: str
    side: str
    kind: str
    round: int
    seconds: Seconds  # of a step
    wire_bytes: float  # that all workers together sent in a step, headers counted
    trouble: str | None  # why the emulated network was no good meanwhile, if it was not


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    setting: Setting
    rows: tuple[Row, ...]
    goodput: BytesPerSecond  # of a plain message
    state: float  # of AdamW, ours over DDP's, on the worker that has most
    difference: float  # of weights between sides, after the first round

    @property
    def times(self) -> StepTimes:
        """For the paper's bounds."""
        return self.setting.times(self.seconds(ALONE), self.goodput)

    def layered(self, bucket: Bytes) -> Seconds:
        """The bound of a decoupled step whose layers wait for their own buckets.

        Without latency: messages that are on their way together share it.
        """
        setting, times = self.setting, self.times
        layer = LayerTimes(
            size=setting.layer_bytes,
            forward=times.forward / setting.num_layers,
            backward=times.backward / setting.num_layers,
        )
        layers = [layer] * setting.num_layers
        buckets = by_bytes([layer.size] * setting.num_layers, bucket)
        ring = Ring(latency=0.0, bandwidth=self.goodput)
        return dear(layers, buckets, ring, setting.num_workers).seconds

    def best(self, kind: str) -> str:
        """The side of this kind that takes least: the median over rounds, of those in all."""
        last = max(row.round for row in self.rows)
        sides = [r.side for r in self.rows if r.kind == kind and r.round == last]
        return min(sides, key=self.seconds)

    def seconds(self, side: str) -> Seconds:
        return statistics.median(r.seconds for r in self.rows if r.side == side)

    def wire_bytes(self, side: str) -> float:
        return statistics.median(r.wire_bytes for r in self.rows if r.side == side)

    def ratio(self, kind: str, to: str) -> float:
        """How many times longer the best of a kind takes: the median over rounds of both."""
        one, other = (
            {r.round: r.seconds for r in self.rows if r.side == self.best(of)} for of in (kind, to)
        )
        return statistics.median(one[n] / other[n] for n in one.keys() & other.keys())


def measure(workers: Workers, setting: Setting) -> Measured:
    workers.set_fast_network()
    states = workers.ask(Prepare(setting))
    workers.set_network(setting.latency, setting.bandwidth, uplink=setting.uplink)
    # The fastest: TCP finds the bandwidth by and by.
    rates = [max(workers.ask(MeasureRate(setting.size // 2))) for _ in range(setting.num_rounds)]
    rows, difference = [], math.nan
    sides: Sequence[Side] = setting.sides
    for number in range(setting.num_rounds):
        for side in sides:
            rows.append(_run(workers, setting, side, number))
        if number == 0:
            difference = max(workers.ask(Compare()))
            sides = _contenders(sides, rows)
    return Measured(
        setting=setting,
        rows=tuple(rows),
        goodput=max(rates),
        state=_state_ratio(states),
        difference=difference,
    )


def _run(workers: Workers, setting: Setting, side: Side, number: int) -> Row:
    """The first step does not count: nothing of the one before is under way then."""
    num_steps = setting.num_steps + 1
    workers.report()
    ends = workers.ask(Run(side, num_steps))
    report = workers.report()
    first, last = (max(of[place] for of in ends) for place in (0, -1))
    return Row(
        setting=setting.name,
        side=side.name,
        kind=side.kind,
        round=number,
        seconds=(last - first) / setting.num_steps,
        wire_bytes=sum(pair.wire_bytes for pair in report.pairs) / num_steps,
        trouble=report.punctuality.trouble,
    )


def _contenders(sides: Iterable[Side], rows: Sequence[Row]) -> list[Side]:
    took = {row.side: row.seconds for row in rows}
    best = {row.kind: min(took[r.side] for r in rows if r.kind == row.kind) for row in rows}
    return [side for side in sides if took[side.name] <= _CONTENDERS * best[side.kind]]


def _state_ratio(states: Sequence[Mapping[str, int]]) -> float:
    return max(of["ours"] / of["ddp"] for of in states)
