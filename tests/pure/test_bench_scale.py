"""`bench scale` prints which sizes it simulated, smaller ones with --quick."""

from io import StringIO

import pytest
from rich.console import Console

from benchmarks.harness.report import names_of
from benchmarks.scale import bench


def shown(quick: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    def timed(shape: bench.SimulatedShape) -> bench.ScaleRow:
        return bench.ScaleRow(
            name=shape.name,
            shape=str(shape),
            actions=1,
            events=1,
            seconds=1.0,
            memory=1,
        )

    monkeypatch.setattr(bench, "_timed", timed)
    monkeypatch.setattr(bench, "_is_deterministic", lambda shape: True)
    console = Console(file=StringIO(), width=120)
    result = bench.run(quick=quick, console=console)
    assert set(result.ratios) == names_of(bench.BARS)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_full_run_has_the_sizes_in_the_names_of_its_ratios(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = shown(False, monkeypatch)
    assert "64 workers (16 x 4), 1,000 steps, M = 1 " in text
    assert "4,096 workers (256 x 16), 100 steps, M = 32 " in text
    (first,) = (line.split() for line in text.splitlines() if line.startswith("s_64 "))
    assert first[:4] == ["s_64", "1", "<=", "5"]


def test_a_quick_run_prints_its_own_sizes_and_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(True, monkeypatch)
    assert "4,096 workers" not in text
    assert "128 workers (16 x 8), 5 steps, M = 8" in text
    assert "<=" not in text
