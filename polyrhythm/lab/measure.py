"""Measure a lab against its description: one pair of hosts, several at once, or every pair.

Every pair is measured alone on its link, and next to others only as long as the switch carries
them with ease. What it cannot carry is told apart from a link that is not as described.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from polyrhythm.describe.cluster import Cluster, Link
from polyrhythm.describe.pairs import round_robin_pairs
from polyrhythm.lab.commands import SwitchTiming
from polyrhythm.lab.lab import SWITCH_LIMIT, Lab
from polyrhythm.lab.meter import (
    NUM_ECHOES,
    MeasureWindow,
    Meter,
    Pair,
    described_round_trip,
)
from polyrhythm.lab.timing import TimedRounds, rounds_on_time
from polyrhythm.types import BytesPerSecond, Seconds

MIN_GOODPUT = 0.92  # of the described bandwidth: less is no longer as described

_Figures = tuple[list[Seconds], list[BytesPerSecond]]  # round trips and goodput of a round's pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCheck:
    """One direction between two hosts, as described and as measured."""

    source: str
    target: str
    link: Link
    described_round_trip: Seconds
    round_trip: Seconds
    goodput: BytesPerSecond  # headers counted
    doubt: str | None  # why it may be the switch that was measured, and not the link

    @property
    def goodput_error(self) -> float:
        """As a fraction; below 0 when it was too little."""
        return self.goodput / self.link.bandwidth - 1

    @property
    def round_trip_error(self) -> Seconds:
        return self.round_trip - self.described_round_trip


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCheck:
    rows: tuple[PairCheck, ...]
    switch_timing: SwitchTiming  # of the worst round that counts
    num_rejected: int  # rounds that were repeated because the switch was late


def round_trip(lab: Lab, a: str, b: str, *, num_echoes: int = NUM_ECHOES) -> Seconds:
    """The median of UDP echoes of a few bytes. Raises PeerError."""
    with Meter(lab) as meter:
        return meter.round_trips([(a, b)], num_echoes)[0]


def goodput(
    lab: Lab, pairs: Sequence[Pair], window: MeasureWindow | None = None
) -> list[BytesPerSecond]:
    """What TCP carries from a to b of each pair, all at once, headers counted. Raises PeerError."""
    with Meter(lab) as meter:
        return meter.goodput(pairs, window)


def check_pairs(
    lab: Lab, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> LinkCheck:
    """Measure every directed pair; `on_progress` hears how many rounds are done, and of how many.

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
    place = {host: number for number, host in enumerate(lab.hosts)}
    return LinkCheck(
        rows=tuple(sorted(rows, key=lambda row: (place[row.source], place[row.target]))),
        switch_timing=_worst([found.switch_timing for found in rounds]),
        num_rejected=sum(found.num_rejected for found in rounds),
    )


def measurement_batches(cluster: Cluster) -> Iterator[list[Pair]]:
    """Every directed pair once, in rounds that neither a host nor the switch has trouble with."""
    for matching in round_robin_pairs([device.name for device in cluster.devices]):
        batch: list[Pair] = []
        asked: BytesPerSecond = 0.0
        for pair in matching:
            bandwidth = cluster.link(*pair).bandwidth
            if batch and asked + bandwidth > SWITCH_LIMIT:
                yield batch
                batch, asked = [], 0.0
            batch.append(pair)
            asked += bandwidth
        yield batch


def _figures(cluster: Cluster, meter: Meter, pairs: list[Pair]) -> _Figures:
    """A flow can stall by itself while TCP recovers from a loss: what falls short gets a second
    chance, and the better of two counts."""
    round_trips, goodput = meter.round_trips(pairs), meter.goodput(pairs)
    described = [cluster.link(*pair).bandwidth for pair in pairs]
    if any(rate < MIN_GOODPUT * full for rate, full in zip(goodput, described, strict=True)):
        goodput = list(map(max, goodput, meter.goodput(pairs)))
    return round_trips, goodput


def _rows(cluster: Cluster, pairs: list[Pair], found: TimedRounds[_Figures]) -> Iterator[PairCheck]:
    for (a, b), measured_round_trip, carried in zip(pairs, *found.values[0], strict=True):
        link = cluster.link(a, b)
        too_much = link.bandwidth > SWITCH_LIMIT and carried < MIN_GOODPUT * link.bandwidth
        yield PairCheck(
            source=a,
            target=b,
            link=link,
            described_round_trip=described_round_trip(cluster, (a, b)),
            round_trip=measured_round_trip,
            goodput=carried,
            doubt="more than the switch carries" if too_much else found.trouble,
        )


def _worst(of: Sequence[SwitchTiming]) -> SwitchTiming:
    return SwitchTiming(
        late_p50=max((each.late_p50 for each in of), default=0.0),
        late_p99=max((each.late_p99 for each in of), default=0.0),
        late_max=max((each.late_max for each in of), default=0.0),
        busy=max((each.busy for each in of), default=0.0),
    )
