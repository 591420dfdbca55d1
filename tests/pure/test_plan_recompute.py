"""Recomputed activations: their memory and time, and the stages that a planner chooses for them."""

import io
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from polyrhythm.cost.memory import StageMemory, needed, recomputed_activations
from polyrhythm.cost.step import StageWork, recomputing
from polyrhythm.describe.model import ModelProfile, blocks_with_parameters, recompute_bytes
from polyrhythm.errors import PlanError
from polyrhythm.observe.plan_table import show_plan
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.recompute import recompute_choices
from polyrhythm.plan.replan import replan
from polyrhythm.plan.search import search_plan
from polyrhythm.simulate.from_plan import planned_job
from tests.grids import num_examples
from tests.pure.plan_problems import cluster, layers
from tests.pure.step_cases import random_model, seeds

MEGABYTE = 10**6
sizes = st.integers(0, 10**9)


def large(
    *, memory: int | None, num_layers: int = 8, devices: int = 2, **options: object
) -> Problem:
    """Layers of 1 MB weights, which store 100 MB and have an output of 10 MB."""
    table = layers((1.0,) * num_layers, parameters=MEGABYTE, activations=10 * MEGABYTE)
    table = tuple(replace(layer, stored_bytes=100 * MEGABYTE) for layer in table)
    return Problem(
        cluster=cluster((devices,), memory=memory),
        profile=ModelProfile(name="large", microbatch_size=1, layers=table),
        job=TrainingJob(batch_size=8, memory_reserve=0.0, **options),
    )


def stage(stored: int, recomputed: int = 0) -> StageMemory:
    return StageMemory(
        weights=0, gradients=0, optimizer=0, activation=stored, message=0, recomputed=recomputed
    )


def test_recomputing_layers_keep_inputs_and_the_rest_of_the_largest() -> None:
    activations = recomputed_activations([100, 300, 50], [10, 20, 30])
    assert activations == (60, 280)
    assert needed(stage(*activations), in_flight=4, window=0) == 4 * 60 + 280


def test_layers_that_keep_all_save_nothing() -> None:
    assert recomputed_activations([10, 20], [10, 20]) == (30, 0)
    assert recomputed_activations([], []) == (0, 0)


@given(st.lists(st.tuples(sizes, sizes), min_size=1), st.integers(1, 20))
def test_recomputation_never_needs_more_memory(
    pairs: list[tuple[int, int]], in_flight: int
) -> None:
    stored, kept = [max(pair) for pair in pairs], [min(pair) for pair in pairs]
    without = needed(stage(sum(stored)), in_flight=in_flight, window=0)
    recomputed = recomputed_activations(stored, kept)
    assert needed(stage(*recomputed), in_flight=in_flight, window=0) <= without
    assert needed(stage(*recomputed), in_flight=in_flight, window=0) >= in_flight * sum(kept)


@given(st.floats(0, 1e3), st.floats(0, 1e3))
def test_backward_takes_as_much_longer_as_the_forward(forward: float, backward: float) -> None:
    work = StageWork(forward=forward, backward=backward, activation_bytes=1, gradient_bytes=2)
    assert recomputing(work) == replace(work, backward=forward + backward)


def test_activation_function_recomputes_with_the_layer_before_it() -> None:
    assert blocks_with_parameters([True, False, True, True]) == [
        range(2),
        range(2, 3),
        range(3, 4),
    ]
    assert blocks_with_parameters([False, True, False, True]) == [range(3), range(3, 4)]
    assert blocks_with_parameters([]) == []


def test_layer_keeps_its_input_unless_more_was_measured() -> None:
    table = layers((1.0,) * 4, activations=10)
    table = (
        table[0],
        replace(table[1], parameter_bytes=0),
        table[2],
        replace(table[3], recompute_bytes=70),
    )
    assert recompute_bytes(table) == [0, 0, 10, 70]


@settings(max_examples=num_examples(40))
@given(seeds)
def test_least_memory_of_layers_is_what_one_microbatch_needs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = random_model(rng, 5)
    table = [
        replace(
            layer,
            parameter_bytes=layer.parameter_bytes * int(rng.integers(2)),
            temporary_bytes=int(rng.integers(3 * layer.stored_bytes + 1)),
            cast_bytes=int(rng.integers(100)),
        )
        for layer in model.layers
    ]
    of = Problem(
        cluster=cluster((1,)),
        profile=replace(model, layers=tuple(table), workspace_bytes=int(rng.integers(100))),
        job=TrainingJob(batch_size=1),
    )
    for is_recomputed in (False, True):
        least = of.least_memory(1, recompute=is_recomputed)
        for a in range(5):
            for b in range(a + 1, 6):
                memory = of.memory(range(a, b), 1, range(a, b) if is_recomputed else ())
                assert least[a, b] == pytest.approx(needed(memory, in_flight=1, window=0), abs=2)


def test_memory_of_a_device_with_one_recomputing_stage_of_two() -> None:
    of = large(memory=None)
    memory = of.memory(range(1, 5), 1, {3, 4})
    assert memory.activation == (200 + 2 * 10 + 2 * 10) * MEGABYTE  # stored, kept, messages
    assert memory.recomputed == 90 * MEGABYTE


def test_enough_memory_never_recomputes() -> None:
    for memory in (None, 10**10):
        assert search_plan(large(memory=memory)).best.plan.recompute == ()


