"""Clusters, models and plans by hand, for tests of printed plans."""

from dataclasses import replace
from itertools import islice

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import PipelinePlan, Plan, PredictedStep
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem

GIB = 2**30


def cluster(sizes: dict[str, int], *, price: float | None = 1.0) -> Cluster:
    """Return a cluster with this many devices per region; links have 20 ms and 1 Gbit/s."""
    num_regions = len(sizes)
    return Cluster(
        name="some sites",
        devices=tuple(
            Device(name=f"{name}/{i}", region=name, memory=GIB, price_per_hour=price)
            for name, size in sizes.items()
            for i in range(size)
        ),
        regions=tuple(sizes),
        latency=((0.02,) * num_regions,) * num_regions,
        bandwidth=((125e6,) * num_regions,) * num_regions,
    )


def profile(num_layers: int = 8, *, microbatch_size: int = 2) -> ModelProfile:
    return ModelProfile(
        name="a model",
        microbatch_size=microbatch_size,
        layers=tuple(
            Layer(
                name=f"layer {i}",
                forward=0.01,
                backward=0.02,
                parameter_bytes=1_000_000,
                activation_bytes=100_000,
                stored_bytes=1_000_000,
            )
            for i in range(num_layers)
        ),
    )


def problem(
    where: Cluster, what: ModelProfile | None = None, job: TrainingJob | None = None
) -> Problem:
    return Problem(
        cluster=where,
        profile=what or profile(),
        job=job or TrainingJob(batch_size=32),
    )


def predicted(
    num_stages: int, num_pipelines: int, of: Problem, *, by_stage: bool = False
) -> Prediction:
    """Predict a plan that uses devices in order, by pipeline or by stage; the rest is left out."""
    names = [device.name for device in of.cluster.devices]
    used = names[: num_stages * num_pipelines]
    step = num_pipelines if by_stage else 1
    first = range(num_pipelines) if by_stage else range(0, len(used), num_stages)
    size = of.profile.microbatch_size
    each, rest = divmod(len(of.profile.layers), num_stages)
    plan = Plan(
        layers_per_stage=tuple(each + (stage < rest) for stage in range(num_stages)),
        pipelines=tuple(
            PipelinePlan(
                devices=tuple(islice(used[start::step], num_stages)),
                num_microbatches=max(1, of.job.batch_size // size // num_pipelines),
            )
            for start in first
        ),
        microbatch_size=size,
        cluster=of.cluster.name,
        model=of.profile.name,
        left_out=tuple(names[len(used) :]),
        sync=of.job.sync,
    )
    found = predict(plan, of)
    expected = PredictedStep(step=found.time.total, bound=0.8 * found.time.total, parts=found.parts)
    return replace(found, plan=replace(found.plan, predicted=expected))
