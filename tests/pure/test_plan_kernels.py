"""The compiled parts of the planner, each compared with plain Python."""

import os
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan.cases import published
from polyrhythm import jit
from polyrhythm.cost.dtfm import PairTimes, layout_cost
from polyrhythm.jit import seed
from polyrhythm.plan.construction import construct_layouts, nearest
from polyrhythm.plan.dtfm import path
from polyrhythm.plan.dtfm.anneal import AnnealingSchedule, anneal
from polyrhythm.plan.dtfm.grid import Acceptance, make_grid, swap_devices
from polyrhythm.plan.dtfm.matching import bottleneck
from polyrhythm.plan.dtfm.moves import reverse_stages, swap_ends, swap_runs
from polyrhythm.plan.dtfm.path import cheapest_order, layout_of_groups, partition_cost, path_length
from tests.pure.dtfm_cases import small_times


@st.composite
def square(draw: st.DrawFn, most: int = 6) -> np.ndarray:
    size = draw(st.integers(1, most))
    value = draw(st.sampled_from([st.floats(0, 10), st.sampled_from([1.0, 2.0, 3.0])]))
    values = draw(st.lists(value, min_size=size * size, max_size=size * size))
    return np.array(values).reshape(size, size)


@given(square())
def test_the_bottleneck_matching_is_the_best_of_all(weights: np.ndarray) -> None:
    size = len(weights)
    found, pairing = bottleneck(weights)
    columns = range(size)
    assert found == min(max(weights[list(columns), list(p)]) for p in permutations(columns))
    assert sorted(pairing) == list(columns)
    assert weights[list(columns), pairing].max() == found


@given(square(7))
def test_the_cheapest_order_is_the_best_of_all(weights: np.ndarray) -> None:
    hops = weights + weights.T
    order = cheapest_order(hops)
    lengths = [
        sum(hops[a, b] for a, b in pairwise(order)) for order in permutations(range(len(hops)))
    ]
    assert sorted(order) == list(range(len(hops)))
    assert path_length(hops, order) == pytest.approx(min(lengths))


@pytest.mark.parametrize("number", range(5))
def test_a_hidden_path_through_many_stages_is_found(number: int) -> None:
    """40 stages are too many for an exact order; the fastest links are one path."""
    rng = np.random.default_rng(number)
    hidden = rng.permutation(40)
    hops = rng.uniform(1.5, 3, (40, 40))
    hops = np.minimum(hops, hops.T)
    hops[hidden[:-1], hidden[1:]] = hops[hidden[1:], hidden[:-1]] = 1.0
    order = cheapest_order(hops)
    assert sorted(order) == list(range(40))
    assert path_length(hops, order) == pytest.approx(39)


