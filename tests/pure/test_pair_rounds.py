"""Every pair of hosts is measured once, and only concurrently with disjoint pairs."""

import math
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.pairs import disjoint_rounds, round_robin_pairs
from polyrhythm.lab.commands import SwitchReport, SwitchTiming
from polyrhythm.lab.lab import SWITCH_LIMIT
from polyrhythm.lab.measure import _rows, measurement_batches, rounds_on_time
from polyrhythm.lab.meter import window_for

MEGABIT = 125e3


def cluster_of(*rates: float, latency: float = 0.01) -> Cluster:
    """Return a cluster with one host per rate: it sends to all others at that many Mbit/s."""
    names = tuple(f"h{i}" for i in range(len(rates)))
    return Cluster(
        name="test",
        devices=tuple(Device(name=name, region=name) for name in names),
        regions=names,
        latency=tuple((latency,) * len(rates) for _ in rates),
        bandwidth=tuple((rate * MEGABIT,) * len(rates) for rate in rates),
    )


@given(st.integers(0, 14))
def test_each_ordered_pair_occurs_once_and_each_host_once_per_round(num_hosts: int) -> None:
    hosts = [str(i) for i in range(num_hosts)]
    rounds = list(round_robin_pairs(hosts))
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
    assert Counter(pair for pairs in rounds for pair in pairs) == Counter(permutations(hosts, 2))
    if num_hosts > 1:
        assert len(rounds) == 2 * (num_hosts - 1 + num_hosts % 2), "no more rounds than needed"


@given(st.lists(st.sampled_from("xyz"), min_size=2, max_size=9))
def test_disjoint_rounds_keep_every_pair_and_use_a_place_once_per_round(places: list[str]) -> None:
    place = dict(enumerate(places))
    for pairs in round_robin_pairs(range(len(places))):
        rounds = list(disjoint_rounds(pairs, place))
        assert sorted(pair for together in rounds for pair in together) == sorted(pairs)
        for together in rounds:
            taken = Counter(where for a, b in together for where in {place[a], place[b]})
            assert set(taken.values()) == {1}


@given(st.lists(st.floats(0.1, 1e5), min_size=1, max_size=8))
def test_batch_stays_within_the_switch_limit_unless_it_is_one_pair(rates: list[float]) -> None:
    cluster = cluster_of(*rates)
    batches = list(measurement_batches(cluster))
    every = Counter(pair for batch in batches for pair in batch)
    assert every == Counter(permutations([device.name for device in cluster.devices], 2))
    for batch in batches:
        asked = sum(cluster.link(*pair).bandwidth for pair in batch)
        assert len(batch) == 1 or asked <= SWITCH_LIMIT


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.floats(0, 0.3), st.floats(0, 0.3))
def test_a_slower_or_longer_link_is_never_measured_for_less_time(
    rate: float, other: float, latency: float, longer: float
) -> None:
    pair = [("h0", "h1")]
    slow, fast = sorted((rate, other))
    window = window_for(cluster_of(fast, fast, latency=latency), pair)
    assert window_for(cluster_of(slow, slow, latency=latency), pair).length >= window.length
    far = window_for(cluster_of(fast, fast, latency=latency + longer), pair)
    assert far.settle >= window.settle
    assert far.length >= window.length


class ScriptedLab:
    """A lab whose switch has the given lateness in each round."""

    def __init__(self, late: list[float]) -> None:
        self.late, self.num_rounds = late, 0

    def work(self) -> int:
        self.num_rounds += 1
        return self.num_rounds

    def report(self, *, reset: bool = False) -> SwitchReport:
        late = self.late[max(0, self.num_rounds - 1)]
        switch_timing = SwitchTiming(late_p50=late, late_p99=late, late_max=late, busy=0.1)
        return SwitchReport(elapsed=1.0, strays=0, pairs=(), switch_timing=switch_timing)


GOOD, BAD = 1e-4, 1.0


@pytest.mark.parametrize(
    ("late", "num_rounds", "values", "num_rejected"),
    [
        ([GOOD], 1, [1], 0),
        ([BAD, GOOD], 1, [2], 1),
        ([GOOD, BAD, GOOD], 2, [1, 3], 1),
        ([BAD, GOOD, BAD, BAD], 2, [2], 3),
    ],
)
def test_late_rounds_are_rejected_and_repeated(
    late: list[float], num_rounds: int, values: list[int], num_rejected: int
) -> None:
    lab = ScriptedLab(late)
    rounds = rounds_on_time(lab, lab.work, num_rounds=num_rounds, max_attempts=4)  # type: ignore[arg-type]
    assert rounds.values == values
    assert rounds.num_rejected == num_rejected
    assert rounds.trouble is None


def test_if_all_rounds_are_late_the_last_is_returned_with_trouble() -> None:
    lab = ScriptedLab([BAD] * 3)
    rounds = rounds_on_time(lab, lab.work, max_attempts=3)  # type: ignore[arg-type]
    assert rounds.values == [3]
    assert rounds.num_rejected == 2
    assert rounds.trouble is not None


def test_no_round_is_repeated_after_the_deadline() -> None:
    lab = ScriptedLab([BAD] * 3)
    rounds = rounds_on_time(lab, lab.work, max_attempts=3, deadline=-math.inf)  # type: ignore[arg-type]
    assert rounds.values == [1]


@pytest.mark.parametrize(
    ("rate", "carried", "late", "doubt"),
    [
        (100.0, 100.0, GOOD, None),
        (100.0, 50.0, GOOD, None),  # simply wrong
        (100.0, 50.0, BAD, "late"),
        (50_000.0, 9_000.0, GOOD, "more than the switch carries"),
        (50_000.0, 9_000.0, BAD, "more than the switch carries"),
        (50_000.0, 49_000.0, GOOD, None),
    ],
)
def test_switch_overload_is_distinguished_from_a_wrong_link(
    rate: float, carried: float, late: float, doubt: str | None
) -> None:
    lab = ScriptedLab([late])
    figures = ([0.02], [carried * MEGABIT])
    found = rounds_on_time(lab, lambda: figures, max_attempts=1)  # type: ignore[arg-type]
    (row,) = _rows(cluster_of(rate, rate), [("h0", "h1")], found)
    assert row.goodput_error == pytest.approx(carried / rate - 1)
    assert row.doubt is None if doubt is None else row.doubt and doubt in row.doubt
