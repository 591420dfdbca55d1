"""The load on a coordinator: the workers' cycles end, and the figures are consistent."""

import io
import time

import msgspec
from rich.console import Console

from benchmarks.sync.scheduler import QUICK, CoordinatorLoad, measure
from polyrhythm.sync.protocol import Abort
from polyrhythm.types import Worker
from tests.gloo.coordinators import KEYS, coordinator_of, setup_of


def test_a_quick_measurement_has_all_figures() -> None:
    shown = io.StringIO()
    figures = measure(quick=True, console=Console(file=shown, width=100))
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert [line[0] for line in lines if line and line[0].isdigit()] == ["128", "8"]
    assert ["128", f"{figures['per_s']:,.0f}"] in lines
    assert figures["per_s"] > figures["half_per_s"] > 0
    assert 0 < figures["p50_ms"] < figures["p99_ms"]
    assert min(figures["assign_p99_ms"], figures["commit_p99_ms"]) > 0
    timed = QUICK.num_timed_windows * QUICK.window
    assert figures["answers"] >= figures["half_per_s"] * timed / 2
    assert figures["replayed"] > 2 * 128
    assert f"{figures['p99_ms']:.2f} ms" in shown.getvalue()


def test_abort_of_a_late_group_ends_no_cycle() -> None:
    setup = setup_of(pipelines=2)
    abort = Abort(gid=1, members=(Worker(0, 0), Worker(0, 1)), reason="late")
    with coordinator_of(setup) as coordinator:
        load = CoordinatorLoad(coordinator.address, KEYS, setup, num_connections=2)
        try:
            load.join(30)
            message = load._decode(msgspec.msgpack.encode(abort))
            load._answer(b"0000", message, time.monotonic())
        finally:
            load.close()
    assert load.num_cycles == 0
