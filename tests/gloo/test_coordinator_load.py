"""The load on a coordinator: the workers' cycles end, and the figures are consistent."""

import io

from rich.console import Console

from benchmarks.sync.scheduler import measure


def test_a_quick_measurement_has_all_figures() -> None:
    shown = io.StringIO()
    figures = measure(quick=True, console=Console(file=shown, width=100))
    assert list(figures.per_s_by_connections) == [128, 8]
    assert figures.per_s == figures.per_s_by_connections[128] > figures.half_per_s > 0
    assert 0 < figures.p50_ms < figures.p99_ms
    assert min(figures.assign_p99_ms, figures.commit_p99_ms) > 0
    assert figures.num_answers > 100
    assert figures.num_replayed > 2 * 128
    assert f"{figures.p99_ms:.2f} ms" in shown.getvalue()