def test_an_order_improved_step_by_step_is_mostly_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 9 stages it was the best in all 40 draws; with one kind of steps alone it was not."""
    rng = np.random.default_rng(0)
    longer = []
    for _ in range(40):
        hops = rng.uniform(1, 2, (9, 9))
        hops += hops.T
        best = path_length(hops, cheapest_order(hops))
        with monkeypatch.context() as patch:
            patch.setattr(path, "MAX_EXACT", 1)
            order = cheapest_order(hops)
        assert sorted(order) == list(range(9))
        longer.append(path_length(hops, order) / best - 1)
    assert min(longer) > -1e-9
    assert max(longer) < 1e-9


def test_an_order_of_many_stages_is_never_far_from_a_good_one() -> None:
    """Points on a circle: going round is best, and leaves out the longest step."""
    angles = np.sort(np.random.default_rng(0).uniform(0, 2 * np.pi, 30))
    points = np.exp(1j * np.random.default_rng(1).permutation(angles))
    hops = np.abs(points[:, None] - points).astype(np.float64)
    steps = abs(np.diff(np.exp(1j * np.append(angles, angles[0]))))
    assert path_length(hops, cheapest_order(hops)) == pytest.approx(steps.sum() - steps.max())


@given(small_times(), st.integers(0, 100))
def test_the_cost_of_groups_is_that_of_their_layout(times: PairTimes, number: int) -> None:
    devices = np.random.default_rng(number).permutation(times.num_devices)
    groups = devices.reshape(times.num_stages, times.num_pipelines)
    assert partition_cost(groups, times) == pytest.approx(layout_of_groups(groups, times).total)


@given(small_times(), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_annealing_keeps_grid_consistent(times: PairTimes, number: int, blend: float) -> None:
    """After thousands of moves the incrementally updated cost equals that of the layout."""
    seed(number)
    layout = np.arange(times.num_devices).reshape(times.num_stages, times.num_pipelines)
    before = layout_cost(layout.tolist(), times).total
    schedule = AnnealingSchedule(2000, 5.0, 0.01, blend, 0.0)
    found = anneal(layout, times.sync, times.hop, nearest(times.hop, 3), schedule)
    assert found == pytest.approx(layout_cost(layout.tolist(), times).total)
    assert found <= before * (1 + 1e-9)


@given(small_times(), st.integers(0, 2**32 - 1))
def test_every_move_keeps_grid_consistent(times: PairTimes, number: int) -> None:
    """Check also the means, which influence acceptance and are in no result."""
    rng = np.random.default_rng(number)
    np.random.seed(number)
    devices = np.arange(times.num_devices).reshape(times.num_stages, times.num_pipelines)
    grid, last = make_grid(devices, times.sync, times.hop), times.num_stages - 1
    for _ in range(20):
        acceptance = Acceptance(rng.random(), rng.choice([np.inf, rng.exponential()]))
        s, t = rng.integers(times.num_stages, size=2)
        p, q = rng.integers(times.num_pipelines, size=2)
        swap_devices(grid, grid.layout[s, p], grid.layout[t, q], acceptance)
        reverse_stages(grid, s, t, acceptance)
        if s < last:
            swap_ends(grid, s + 1, p, q, acceptance)
        if last > 2:
            swap_runs(grid, 2, acceptance)
        for kept, fresh in zip(grid, make_grid(grid.layout, times.sync, times.hop), strict=True):
            assert kept == pytest.approx(fresh, abs=1e-9)


def test_annealing_improves_a_real_cluster() -> None:
    seed(0)
    times = published("case5_worldwide", shuffle=0, noise=0)
    layout = np.arange(64).reshape(8, 8)
    before = layout_cost(layout.tolist(), times).total
    schedule = AnnealingSchedule(50_000, 0.5, 0.02, 0.9, 0.05)
    assert anneal(layout, times.sync, times.hop, nearest(times.hop, 8), schedule) < before / 2


@pytest.mark.parametrize("part", ["polyrhythm.plan", "reproduction.dtfm"])
def test_compiled_code_is_cached_by_part_inside_and_outside_the_package(part: str) -> None:
    def double(x: float) -> float:
        return 2 * x

    double.__module__ = f"{part}.kernels"
    dispatcher: Any = jit.compiled(double)
    assert Path(dispatcher.stats.cache_path).parent.name.startswith(f"compiled-{part}-")


def test_old_compiled_code_is_removed(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"compiled-plan-{number}").mkdir()
        os.utime(tmp_path / f"compiled-plan-{number}", (number, number))
    for other in ("plan.pyc", "compiled-simulate-0"):
        (tmp_path / other).touch()
    jit.remove_oldest(tmp_path, "plan")
    left = sorted(path.name for path in tmp_path.iterdir())
    kept = [f"compiled-plan-{number}" for number in range(3, 7)]
    assert left == sorted([*kept, "compiled-simulate-0", "plan.pyc"])


@given(small_times())
def test_constructed_layouts_have_every_device_once(times: PairTimes) -> None:
    layouts = list(construct_layouts(times))
    assert layouts
    for layout in layouts:
        layout_cost(layout.tolist(), times)  # refuses anything else