def test_stage_that_does_not_fit_recomputes() -> None:
    """One device of two: 8 layers store 800 MB, and keep 70 MB and 100 MB once."""
    of = large(memory=250 * MEGABYTE, devices=1)
    found = search_plan(of).best
    assert found.plan.recompute == (True,)
    assert found.uses[0].memory <= 250 * MEGABYTE
    assert found.time.total == pytest.approx(8 * 8 * (1 + 1 / 3))
    with pytest.raises(PlanError, match=r"GiB") as raised:
        search_plan(large(memory=250 * MEGABYTE, devices=1, recompute="never"))
    assert "recompute=auto" in raised.value.fix


def test_only_the_stage_that_is_short_of_memory_recomputes() -> None:
    of = large(memory=None, num_stages=2, num_pipelines=1)
    devices = of.cluster.devices
    small = (replace(devices[0], memory=300 * MEGABYTE), devices[1])
    of = replace(of, cluster=replace(of.cluster, devices=small))
    plan = search_plan(of).best.plan
    assert dict(zip(plan.pipelines[0].devices, plan.recompute, strict=True)) == {
        "r0/0": True,
        "r0/1": False,
    }


def test_always_and_never_are_obeyed() -> None:
    assert search_plan(large(memory=None, recompute="always")).best.plan.recompute[0]
    assert search_plan(large(memory=10**9, recompute="never")).best.plan.recompute == ()
    with pytest.raises(PlanError, match="recompute='sometimes'"):
        TrainingJob(batch_size=1, recompute="sometimes")


@settings(max_examples=num_examples(12), deadline=None)
@given(st.integers(210, 1000), st.sampled_from([1, 2, 4]))
def test_no_other_choice_of_stages_is_faster(megabytes: int, num_stages: int) -> None:
    """For the layers and devices of the plan that was found."""
    of = large(
        memory=megabytes * MEGABYTE, devices=num_stages, num_stages=num_stages, num_pipelines=1
    )
    found = search_plan(of).best
    for flags in product((False, True), repeat=num_stages):
        pipelines = tuple(replace(p, schedule="auto") for p in found.plan.pipelines)
        other = replace(found.plan, recompute=flags, pipelines=pipelines)
        try:
            takes = predict(other, of).time.total
        except PlanError:  # does not fit
            continue
        assert found.time.total <= takes * (1 + 1e-3)


def test_more_microbatches_in_flight_may_pay_for_recomputation() -> None:
    """The second stage needs it, since it also holds messages; the first could hold only one."""
    of = large(memory=None, num_stages=2, num_pipelines=1)
    fits_one = needed(of.memory(range(4), 1), in_flight=1, window=0)
    devices = tuple(replace(d, memory=fits_one + MEGABYTE) for d in of.cluster.devices)
    of = replace(of, cluster=replace(of.cluster, devices=devices))
    plan = Plan(
        layers_per_stage=(4, 4),
        pipelines=(PipelinePlan(devices=("r0/0", "r0/1"), num_microbatches=8),),
        microbatch_size=1,
    )
    needed_only, also_short = recompute_choices(plan, of)
    assert (needed_only.recompute, also_short.recompute) == ((False, True), (True, True))
    assert predict(also_short, of).uses[0].in_flight > predict(needed_only, of).uses[0].in_flight


def test_predicted_and_simulated_step_use_the_longer_backward() -> None:
    of = large(memory=None, devices=1)
    plan = search_plan(of).best.plan
    slower = replace(plan, recompute=(True,), predicted=None)
    assert predict(slower, of).time.total == pytest.approx(predict(plan, of).time.total * 4 / 3)
    work, longer = planned_job(plan, of).stages[0], planned_job(slower, of).stages[0]
    assert longer.backward == pytest.approx(work.backward + work.forward)


def test_error_of_a_plan_says_what_recomputation_saves() -> None:
    of = large(memory=250 * MEGABYTE, devices=1)
    plan = Plan(
        layers_per_stage=(8,),
        pipelines=(PipelinePlan(devices=("r0/0",), num_microbatches=8),),
        microbatch_size=1,
    )
    with pytest.raises(PlanError) as raised:
        predict(plan, of)
    assert "recompute in its stages (saves 0.59 GiB)" in raised.value.fix
    nothing = replace(plan, recompute=(True,))
    with pytest.raises(PlanError) as raised:
        predict(nothing, large(memory=100 * MEGABYTE, devices=1))
    assert "recompute" not in raised.value.fix


def test_printed_plan_names_the_stages_that_recompute() -> None:
    planned = search_plan(large(memory=250 * MEGABYTE, devices=1))
    console = Console(file=io.StringIO(), width=120)
    show_plan(planned.best, planned, console)
    assert "recompute  activations of stage 0, in each backward" in console.file.getvalue()


def test_running_plan_recomputes_when_its_device_has_less_memory() -> None:
    of = large(memory=10**10, devices=1)
    running = search_plan(of).best.plan
    changed = replan(running, large(memory=250 * MEGABYTE, devices=1), steps=100)
    assert changed.planned.best.plan.recompute == (True,)
    assert not changed.stays
    back = replan(changed.planned.best.plan, of, steps=100)
    assert back.planned.best.plan.recompute == ()
    assert "pays for a pause" in back.why
    assert replan(changed.planned.best.plan, of, steps=0).planned.best.plan.recompute == (True,)


def test_plan_file_has_recompute_only_if_a_stage_does(tmp_path: Path) -> None:
    plan = Plan(layers_per_stage=(1, 2), pipelines=(PipelinePlan(),))
    for flags in ((), (False, True)):
        path = tmp_path / "plan.json"
        replace(plan, recompute=flags).save(path)
        assert ("recompute" in path.read_text()) == bool(flags)
        assert Plan.load(path).recompute == flags
    assert replace(plan, recompute=(False, False)) == plan
    with pytest.raises(PlanError, match="for 2 stages"):
        replace(plan, recompute=(True,))
