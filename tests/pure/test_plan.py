"""A plan gives every layer to one stage and every worker one rank."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import Plan, even_plan


@given(st.data(), st.integers(1, 40), st.integers(1, 6))
def test_an_even_plan_deals_every_layer_once_and_evenly(
    data: st.DataObject, num_layers: int, num_pipelines: int
) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    plan = even_plan(num_layers=num_layers, num_stages=num_stages, num_pipelines=num_pipelines)
    dealt = [layer for stage in range(plan.num_stages) for layer in plan.layers(stage)]
    assert dealt == list(range(num_layers))
    assert max(plan.layers_per_stage) - min(plan.layers_per_stage) <= 1


@given(st.integers(1, 8), st.integers(1, 8))
def test_ranks_and_workers_are_one_to_one(num_stages: int, num_pipelines: int) -> None:
    plan = even_plan(num_layers=8, num_stages=num_stages, num_pipelines=num_pipelines)
    workers = [plan.worker(rank) for rank in range(plan.num_workers)]
    assert [plan.rank(worker) for worker in workers] == list(range(plan.num_workers))
    replicas = [w for stage in range(num_stages) for w in plan.replicas(stage)]
    assert sorted(replicas) == sorted(workers)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "num_pipelines", "says"),
    [
        (6, 9, 2, "9 stages for 6 layers"),
        (6, 0, 2, "0 stages for 6 layers"),
        (6, 2, 0, "num_pipelines=0"),
    ],
)
def test_an_impossible_plan_is_refused(
    num_layers: int, num_stages: int, num_pipelines: int, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        even_plan(num_layers=num_layers, num_stages=num_stages, num_pipelines=num_pipelines)


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"\[3, 0\]"):
        Plan(layers_per_stage=(3, 0), num_pipelines=1)


def test_a_saved_plan_names_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    even_plan(num_layers=6, num_stages=4, num_pipelines=2).save(path)
    assert json.loads(path.read_text()) == {
        "schema": 1,
        "layers_per_stage": [2, 2, 1, 1],
        "num_pipelines": 2,
    }
