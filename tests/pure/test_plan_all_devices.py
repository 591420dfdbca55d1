"""Plans in which every device runs one stage."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import AtSize, Layer, ModelProfile
from polyrhythm.errors import PlanError
from polyrhythm.plan.all_devices import merge_layers, plan_all_devices
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import search_plan


def cluster(speeds: Sequence[float], *, memory: int | None = None) -> Cluster:
    """Return two regions with a slow link between them."""
    names = tuple(f"d{number}" for number in range(len(speeds)))
    half = len(names) // 2
    return Cluster(
        name="halves",
        devices=tuple(
            Device(name=name, region=name, speed=speed, memory=memory)
            for name, speed in zip(names, speeds, strict=True)
        ),
        regions=names,
        latency=tuple((0.001,) * len(names) for _ in names),
        bandwidth=tuple(
            tuple(1e8 if (a < half) == (b < half) else 1e6 for b in range(len(names)))
            for a in range(len(names))
        ),
    )


def profile(num_layers: int, *, parameter_bytes: int = 100_000) -> ModelProfile:
    layers = tuple(
        Layer(
            name=str(number),
            forward=0.01 * (1 + number % 2),
            backward=0.02,
            parameter_bytes=parameter_bytes,
            activation_bytes=1000 + number,
            stored_bytes=2000,
            sizes=(
                AtSize(
                    microbatch_size=1,
                    forward=0.006,
                    backward=0.012,
                    activation_bytes=500,
                    stored_bytes=1000,
                ),
            ),
        )
        for number in range(num_layers)
    )
    return ModelProfile(name="test", microbatch_size=2, layers=layers)


def problem(speeds: Sequence[float], num_layers: int = 6, **more: int) -> Problem:
    job = TrainingJob(batch_size=8, sync="decoupled")
    return Problem(
        cluster=cluster(speeds, memory=more.get("memory")),
        profile=profile(num_layers, parameter_bytes=more.get("parameter_bytes", 100_000)),
        job=job,
    )


@pytest.mark.long
def test_every_device_runs_one_stage_with_the_best_degrees() -> None:
    asked = problem((1.0, 0.05, 1.0, 0.05))  # a general plan would leave the slow devices out
    plan = plan_all_devices(asked)
    devices = [device.name for device in asked.cluster.devices]
    assert sorted(d for pipeline in plan.pipelines for d in pipeline.devices) == devices
    assert plan.left_out == ()
    assert plan.batch == 8
    assert plan.predicted is not None
    for stages in (1, 2, 4):
        job = replace(asked.job, num_stages=stages, num_pipelines=4 // stages)
        other = search_plan(replace(asked, job=job)).best.plan.predicted
        assert other is not None
        assert plan.predicted.step <= other.step * (1 + 1e-9)


def test_layer_block_stays_on_one_stage() -> None:
    together = (1, 3, 2)
    plan = plan_all_devices(problem((1.0, 1.0)), layer_blocks=together)
    assert sum(plan.layers_per_stage) == 6
    assert plan.num_stages == 2
    assert set(accumulate(plan.layers_per_stage)) <= set(accumulate(together))


def test_merged_layer_is_the_sum_of_its_layers() -> None:
    whole = profile(4)
    joined = merge_layers(whole, (1, 3))
    first, rest = joined.layers
    assert (first.name, first.sizes[0].forward) == ("0", whole.layers[0].sizes[0].forward)
    assert rest.forward == pytest.approx(sum(layer.forward for layer in whole.layers[1:]))
    assert rest.parameter_bytes == 300_000
    assert rest.activation_bytes == whole.layers[3].activation_bytes
    assert joined.microbatch_sizes == whole.microbatch_sizes
    assert joined.at(1).layers[1].stored_bytes == 3000
    assert rest.recompute_bytes == sum(layer.activation_bytes for layer in whole.layers[:3])


def test_merged_layer_has_the_temporary_memory_of_its_layers() -> None:
    whole = profile(3)
    measured = tuple(
        replace(layer, temporary_bytes=each, cast_bytes=7, sizes=())
        for layer, each in zip(whole.layers, (10**9, 0, 50), strict=True)
    )
    first, rest = merge_layers(replace(whole, layers=measured), (1, 2)).layers
    assert (first.temporary_bytes, first.cast_bytes) == (10**9, 7)
    assert (rest.temporary_bytes, rest.cast_bytes) == (50, 14)
    assert merge_layers(whole, (1, 2)).layers[1].temporary_bytes is None


def test_more_devices_than_layers_become_pipelines() -> None:
    plan = plan_all_devices(problem((1.0,) * 4, num_layers=2))
    assert plan.num_workers == 4
    assert plan.num_stages <= 2


def test_model_that_fits_no_device_is_refused_with_the_missing_memory() -> None:
    with pytest.raises(PlanError, match="GiB"):
        plan_all_devices(problem((1.0, 1.0), memory=1_000_000, parameter_bytes=10**7))
