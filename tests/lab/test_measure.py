"""Measured from inside, a lab's links are as described, and a wrong link is detected."""

import io
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.errors import PeerError
from polyrhythm.lab import check_table, meter
from polyrhythm.lab.agent import MeasureWindow, MedianEchoTime
from polyrhythm.lab.lab import Lab
from polyrhythm.lab.measure import check_pairs, goodput, round_trip
from polyrhythm.lab.meter import Meter, Pair, window_for

pytestmark = pytest.mark.timeout(90)

MEGABIT = 125e3
SHORT = MeasureWindow(0.5, 1.0)


def triangle() -> Cluster:
    """Return hosts a, b, c: a to b has low latency and high bandwidth, b to c the opposite."""
    return Cluster(
        name="triangle",
        devices=tuple(Device(name=name, region=name) for name in "abc"),
        regions=("a", "b", "c"),
        latency=((0, 0.002, 0.02), (0.004, 0, 0.03), (0.03, 0.05, 0)),
        bandwidth=(
            (0, 40 * MEGABIT, 10 * MEGABIT),
            (20 * MEGABIT, 0, 5 * MEGABIT),
            (8 * MEGABIT, 4 * MEGABIT, 0),
        ),
    )


@pytest.mark.alone
def test_a_round_trip_is_both_latencies() -> None:
    with Lab(triangle()) as lab:
        measured, other = round_trip(lab, "b", "c"), round_trip(lab, "a", "c")
    assert measured >= 0.08
    assert measured / other == pytest.approx(0.08 / 0.05, rel=0.2)


@pytest.mark.alone
def test_goodput_is_the_bandwidth_of_each_direction_headers_counted() -> None:
    with Lab(triangle()) as lab:
        (wide,) = goodput(lab, [("a", "b")], SHORT)
        narrow, other = goodput(lab, [("b", "c"), ("c", "a")], SHORT)
    assert wide / (40 * MEGABIT) == pytest.approx(1, abs=0.2)
    assert narrow / (5 * MEGABIT) == pytest.approx(1, abs=0.2)
    assert other / (8 * MEGABIT) == pytest.approx(1, abs=0.2)


@pytest.mark.alone
def test_link_that_differs_from_its_description_is_detected() -> None:
    with Lab(triangle()) as lab, Meter(lab) as measuring:
        before = measuring.goodput([("a", "b")], SHORT)[0]
        change = LinkChange(
            at=0, source="a", target="b", one_way=True, bandwidth=10 * MEGABIT, latency=0.1
        )
        lab.change(change)
        after = measuring.goodput([("a", "b")], SHORT)[0]
        slow = measuring.round_trips([("a", "b")], 5)[0]
    assert before / after == pytest.approx(4, rel=0.3)
    assert slow > 0.1


@pytest.mark.alone
def test_the_queues_are_empty_after_a_measurement() -> None:
    with Lab(triangle()) as lab, Meter(lab) as measuring:
        idle = measuring.round_trips([("b", "c")], 5)[0]
        measuring.goodput([("b", "c")], SHORT)
        assert measuring.round_trips([("b", "c")], 5)[0] < 2 * idle


def test_measuring_again_starts_no_new_processes_and_opens_no_new_files() -> None:
    with Lab(triangle()) as lab, Meter(lab) as measuring:
        measuring.round_trips([("a", "b"), ("b", "a")], 3)
        files = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            measuring.round_trips([("a", "b"), ("b", "a")], 3)
        assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_a_lost_link_is_an_error_that_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "EXTRA_TIMEOUT", 1.0)
    with Lab(triangle()) as lab:
        lab.change(LinkChange(at=0, source="a", target="b", up=False))
        with pytest.raises(PeerError, match="host a during round trip"):
            round_trip(lab, "a", "b", num_echoes=3)
        with pytest.raises(PeerError, match="during goodput"):
            goodput(lab, [("a", "b")], MeasureWindow(0.2, 0.2, 0.2))


def end_at_once(*args: object) -> float:
    os._exit(3)


def test_dead_measuring_process_is_detected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MedianEchoTime, "run", end_at_once)
    with Lab(triangle()) as lab, pytest.raises(PeerError, match="exit status 3") as lost:
        round_trip(lab, "a", "b")
    assert lost.value.waited < meter.EXTRA_TIMEOUT


def short_window_for(cluster: Cluster, pairs: Sequence[Pair]) -> MeasureWindow:
    return replace(window_for(cluster, pairs), length=0.5)


@pytest.mark.alone
@pytest.mark.long
def test_check_covers_and_prints_every_ordered_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "window_for", short_window_for)
    progress: list[tuple[int, int]] = []
    with Lab(triangle()) as lab:
        check = check_pairs(lab, on_progress=lambda done, total: progress.append((done, total)))
    assert [(row.source, row.target) for row in check.rows] == [
        (a, b) for a in "abc" for b in "abc" if a != b
    ]
    assert progress[0] == (0, 6)
    assert progress[-1] == (6, 6)
    for row in check.rows:
        assert row.link == triangle().link(row.source, row.target)
        assert row.goodput / row.link.bandwidth == pytest.approx(1, abs=0.25)
        assert row.described_round_trip <= row.round_trip < 4 * row.described_round_trip
    text = io.StringIO()
    check_table.show(check, Console(file=text, width=40))
    shown = [line.split() for line in text.getvalue().splitlines()]
    assert len([cells for cells in shown if cells[:2] == ["b", "c"]]) == 1
    assert any(cells[:1] == ["switch:"] for cells in shown)


def test_starting_processes_slowly_is_no_part_of_a_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawn = Lab.spawn

    def spawn_slowly(lab: Lab, *args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return spawn(lab, *args, **options)

    monkeypatch.setattr(Lab, "spawn", spawn_slowly)
    with Lab(triangle()) as lab:  # two processes start after the window would have ended
        assert goodput(lab, [("a", "b")], MeasureWindow(0.2, 0.2))[0] > 0
