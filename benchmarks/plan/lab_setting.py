"""What is planned for the lab: GPT3-XL around the world, and a few machines of unequal speed.

Time and bytes are scaled down alike, so that ratios stay and 16 workers share two cores.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.describe.scale import fewer_devices, scaled_cluster
from polyrhythm.plan.job import TrainingJob
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.predict import Prediction, predict
from polyrhythm.plan.problem import Problem
from polyrhythm.schedule.plan_schedules import PlannedSchedules
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

# GPT3-XL as DT-FM trains it: per layer, with micro-batches of one sequence.
_NUM_LAYERS = 24
_LAYER_FORWARD: Seconds = 240_518_168_576 / 60e12  # operations, at what a V100 does in a second
_LAYER_PARAMETERS = 50_358_272
_ACTIVATIONS: Bytes = 8_388_608
_BACKWARD = 3  # times a forward, which is done again: activations are not kept
_GRADIENT: Bytes = 4  # of one parameter
_UNEVEN_SPEEDS = (1.0, 1.0, 1 / 3, 1 / 3)
_UNEVEN_LAYERS = 32
_NO_LIMIT: BytesPerSecond = 1e15
_DRAWS = 8  # of random placements, for each that is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How far the lab is from what it stands for, and how long it measures."""

    num_stages: int
    num_pipelines: int
    num_microbatches: int  # of a pipeline, on average
    time_scale: float  # seconds here per second there
    byte_scale: float
    num_random: int  # placements to compare with
    num_steps: int  # of one run; the first does not count
    uneven_forward: Seconds  # of a layer on a fast device
    uneven_microbatches: int
    uneven_rounds: int
    budget: Seconds  # after which no run is repeated


# Bytes: what is under way on the longest link is less than TCP sends before it hears anything.
# Time: a step of the 16 processes takes them 3 s of two cores, and must take much longer than that.
FULL = Size(
    num_stages=4,
    num_pipelines=4,
    num_microbatches=64,
    time_scale=0.4,
    byte_scale=1 / 2048,
    num_random=5,
    num_steps=2,
    uneven_forward=0.001,
    uneven_microbatches=32,
    uneven_rounds=2,
    budget=150.0,
)
QUICK = Size(
    num_stages=2,
    num_pipelines=2,
    num_microbatches=8,
    time_scale=0.01,
    byte_scale=1 / 2048,
    num_random=1,
    num_steps=2,
    uneven_forward=0.0001,
    uneven_microbatches=12,
    uneven_rounds=1,
    budget=0.0,
)


def world(size: Size) -> Problem:
    """As many devices as workers, of all regions; in seconds and bytes of the lab."""
    layers = [
        Layer(
            name=f"layer{number}",
            forward=_LAYER_FORWARD * size.time_scale,
            backward=_BACKWARD * _LAYER_FORWARD * size.time_scale,
            parameter_bytes=round(_LAYER_PARAMETERS * _GRADIENT * size.byte_scale),
            activation_bytes=round(_ACTIVATIONS * size.byte_scale),
            stored_bytes=0,
        )
        for number in range(_NUM_LAYERS)
    ]
    num_workers = size.num_stages * size.num_pipelines
    cluster = fewer_devices(Cluster.load("case5_worldwide"), num_workers)
    # A host of the lab sends to all others at once, with no limit of its own.
    devices = tuple(replace(device, uplink=_NO_LIMIT) for device in cluster.devices)
    cluster = replace(cluster, devices=devices)
    return Problem(
        cluster=scaled_cluster(cluster, time_scale=size.time_scale, byte_scale=size.byte_scale),
        profile=ModelProfile(name="GPT3-XL in the lab", microbatch_size=1, layers=tuple(layers)),
        job=TrainingJob(
            batch=size.num_microbatches * size.num_pipelines,
            num_stages=size.num_stages,
            num_pipelines=size.num_pipelines,
            microbatch_size=1,
        ),
        schedules=PlannedSchedules(),
    )


def uneven(size: Size) -> Problem:
    """Fast and slow devices side by side, for one pipeline of equal layers."""
    layers = [
        Layer(
            name=f"layer{number}",
            forward=size.uneven_forward,
            backward=_BACKWARD * size.uneven_forward,
            parameter_bytes=4,
            activation_bytes=4096,
            stored_bytes=0,
        )
        for number in range(_UNEVEN_LAYERS)
    ]
    return Problem(
        cluster=Cluster(
            name="uneven",
            devices=tuple(
                Device(name=f"d{number}", region="here", speed=speed)
                for number, speed in enumerate(_UNEVEN_SPEEDS)
            ),
            regions=("here",),
            latency=((0.0002,),),
            bandwidth=((12.5e6,),),
        ),
        profile=ModelProfile(name="equal layers", microbatch_size=1, layers=tuple(layers)),
        job=TrainingJob(
            batch=size.uneven_microbatches,
            num_stages=len(_UNEVEN_SPEEDS),
            num_pipelines=1,
            microbatch_size=1,
        ),
        schedules=PlannedSchedules(),
    )


def random_plans(problem: Problem, number: int) -> list[Prediction]:
    """Random placements, from a lucky one to an unlucky one: so few stand for all better so.

    Of many that are drawn, the middle one of each of `number` classes of equal size.
    """
    draw = random.Random(0)
    names = [device.name for device in problem.cluster.devices]
    drawn = [placed(problem, draw.sample(names, len(names))) for _ in range(_DRAWS * number)]
    drawn.sort(key=lambda one: one.time.total)
    return drawn[_DRAWS // 2 :: _DRAWS]


def placed(problem: Problem, devices: Sequence[str]) -> Prediction:
    """Equal stages and micro-batches on these devices, with the best schedules for that."""
    job = problem.job
    assert job.num_stages, "it is given"
    assert job.num_pipelines, "it is given"
    pipelines = tuple(
        PipelinePlan(
            devices=tuple(devices[first : first + job.num_stages]),
            num_microbatches=job.batch // job.num_pipelines,
        )
        for first in range(0, len(devices), job.num_stages)
    )
    plan = Plan(
        layers_per_stage=(problem.num_layers // job.num_stages,) * job.num_stages,
        pipelines=pipelines,
        microbatch_size=job.microbatch_size,
    )
    return predict(plan, problem)
