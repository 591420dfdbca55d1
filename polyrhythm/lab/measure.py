"""Measure a lab against its description: one pair of hosts, several at once, or every pair.

Each link carries one measurement at a time; pairs are measured concurrently only within the
switch's capacity. A measurement during which the switch delivered packets late is repeated. A
result that the switch may have limited is marked with a doubt.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from polyrhythm.describe.cluster import Cluster, Link
from polyrhythm.describe.pairs import round_robin_pairs
from polyrhythm.lab.agent import MeasureWindow
from polyrhythm.lab.commands import SwitchTiming
from polyrhythm.lab.lab import SWITCH_LIMIT, Lab
from polyrhythm.lab.meter import NUM_ECHOES, Meter, Pair, described_round_trip
from polyrhythm.types import BytesPerSecond, Seconds

MIN_GOODPUT = 0.92  # of the described bandwidth; a link with less is not as described
MAX_ATTEMPTS = 3  # at a measurement, while the switch is late

Value = TypeVar("Value")
_Figures = tuple[list[Seconds], list[BytesPerSecond]]  # round trips and goodput of a round's pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCheck:
    """One direction between two hosts: described and measured."""

    source: str
    target: str
    link: Link
    described_round_trip: Seconds
    round_trip: Seconds
    goodput: BytesPerSecond  # with headers
    doubt: str | None  # why the switch, not the link, may have limited the result

    @property
    def goodput_error(self) -> float:
        """Relative error; negative if the goodput is too low."""
        return self.goodput / self.link.bandwidth - 1

    @property
    def round_trip_error(self) -> Seconds:
        return self.round_trip - self.described_round_trip


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCheck:
    rows: tuple[PairCheck, ...]
    switch_timing: SwitchTiming  # worst values over the accepted rounds
    num_rejected: int  # rounds repeated because the switch was late


def round_trip(lab: Lab, a: str, b: str, *, num_echoes: int = NUM_ECHOES) -> Seconds:
    """Return the median round trip of small UDP echoes. Raises PeerError."""
    with Meter(lab) as meter:
        return meter.round_trips([(a, b)], num_echoes)[0]


def goodput(
    lab: Lab, pairs: Sequence[Pair], window: MeasureWindow | None = None
) -> list[BytesPerSecond]:
    """Measure TCP from a to b of each pair concurrently, with headers. Raises PeerError."""
    with Meter(lab) as meter:
        return meter.goodput(pairs, window)


def check_pairs(
    lab: Lab, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> LinkCheck:
    """Measure every ordered pair, calling `on_progress(done, total)` after each round.

    Raises PeerError if a host cannot be reached.
    """
    batches = list(measurement_batches(lab.cluster))
    rows: list[PairCheck] = []
    rounds: list[TimedRounds[_Figures]] = []
    with Meter(lab) as meter:
        for pairs in batches:
            on_progress(len(rounds), len(batches))
            rounds.append(rounds_on_time(lab, partial(_figures, lab.cluster, meter, pairs)))
            rows += _rows(lab.cluster, pairs, rounds[-1])
    on_progress(len(rounds), len(batches))
    index = {host: number for number, host in enumerate(lab.hosts)}
    return LinkCheck(
        rows=tuple(sorted(rows, key=lambda row: (index[row.source], index[row.target]))),
        switch_timing=_worst([found.switch_timing for found in rounds]),
        num_rejected=sum(found.num_rejected for found in rounds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRounds(Generic[Value]):
    """The values of all rounds on time; if every round was late, the last one and `trouble`."""

    values: list[Value]
    switch_timing: SwitchTiming  # of the last round
    num_rejected: int  # rounds not in `values`, because the switch was late
    trouble: str | None  # why the value is unreliable, if every round was late


def rounds_on_time(
    lab: Lab,
    work: Callable[[], Value],
    *,
    num_rounds: int = 1,
    max_attempts: int = MAX_ATTEMPTS,
    deadline: Seconds = math.inf,
) -> TimedRounds[Value]:
    """Repeat `work` until `num_rounds` rounds were on time, or for `max_attempts` rounds in all.

    After `deadline` (time.monotonic()) no further round starts.
    """
    values: list[Value] = []
    late: list[Value] = []
    while True:
        lab.report(reset=True)
        value = work()
        switch_timing = lab.report().switch_timing
        (values if switch_timing.trouble is None else late).append(value)
        enough = len(values) == num_rounds or len(values) + len(late) == max_attempts
        if enough or time.monotonic() >= deadline:
            break
    return TimedRounds(
        values=values or late[-1:],
        switch_timing=switch_timing,
        num_rejected=len(late) if values else len(late) - 1,
        trouble=None if values else switch_timing.trouble,
    )


def measurement_batches(cluster: Cluster) -> Iterator[list[Pair]]:
    """Yield every ordered pair once, in batches within the capacity of hosts and switch."""
    for matching in round_robin_pairs([device.name for device in cluster.devices]):
        batch: list[Pair] = []
        traffic: BytesPerSecond = 0.0
        for pair in matching:
            bandwidth = cluster.link(*pair).bandwidth
            if batch and traffic + bandwidth > SWITCH_LIMIT:
                yield batch
                batch, traffic = [], 0.0
            batch.append(pair)
            traffic += bandwidth
        yield batch


def _figures(cluster: Cluster, meter: Meter, pairs: list[Pair]) -> _Figures:
    """Measure a batch; if a goodput is low, measure again and take the higher value per pair.

    A flow can stall by itself while TCP recovers from a loss.
    """
    round_trips, goodput = meter.round_trips(pairs), meter.goodput(pairs)
    described = [cluster.link(*pair).bandwidth for pair in pairs]
    if any(rate < MIN_GOODPUT * full for rate, full in zip(goodput, described, strict=True)):
        goodput = list(map(max, goodput, meter.goodput(pairs)))
    return round_trips, goodput


def _rows(cluster: Cluster, pairs: list[Pair], found: TimedRounds[_Figures]) -> Iterator[PairCheck]:
    for (a, b), measured_round_trip, carried in zip(pairs, *found.values[0], strict=True):
        link = cluster.link(a, b)
        exceeds_switch = link.bandwidth > SWITCH_LIMIT and carried < MIN_GOODPUT * link.bandwidth
        yield PairCheck(
            source=a,
            target=b,
            link=link,
            described_round_trip=described_round_trip(cluster, (a, b)),
            round_trip=measured_round_trip,
            goodput=carried,
            doubt="more than the switch carries" if exceeds_switch else found.trouble,
        )


def _worst(timings: Sequence[SwitchTiming]) -> SwitchTiming:
    return SwitchTiming(
        late_p50=max((timing.late_p50 for timing in timings), default=0.0),
        late_p99=max((timing.late_p99 for timing in timings), default=0.0),
        late_max=max((timing.late_max for timing in timings), default=0.0),
        busy=max((timing.busy for timing in timings), default=0.0),
    )
