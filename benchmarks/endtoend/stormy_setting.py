"""The stormy world: GPT3-XL on 16 machines around the world, slow at random, on bursty links.

Time and bytes are those of `bench/plan`'s lab setting, with real layers of a small model: one byte
here stands for as many as a layer of GPT3-XL has more.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.endtoend.task import ACTIVATIONS, layer_bytes
from benchmarks.plan import lab_setting
from benchmarks.plan.lab_setting import world
from benchmarks.sleeping.job import ENVELOPE
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange, Scenario
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

NUM_LAYERS = 24
LAYER: Bytes = 50_358_272 * 4  # the gradients of a layer of GPT3-XL, in four bytes each
BUCKET: Bytes = 25 * 2**20  # of DDP, by default
_SMALL_LAYER = 1  # any but the first and the last, which have an embedding and a head
PREEMPTED_SHARE = 0.4  # of draws, as in `bench/pipeline`
PREEMPTED = 1 / 4  # of a link's bandwidth
_QUICK_LATENCY: Seconds = 0.0002
_QUICK_BANDWIDTH: BytesPerSecond = 125e6
DWELL: Seconds = 2.0  # until the next draw, in the time of the real world: a sixth of our step


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    num_stages: int
    num_pipelines: int
    num_microbatches: int  # of a pipeline, of one sample each
    time_scale: float
    num_steps: int  # of ours
    num_held_out: int
    rival_steps: int  # of each run
    rival_sizes: tuple[int, ...]  # samples of a micro-batch, to choose from
    num_layouts: int
    patience: Seconds  # for a step


FULL = Size(
    num_stages=4,
    num_pipelines=4,
    num_microbatches=16,
    time_scale=0.4,
    num_steps=48,
    num_held_out=512,
    rival_steps=1,
    rival_sizes=(1, 2, 4),
    num_layouts=3,
    patience=120.0,
)
QUICK = Size(
    num_stages=2,
    num_pipelines=2,
    num_microbatches=4,
    time_scale=0.02,
    num_steps=4,
    num_held_out=16,
    rival_steps=1,
    rival_sizes=(1, 2),
    num_layouts=2,
    patience=60.0,
)


def byte_scale() -> float:
    """Bytes here per byte there."""
    return layer_bytes(NUM_LAYERS)[_SMALL_LAYER] / LAYER


def problem_of(size: Size) -> Problem:
    """In seconds and bytes of the lab, with the layers as they are."""
    setting = replace(
        lab_setting.FULL,
        num_stages=size.num_stages,
        num_pipelines=size.num_pipelines,
        num_microbatches=size.num_microbatches,
        time_scale=size.time_scale,
        byte_scale=byte_scale(),
    )
    problem = world(setting)
    layers = tuple(
        replace(layer, parameter_bytes=weights, activation_bytes=ACTIVATIONS + ENVELOPE)
        for layer, weights in zip(problem.profile.layers, layer_bytes(NUM_LAYERS), strict=True)
    )
    return replace(problem, profile=replace(problem.profile, layers=layers))


def random_layouts(problem: Problem, size: Size) -> list[tuple[str, ...]]:
    """All devices in a random order, a seed each."""
    names = [device.name for device in problem.cluster.devices]
    return [
        tuple(random.Random(seed).sample(names, len(names))) for seed in range(size.num_layouts)
    ]


def laid_out(devices: Sequence[str], size: Size, microbatch_size: int) -> Plan:
    """Equal stages and pipelines on devices in a row."""
    number = size.num_microbatches // microbatch_size
    starts = range(0, len(devices), size.num_stages)
    return Plan(
        layers_per_stage=(NUM_LAYERS // size.num_stages,) * size.num_stages,
        pipelines=tuple(
            PipelinePlan(
                devices=tuple(devices[first : first + size.num_stages]),
                num_microbatches=number,
                schedule="1f1b",
            )
            for first in starts
        ),
        microbatch_size=microbatch_size,
    )


def slow_machines() -> Scenario:
    """SDPipe's setting B; sleeps are relative to the work, whatever the scale of time."""
    return Scenario.load("sdpipe_b")


def quick(cluster: Cluster) -> Cluster:
    """The same hosts with links over which connections and first copies are made in a moment."""
    size = range(len(cluster.regions))
    return replace(
        cluster,
        latency=tuple(tuple(_QUICK_LATENCY for _ in size) for _ in size),
        bandwidth=tuple(tuple(_QUICK_BANDWIDTH for _ in size) for _ in size),
    )


def links_of(cluster: Cluster) -> list[LinkChange]:
    """That make any network this one."""
    return [
        LinkChange(
            at=0.0,
            source=source,
            target=target,
            latency=cluster.latency[row][column],
            bandwidth=cluster.bandwidth[row][column],
            one_way=True,
        )
        for row, source in enumerate(cluster.regions)
        for column, target in enumerate(cluster.regions)
    ]


def bursts(cluster: Cluster, *, dwell: Seconds, until: Seconds, seed: int) -> list[LinkChange]:
    """Every direction between two regions, preempted or not, drawn again after a random dwell."""
    draw, found = random.Random(seed), list[LinkChange]()
    for row, source in enumerate(cluster.regions):
        for column, target in enumerate(cluster.regions):
            at = until if row == column else 0.0
            while at < until:
                left = PREEMPTED if draw.random() < PREEMPTED_SHARE else 1.0
                found.append(
                    LinkChange(
                        at=at,
                        source=source,
                        target=target,
                        bandwidth=cluster.bandwidth[row][column] * left,
                        one_way=True,
                    )
                )
                at += draw.expovariate(1 / dwell)
    return sorted(found, key=lambda change: change.at)
