"""Degrees of a plan: the candidates, and errors for impossible requests."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import DescriptionError, PlanError
from polyrhythm.plan.draft import PlanShape
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.shapes import infeasible_error, shapes, sizes_for
from tests.pure.plan_examples import GIB, cluster, profile
from tests.pure.step_cases import random_model


def problem(
    num_devices: int,
    job: TrainingJob,
    *,
    num_layers: int = 8,
    sizes: tuple[int, ...] = (1,),
    memory: int | None = None,
) -> Problem:
    where = cluster({"here": num_devices})
    devices = tuple(replace(device, memory=memory) for device in where.devices)
    return Problem(
        cluster=replace(where, devices=devices),
        profile=random_model(np.random.default_rng(0), num_layers, sizes=sizes),
        job=job,
    )


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 64))
def test_every_shape_has_devices_layers_and_a_microbatch_for_all(
    num_devices: int, num_layers: int, batch: int
) -> None:
    of = problem(num_devices, TrainingJob(batch_size=batch), num_layers=num_layers, sizes=(1, 4))
    found = list(shapes(of))
    assert len(set(found)) == len(found)
    for shape in found:
        assert shape.num_places <= num_devices
        assert shape.num_stages <= num_layers
        assert batch % shape.microbatch_size == 0
        assert shape.num_pipelines * shape.microbatch_size <= batch
    assert PlanShape(1, min(num_devices, batch), 1) in found
    most_stages = min(num_devices, num_layers)
    assert {shape.num_stages for shape in found} == set(range(1, most_stages + 1))


@pytest.mark.parametrize("num_devices", [7, 13, 31])
def test_prime_numbers_of_devices_are_used_as_far_as_they_go(num_devices: int) -> None:
    found = set(shapes(problem(num_devices, TrainingJob(batch_size=64))))
    assert {PlanShape(1, num_devices, 1), PlanShape(2, num_devices // 2, 1)} <= found
    assert PlanShape(3, num_devices // 3, 1) in found


def test_large_numbers_of_stages_are_sampled_sparsely() -> None:
    of = problem(96, TrainingJob(batch_size=8), num_layers=96)
    stages = {shape.num_stages for shape in shapes(of)}
    assert stages >= {*range(1, 17), 24, 32, 48, 96}
    assert len(stages) < 30


def test_some_shapes_leave_devices_out() -> None:
    found = [
        s.num_pipelines
        for s in shapes(problem(16, TrainingJob(batch_size=64)))
        if s.num_stages == 2
    ]
    assert found == [8, 6, 4, 2]


def test_requested_degrees_are_kept() -> None:
    of = problem(
        12,
        TrainingJob(batch_size=24, num_stages=3, num_pipelines=2, microbatch_size=2),
        sizes=(1, 4),
    )
    assert list(shapes(of)) == [PlanShape(3, 2, 2)]
    of = problem(12, TrainingJob(batch_size=24, num_stages=5))
    assert [(s.num_stages, s.num_pipelines) for s in shapes(of)] == [(5, 2), (5, 1)]
    of = problem(12, TrainingJob(batch_size=24, num_pipelines=5))
    assert [(s.num_stages, s.num_pipelines) for s in shapes(of)] == [(1, 5), (2, 5)]


@given(st.integers(1, 96))
def test_sizes_are_measured_ones_and_powers_of_two_between_that_divide_the_batch(
    batch: int,
) -> None:
    of = problem(2, TrainingJob(batch_size=batch), sizes=(1, 3, 12))
    assert sizes_for(of) == tuple(size for size in (1, 2, 3, 4, 8, 12) if batch % size == 0)


def test_a_batch_that_no_size_divides_is_refused_with_one_that_does() -> None:
    of = problem(2, TrainingJob(batch_size=7), sizes=(2, 4))
    with pytest.raises(PlanError, match=r"a batch of 7 for micro-batches of 2, 4[^$]*batch of 6"):
        sizes_for(of)
    with pytest.raises(PlanError, match="use a batch of 2"):
        sizes_for(replace(of, job=TrainingJob(batch_size=1)))


def test_unmeasured_size_is_refused() -> None:
    of = problem(2, TrainingJob(batch_size=8, microbatch_size=8), sizes=(1, 4))
    with pytest.raises(DescriptionError, match="micro-batches of 8"):
        sizes_for(of)


@pytest.mark.parametrize(
    "job", [TrainingJob(batch_size=8, num_stages=9), TrainingJob(batch_size=8, num_stages=5)]
)
def test_more_stages_than_layers_or_devices_are_infeasible(job: TrainingJob) -> None:
    of = problem(4, job)
    assert list(shapes(of)) == []
    assert "stages x 1 pipelines for 4 devices and 8 layers" in str(infeasible_error(of))
    assert "at most 4 stages" in str(infeasible_error(of))


def test_more_pipelines_than_microbatches_are_refused() -> None:
    of = problem(8, TrainingJob(batch_size=8, num_pipelines=4), sizes=(4,))
    assert list(shapes(of)) == []
    assert "4 pipelines for 2 micro-batches of 4" in str(infeasible_error(of))
    assert "at most 2 pipelines, or a batch of 16" in str(infeasible_error(of))


def test_layer_that_fits_nowhere_is_named_with_the_missing_memory() -> None:
    large = replace(profile().layers[3], name="embedding", parameter_bytes=GIB)
    layers = (*profile().layers[:3], large, *profile().layers[4:])
    where = cluster({"here": 4})  # 1 GiB each, of which 0.1 are reserved
    of = Problem(
        cluster=where,
        profile=replace(profile(), layers=layers),
        job=TrainingJob(batch_size=8),
    )
    error = str(infeasible_error(of))
    assert "layer 'embedding' alone needs 4.00 GiB" in error
    assert "more than 0.90 GiB" in error
    assert "a device with 3.10 GiB more" in error


def test_memory_error_says_how_much_is_missing() -> None:
    layers = tuple(replace(layer, parameter_bytes=GIB // 8) for layer in profile().layers)
    of = Problem(
        cluster=cluster({"here": 4}),
        profile=replace(profile(), layers=layers),
        job=TrainingJob(batch_size=8),
    )
    error = str(infeasible_error(of))
    assert "stage 1 (layers 2 to 3) needs 1.00 GiB" in error
    assert "'here/1' has 0.90 GiB to give" in error
    assert "0.10 GiB to 'here/1'" in error
