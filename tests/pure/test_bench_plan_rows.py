"""Placements by DT-FM's cost in `bench plan`: ratios of rows, and planted clusters."""

import numpy as np
import pytest

from benchmarks.plan.cases import planted
from benchmarks.plan.placements import DtfmRows, NoisyRow, PlacedRow


def placed(case: str, cost: float, cpu: float = 1.0) -> PlacedRow:
    return PlacedRow(
        case=case, seed=0, cost=cost, best=10.0, gap_to_bound=0.1, found_by="luck", cpu=cpu
    )


def noisy(cost: float, dtfm_cost: float, equal_cpu: float) -> NoisyRow:
    return NoisyRow(
        seed=0,
        cost=cost,
        gap_to_bound=0.2,
        cpu=1.0,
        dtfm_cost=dtfm_cost,
        dtfm_cpu=2.0,
        dtfm_cost_equal_cpu=equal_cpu,
    )


def test_ratios_are_the_count_of_optima_mean_gains_and_worst_times() -> None:
    rows = DtfmRows(
        optima=(placed("case1_a", 10.00004), placed("case2_b", 10.0001, cpu=1.5)),
        noisy=(noisy(6, 10, 12), noisy(8, 10, 10)),
        large=(placed("large", 10.2, cpu=3.0), placed("larger", 10.5, cpu=2.0)),
    )
    ratios = rows.ratios()
    assert ratios["optima"] == 1  # only the rounding of four decimals is tolerated
    assert ratios["cpu_s"] == 1.5
    assert ratios["noisy"] == pytest.approx(0.3)
    assert ratios["noisy_equal_cpu"] == pytest.approx(0.35)
    assert ratios["n512_s"] == 3.0
    assert ratios["n512_gap"] == pytest.approx(0.05)
    assert rows.figures()["bound_gap_case2"] == 0.1


@pytest.mark.parametrize(("depth", "paired"), [(1, True), (2, False), (2, True)])
def test_a_planted_layout_has_the_returned_cost_and_other_links_are_slower(
    depth: int, paired: bool
) -> None:
    """Every device has the fast links that it needs, and too few for any other layout."""
    times, best = planted(8, 8, seed=0, depth=depth, paired=paired)
    fastest = times.hop[times.hop > 0].min()
    num_fast = np.isclose(times.hop, fastest).sum(axis=1)
    assert best == pytest.approx(times.sync[times.sync > 0].min() * 7 + fastest * 7)
    assert num_fast.min() >= 8
    assert num_fast.max() <= 32
