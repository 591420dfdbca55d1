"""A plan assigns every layer to one stage and one rank to every worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import PipelinePlan, Plan, PredictedStep, even_plan


@given(st.data(), st.integers(1, 40), st.integers(1, 6))
def test_even_plan_assigns_every_layer_once_and_evenly(
    data: st.DataObject, num_layers: int, num_pipelines: int
) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    plan = even_plan(num_layers=num_layers, num_stages=num_stages, num_pipelines=num_pipelines)
    all_layers = [layer for stage in range(plan.num_stages) for layer in plan.layers(stage)]
    assert all_layers == list(range(num_layers))
    assert max(plan.layers_per_stage) - min(plan.layers_per_stage) <= 1


@given(st.integers(1, 8), st.integers(1, 8))
def test_ranks_and_workers_are_one_to_one(num_stages: int, num_pipelines: int) -> None:
    plan = even_plan(num_layers=8, num_stages=num_stages, num_pipelines=num_pipelines)
    workers = [plan.worker(rank) for rank in range(plan.num_workers)]
    assert [plan.rank(worker) for worker in workers] == list(range(plan.num_workers))
    replicas = [w for stage in range(num_stages) for w in plan.replicas(stage)]
    assert sorted(replicas) == sorted(workers)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "num_pipelines", "message"),
    [
        (6, 9, 2, "9 stages for 6 layers"),
        (6, 0, 2, "0 stages for 6 layers"),
        (6, 2, 0, "num_pipelines=0"),
    ],
)
def test_an_impossible_plan_is_refused(
    num_layers: int, num_stages: int, num_pipelines: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        even_plan(num_layers=num_layers, num_stages=num_stages, num_pipelines=num_pipelines)


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"\[3, 0\]"):
        Plan(layers_per_stage=(3, 0), pipelines=(PipelinePlan(),))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_parts_are_the_consecutive_stages_of_each_device(lengths: list[int]) -> None:
    devices = tuple(f"d{i}" for i, length in enumerate(lengths) for _ in range(length))
    parts = PipelinePlan(devices=devices).parts
    assert [(part.device, part.end - part.first) for part in parts] == [
        (f"d{i}", length) for i, length in enumerate(lengths)
    ]
    assert [stage for part in parts for stage in range(part.first, part.end)] == list(
        range(len(devices))
    )


def test_device_runs_only_consecutive_stages() -> None:
    with pytest.raises(PlanError, match="'a' runs stages that are not next to one another"):
        PipelinePlan(devices=("a", "b", "a"))


@pytest.mark.parametrize(
    ("pipelines", "left_out", "message"),
    [
        ((), (), "a plan without pipelines"),
        ((("a",),), (), "pipeline 0 has 1 devices"),
        ((("a", "b"), ("b", "c")), (), "'b' is in pipelines 0 and 1"),
        ((("a", "b"),), ("b",), "'b' is in pipeline 0 and left out"),
    ],
)
def test_devices_that_contradict_one_another_are_refused(
    pipelines: tuple[tuple[str, ...], ...], left_out: tuple[str, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(
            layers_per_stage=(3, 2),
            pipelines=tuple(PipelinePlan(devices=devices) for devices in pipelines),
            left_out=left_out,
        )


def test_batch_is_known_if_every_pipeline_has_micro_batches() -> None:
    def plan(*numbers: int | None, size: int | None = 4) -> Plan:
        return Plan(
            layers_per_stage=(1,),
            pipelines=tuple(PipelinePlan(num_microbatches=number) for number in numbers),
            microbatch_size=size,
        )

    assert plan(3, 5).batch == 32
    assert plan(3, None).batch is None
    assert plan(3, 5, size=None).batch is None


def test_the_gap_is_the_share_that_could_be_saved() -> None:
    assert PredictedStep(step=10.0, bound=8.0, parts=()).gap == pytest.approx(0.2)
    assert PredictedStep(step=10.0, bound=10.1, parts=()).gap == 0.0  # rounding
