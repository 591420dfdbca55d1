"""Predictions: memory is never exceeded, schedules fit, errors name values and fixes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.cost.memory import needed, peak_in_flight
from polyrhythm.describe.cluster import Device
from polyrhythm.errors import PlanError, ScheduleError
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.schedule.spec import ScheduleSpec
from tests.grids import num_examples
from tests.pure.plan_examples import GIB, cluster, profile
from tests.pure.plan_examples import problem as example
from tests.pure.step_cases import random_cluster, random_model, seeds


def plan_for(of: Problem, layers: tuple[int, ...], **changes: object) -> Plan:
    """Return a plan of one pipeline over the first devices, with 8 micro-batches."""
    names = tuple(device.name for device in of.cluster.devices)[: len(layers)]
    fields: dict[str, object] = {
        "layers_per_stage": layers,
        "pipelines": (PipelinePlan(devices=names, num_microbatches=8),),
        "microbatch_size": of.profile.microbatch_size,
    }
    return Plan(**{**fields, **changes})


def with_memory(of: Problem, memory: int | None) -> Problem:
    devices = tuple(replace(device, memory=memory) for device in of.cluster.devices)
    return replace(of, cluster=replace(of.cluster, devices=devices))


@settings(max_examples=num_examples(60))
@given(seeds, st.integers(1, 4), st.integers(1, 12), st.floats(1, 3))
def test_no_device_ever_holds_more_than_its_limit(
    seed: int, num_stages: int, num_microbatches: int, roomy: float
) -> None:
    """Memory is drawn around the need of one micro-batch, so that some plans are refused."""
    rng = np.random.default_rng(seed)
    model = random_model(rng, 6)
    of = Problem(
        cluster=random_cluster(rng, 4),
        profile=model,
        job=TrainingJob(batch_size=num_microbatches),
    )
    one = max(of.least_memory(1)[i, i + 3] for i in range(4))
    of = with_memory(of, int(one * roomy))
    layers = ((6,), (3, 3), (2, 2, 2), (2, 2, 1, 1))[num_stages - 1]
    pipelines = (replace(plan_for(of, layers).pipelines[0], num_microbatches=num_microbatches),)
    try:
        found = predict(plan_for(of, layers, pipelines=pipelines), of)
    except PlanError as error:
        assert "GiB more than" in str(error)
        assert one * roomy * 0.9 < of.least_memory(1)[0, 6], "all would fit"
        return
    chosen = found.plan.pipelines[0].schedule
    schedule = ScheduleSpec.parse(chosen).build(
        num_stages=num_stages, num_microbatches=num_microbatches
    )
    for use, actions in zip(found.uses, schedule, strict=True):
        assert use.limit is not None
        assert use.in_flight == peak_in_flight(actions)
        held = needed(of.memory(use.layers, 1), in_flight=use.in_flight, window=0)
        assert use.memory == held <= use.limit


def test_memory_counts_weights_gradients_optimizer_and_activations() -> None:
    """Layers of 1 MB weights, 1 MB stored and 0.1 MB to the next; the first stage receives none."""
    of = example(
        cluster({"here": 2}),
        job=TrainingJob(batch_size=16, gradient_bytes=2.0, optimizer_bytes=3.0),
    )
    found = predict(plan_for(of, (5, 3)), of)
    first, last = found.uses
    assert (first.layers, last.layers) == (range(5), range(5, 8))
    assert first.memory == 5e6 * (1 + 2 + 3) + first.in_flight * 5e6
    assert last.memory == 3e6 * (1 + 2 + 3) + last.in_flight * (3e6 + 2 * 1e5)
    assert first.limit == last.limit == int(0.9 * GIB)
    assert first.busy == pytest.approx(8 * 5 * 0.03)


def test_the_least_memory_is_what_one_microbatch_needs() -> None:
    of = example(cluster({"here": 1}), random_model(np.random.default_rng(0), 5))
    least = of.least_memory(1)
    for a in range(6):
        for b in range(6):
            if b <= a:
                assert least[a, b] == float("inf")
            else:
                one = needed(of.memory(range(a, b), 1), in_flight=1, window=0)
                assert least[a, b] == pytest.approx(one, abs=2)


def test_tight_memory_leads_to_fewer_microbatches_in_flight() -> None:
    of = example(cluster({"here": 4}))
    free = predict(plan_for(with_memory(of, None), (2, 2, 2, 2)), with_memory(of, None))
    needs = needed(of.memory(range(2), 2), in_flight=2, window=0)
    tight = with_memory(of, int(needs / 0.9) + 1)
    found = predict(plan_for(tight, (2, 2, 2, 2)), tight)
    assert max(use.in_flight for use in found.uses) == 2
    assert free.uses[0].in_flight > 2
    assert free.uses[0].limit is None
    assert found.time.total > free.time.total


def test_stage_without_stored_activations_holds_all_microbatches() -> None:
    layers = tuple(replace(layer, stored_bytes=0) for layer in profile().layers)
    of = example(cluster({"here": 2}), replace(profile(), layers=layers))
    weights = needed(of.memory(range(8), 2), in_flight=0, window=0)
    devices = (Device(name="a", region="here", memory=weights), of.cluster.devices[1])
    of = replace(
        of,
        cluster=replace(of.cluster, devices=devices),
        job=TrainingJob(batch_size=16, memory_reserve=0.0),
    )
    assert of.max_in_flight(0, range(8), 2, 8) == 8


def test_memory_error_names_device_missing_bytes_and_fix() -> None:
    large = tuple(replace(layer, parameter_bytes=GIB // 8) for layer in profile().layers)
    of = example(cluster({"here": 2}), replace(profile(), layers=large))
    with pytest.raises(PlanError) as raised:
        predict(plan_for(of, (1, 7)), of)
    lacking = 7 / 8 * 4 + (7e6 + 2e5) / GIB - 0.9
    assert f"layers 1 to 7 need {lacking:.2f} GiB more than 'here/1' has" in raised.value.wrong
    assert "0.90 of 1.00 GiB" in raised.value.wrong
    assert "more stages" in raised.value.fix


def test_named_schedule_that_exceeds_memory_is_refused() -> None:
    of = example(cluster({"here": 2}))
    needs = needed(of.memory(range(4), 2), in_flight=4, window=0)
    of = with_memory(of, int(needs / 0.9) + 1)
    plan = plan_for(of, (4, 4))
    gpipe = replace(plan, pipelines=(replace(plan.pipelines[0], schedule="gpipe"),))
    with pytest.raises(PlanError, match="'here/0' would hold 8 micro-batches under gpipe"):
        predict(gpipe, of)
    assert max(use.in_flight for use in predict(plan, of).uses) <= 4


def test_named_schedule_is_kept() -> None:
    of = example(cluster({"here": 2}))
    plan = plan_for(of, (4, 4))
    for spec in ("gpipe", "kfkb:2", "bounded:5,1"):
        named = replace(plan, pipelines=(replace(plan.pipelines[0], schedule=spec),))
        assert predict(named, of).plan.pipelines[0].schedule == spec
    wrong = replace(plan, pipelines=(replace(plan.pipelines[0], schedule="bounded:3,2,1"),))
    with pytest.raises(ScheduleError, match="for 2 stages"):
        predict(wrong, of)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers_per_stage": (4, 5)}, "stages of 9 layers in all"),
        ({"microbatch_size": None}, "how many micro-batches"),
        ({"pipelines": (PipelinePlan(num_microbatches=8),)}, "pipeline 0 has no devices"),
        (
            {"pipelines": (PipelinePlan(devices=("here/0", "away"), num_microbatches=8),)},
            "device 'away' of pipeline 0",
        ),
        ({"pipelines": (PipelinePlan(devices=("here/0", "here/1")),)}, "how many micro-batches"),
        ({"sync": "telepathy"}, "sync 'telepathy'"),
    ],
)
def test_plan_for_another_cluster_or_model_is_refused(
    changes: dict[str, object], expected: str
) -> None:
    of = example(cluster({"here": 2}))
    with pytest.raises(PlanError, match=expected):
        predict(plan_for(of, (4, 4), **changes), of)


def of_two_pipelines(sync: str = "all_reduce") -> Prediction:
    where = cluster({"here": 2, "there": 2})
    of = example(where, job=TrainingJob(batch_size=32, sync=sync))
    pipelines = tuple(
        PipelinePlan(devices=(f"here/{p}", f"there/{p}"), num_microbatches=8) for p in range(2)
    )
    return predict(plan_for(of, (4, 4), pipelines=pipelines, sync=sync), of)


@pytest.mark.parametrize("sync", ["all_reduce", "decoupled", "groups", "ring", "sequential"])
def test_the_parts_of_the_time_add_up_largest_first(sync: str) -> None:
    found = of_two_pipelines(sync)
    takes = [part.takes for part in found.parts]
    assert sum(takes) == pytest.approx(found.time.total, rel=2e-3)
    assert takes == sorted(takes, reverse=True)
    assert found.samples_per_second == pytest.approx(32 / found.time.total)
    assert {part.name.split()[0] for part in found.parts} == {
        "computing",
        "filling",
        "activations,",
        "gradients,",
    }


def test_parts_name_the_busiest_device_and_the_slowest_links() -> None:
    where = cluster({"a": 2, "b": 1, "c": 1})
    latency = [[0.01] * 3 for _ in range(3)]
    latency[0][1] = latency[1][0] = 0.5  # pipelines: a/0 - b/0, a/1 - c/0
    latency[1][2] = latency[2][1] = 0.7  # replicas: b/0 - c/0
    devices = tuple(replace(d, speed=0.5 if d.name == "a/1" else 1.0) for d in where.devices)
    where = replace(where, devices=devices, latency=tuple(map(tuple, latency)))
    of = example(where)
    pipelines = (
        PipelinePlan(devices=("a/0", "b/0"), num_microbatches=8),
        PipelinePlan(devices=("a/1", "c/0"), num_microbatches=8),
    )
    names = [part.name for part in predict(plan_for(of, (4, 4), pipelines=pipelines), of).parts]
    assert "computing on a/1" in names
    assert "activations, slowest a/0 - b/0" in names
    assert any(set(name.split()) >= {"gradients,", "slowest", "b/0", "c/0"} for name in names)


def test_one_device_alone_waits_for_nothing() -> None:
    of = example(cluster({"here": 1}))
    found = predict(plan_for(of, (8,)), of)
    assert found.time.total == pytest.approx(8 * 8 * 0.03)
    assert found.time.compute == pytest.approx(found.time.total)
    assert found.parts[0].name == "computing on here/0"


def test_consecutive_stages_on_one_device_are_one_device_use() -> None:
    of = example(cluster({"here": 2}))
    devices = ("here/0", "here/1", "here/1")
    pipelines = (PipelinePlan(devices=devices, num_microbatches=8),)
    merged = predict(plan_for(of, (4, 3, 1), pipelines=pipelines), of)
    plain = predict(plan_for(of, (4, 4)), of)
    assert merged.time.total == pytest.approx(plain.time.total)
    assert [(use.stages, use.layers) for use in merged.uses] == [
        (range(1), range(4)),
        (range(1, 3), range(4, 8)),
    ]
    assert [use.memory for use in merged.uses] == [use.memory for use in plain.uses]


def test_slowest_link_of_replicas_is_the_slowest_for_their_shards() -> None:
    """A third of 8 MB takes 1 s from a to b and 0.5 s from a to c; all of it 1 and 1.5 s."""
    where = cluster({"a": 1, "b": 1, "c": 1})
    near, far = (0.0, 1e9), {(0, 1): (1.0, 1e9), (0, 2): (0.0, 8e6 / 1.5)}
    links = [[far.get((min(i, j), max(i, j)), near) for j in range(3)] for i in range(3)]
    where = replace(
        where,
        latency=tuple(tuple(latency for latency, _ in row) for row in links),
        bandwidth=tuple(tuple(bandwidth for _, bandwidth in row) for row in links),
    )
    of = example(where, job=TrainingJob(batch_size=48))
    pipelines = tuple(PipelinePlan(devices=(f"{d}/0",), num_microbatches=8) for d in "abc")
    names = [part.name for part in predict(plan_for(of, (8,), pipelines=pipelines), of).parts]
    assert any(set(name.split()) >= {"gradients,", "a/0", "b/0"} for name in names)
