"""Measuring: the sides of a setting in turns, round by round, over the setting's network.

All sides are there in the first round; then those that may still be the best of their kind, of
which each round knows more. Steps that the machine disturbed are taken again at the end of their
round, a few times. On a machine that is too busy there are fewer rounds, and the end is in time.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.decoupled.settings import ALONE, FSDP2, TUNED, Setting, Side
from benchmarks.decoupled.steps import Measured, Row, Tuned, goodput
from benchmarks.decoupled.stolen import CpuSteal
from benchmarks.decoupled.worker import Compare, Prepare, Run, TimeMessages, Tune
from benchmarks.decoupled.workers import Workers
from polyrhythm.sync.fusion.tuner import FIRST, BucketCandidate
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

# How many times longer than the best of its kind a side may take and go on: after one round, noise
# may have made the difference, and connections are new; then, by medians. If in doubt, the next.
_LIMITS = (1.05, 1.15, 1.4)
_LEAST_ROUNDS = 2
_BRIEF = (ALONE, FSDP2)  # with nothing to choose among, and far from where a hundredth matters
_REPEATS, _REPEATS_OF_SIDE = 6, 2  # at most, in a setting
_SMALL: Bytes = 65_536
_TUNING: Seconds = 300.0  # patience


def measure(workers: Workers, setting: Setting, *, until: Seconds = math.inf) -> Measured:
    """`until`: of time.monotonic(), when to come to an end; the first rounds come in any case."""
    workers.set_fast_network()
    states = workers.ask(Prepare(setting))
    workers.set_network(
        setting.latency, setting.bandwidth, uplink=setting.uplink, node_size=setting.node_size
    )
    rate = _rate(workers, setting)
    tuned = _tune(workers) if setting.has(TUNED) else None
    rows: list[Row] = []
    difference, repeated = math.nan, Counter[str]()
    for number in range(setting.num_rounds):
        if number >= _LEAST_ROUNDS and time.monotonic() > until:
            break
        sides = contenders(setting.sides, rows, number)
        latest = {side.name: _run(workers, setting, side, number) for side in sides}
        if number == 0:  # and before some have made more steps than others
            difference = max(workers.ask(Compare()))
        while (name := to_repeat(list(latest.values()), repeated)) is not None:
            if time.monotonic() > until:
                break
            repeated[name] += 1
            side = next(side for side in sides if side.name == name)
            latest[name] = better(latest[name], _run(workers, setting, side, number))
        rows += latest.values()
    return Measured(
        setting=setting,
        rows=tuple(rows),
        goodput=rate,
        state=_state_ratio(states),
        difference=difference,
        tuned=tuned,
    )


def contenders(sides: Sequence[Side], rows: Sequence[Row], number: int) -> list[Side]:
    """Those of the round with this number, given the rows of all rounds before."""
    if number == 0:
        return list(sides)
    latest = {row.side: row for row in rows if row.round == number - 1}
    took = {
        name: statistics.median(row.seconds for row in rows if row.side == name) for name in latest
    }
    best = _best(took, rows)

    def goes_on(side: Side) -> bool:
        if side.name not in latest or (number > 1 and side.kind in _BRIEF):
            return False
        leniency = (number == 1) + (latest[side.name].doubt is not None)
        return took[side.name] <= _LIMITS[leniency] * best[side.kind]

    return [side for side in sides if goes_on(side)]


def to_repeat(latest: Sequence[Row], repeated: Mapping[str, int]) -> str | None:
    """Of the rows of a round, the side to measure again: of those in doubt, the most promising."""
    if sum(repeated.values()) >= _REPEATS:
        return None
    best = _best({row.side: row.seconds for row in latest}, latest)
    doubtful = [
        row
        for row in latest
        if row.doubt is not None and repeated.get(row.side, 0) < _REPEATS_OF_SIDE
    ]
    return min(doubtful, key=lambda r: r.seconds / best[r.kind]).side if doubtful else None


def better(one: Row, other: Row) -> Row:
    """The one to trust; of two that are alike, the shorter: noise only adds."""
    return min(one, other, key=lambda row: (row.doubt is not None, row.seconds))


def _best(took: Mapping[str, Seconds], rows: Sequence[Row]) -> dict[str, Seconds]:
    """Of each kind."""
    kinds = {row.side: row.kind for row in rows}
    return {
        kind: min((s for side, s in took.items() if kinds[side] == kind), default=math.inf)
        for kind in set(kinds.values())
    }


def _run(workers: Workers, setting: Setting, side: Side, number: int) -> Row:
    """The first step does not count: nothing of the one before is under way then."""
    num_steps = setting.num_steps + 1
    workers.report()
    stolen = CpuSteal()
    ends = workers.ask(Run(side, num_steps))
    share, report = stolen.share(), workers.report()
    first, last = (max(of[place] for of in ends) for place in (0, -1))
    return Row(
        setting=setting.name,
        side=side.name,
        kind=side.kind,
        round=number,
        seconds=(last - first) / setting.num_steps,
        wire_bytes=sum(pair.wire_bytes for pair in report.pairs) / num_steps,
        stolen=share,
        trouble=report.switch_timing.trouble,
    )


def _rate(workers: Workers, setting: Setting) -> BytesPerSecond:
    sizes = _SMALL, setting.size // 2
    answers = workers.ask(TimeMessages(sizes, setting.num_rounds, setting.latency))
    small, large = answers[0]  # all have the same
    return goodput(sizes, small, large, most=setting.bandwidth)


def _tune(workers: Workers) -> Tuned:
    candidates = workers.ask(Tune(Side(TUNED)), _TUNING)[0]
    return Tuned.of(candidates, BucketCandidate(FIRST))


def _state_ratio(states: Sequence[Mapping[str, int]]) -> float:
    return max(of["ours"] / of["ddp"] for of in states)
