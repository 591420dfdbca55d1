"""`polyrhythm bench scale`: its table says what was simulated, which is less if it is quick."""

from io import StringIO

import pytest
from rich.console import Console

from benchmarks.scale import bench


def shown(quick: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    def timed(shape: bench.Shape) -> bench.ScaleRow:
        workers = shape.num_workers
        return bench.ScaleRow(
            name=shape.name, workers=workers, actions=1, events=1, seconds=1.0, memory=1
        )

    monkeypatch.setattr(bench, "_timed", timed)
    monkeypatch.setattr(bench, "_is_deterministic", lambda shape: True)
    console = Console(file=StringIO(), width=120)
    found = bench.run(quick=quick, console=console)
    assert set(found.ratios) == set(bench.BARS)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_full_run_is_of_the_sizes_that_its_figures_are_named_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown(False, monkeypatch).splitlines()
    assert "s_64        1          <= 5   64 workers (16 x 4), 1,000 steps, M = 1" in [
        line.rstrip() for line in lines
    ]
    assert any(line.startswith("s_4096") and "4,096 workers" in line for line in lines)


def test_a_quick_run_says_its_own_sizes_and_meets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(True, monkeypatch)
    assert "4,096 workers" not in text
    assert "128 workers (16 x 8), 5 steps, M = 8" in text
    assert "<=" not in text
