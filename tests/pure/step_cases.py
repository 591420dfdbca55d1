"""Random links, steps and clusters, for tests of step times."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from polyrhythm.cost.step import Replica, StageRun, StageWork, StepSpec
from polyrhythm.cost.sync import Links, Sync
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import AtSize, Layer, ModelProfile
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.problem import Problem
from polyrhythm.schedule.spec import ScheduleSpec

seeds = st.integers(0, 2**32 - 1)


def links_of(latency: np.ndarray, bandwidth: np.ndarray) -> Links:
    """Return links with uplinks as fast as each device's fastest link."""
    others = np.where(np.eye(len(bandwidth), dtype=bool), 0.0, bandwidth).max(axis=1)
    uplinks = np.where(others > 0, others, np.inf)
    return Links(latency=latency, bandwidth=bandwidth, uplinks=uplinks)


def even_links(num_devices: int, *, latency: float = 0.0, bandwidth: float = 1.0) -> Links:
    shape = (num_devices, num_devices)
    return links_of(np.full(shape, latency), np.full(shape, bandwidth))


def random_links(
    rng: np.random.Generator, num_devices: int, *, symmetric: bool = False, latency: float = 1.0
) -> Links:
    shape = (num_devices, num_devices)
    delay, bandwidth = latency * rng.uniform(0, 1, shape), rng.uniform(0.1, 3, shape)
    if symmetric:
        delay, bandwidth = (delay + delay.T) / 2, (bandwidth + bandwidth.T) / 2
    return links_of(delay, bandwidth)


def replica(runs: tuple[StageRun, ...], num_microbatches: int, spec: str = "1f1b") -> Replica:
    schedule = ScheduleSpec.parse(spec).build(
        num_stages=len(runs), num_microbatches=num_microbatches
    )
    return Replica(runs=runs, schedule=schedule)


def even_step(
    num_stages: int,
    num_pipelines: int,
    num_microbatches: int,
    *,
    spec: str = "1f1b",
    sync: Sync = Sync.ALL_REDUCE,
    gradients: float = 0.0,
    links: Links | None = None,
) -> StepSpec:
    """Return a step with 1 s forward and 2 s backward per stage; only gradients are sent."""
    work = StageWork(forward=1.0, backward=2.0, activation_bytes=0.0, gradient_bytes=gradients)
    num_devices = num_stages * num_pipelines
    return StepSpec(
        replicas=tuple(
            replica(
                tuple(
                    StageRun(stage * num_pipelines + p, stage, stage + 1)
                    for stage in range(num_stages)
                ),
                num_microbatches,
                spec,
            )
            for p in range(num_pipelines)
        ),
        stages=(work,) * num_stages,
        speeds=(1.0,) * num_devices,
        links=links or even_links(num_devices),
        sync=sync,
    )


def random_step(rng: np.random.Generator, sync: Sync | None = None) -> StepSpec:
    """Return up to 4 unequal pipelines of up to 5 stages; a device may have several in a row."""
    num_stages, num_pipelines = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    devices = rng.permutation(num_stages * num_pipelines).reshape(num_stages, num_pipelines)
    replicas = []
    for p in range(num_pipelines):
        cuts = [0, *(s for s in range(1, num_stages) if rng.random() < 0.8), num_stages]
        runs = tuple(StageRun(int(devices[a, p]), a, b) for a, b in pairwise(cuts))
        spec = ("1f1b", "gpipe", "kfkb:2")[rng.integers(3)]
        replicas.append(replica(runs, int(rng.integers(1, 9)), spec))
    sizes = rng.choice([0.0, 1.0, 10.0], 2)
    return StepSpec(
        replicas=tuple(replicas),
        stages=tuple(
            StageWork(
                forward=float(rng.uniform(0.1, 1)),
                backward=float(rng.uniform(0.1, 2)),
                activation_bytes=float(sizes[0] * rng.uniform()),
                gradient_bytes=float(sizes[1] * rng.uniform()),
            )
            for _ in range(num_stages)
        ),
        speeds=tuple(map(float, rng.uniform(0.3, 2, devices.size))),
        links=random_links(rng, devices.size, latency=float(rng.choice([0, 0.1, 1]))),
        sync=sync or list(Sync)[rng.integers(len(Sync))],
    )


def random_cluster(
    rng: np.random.Generator, num_devices: int, *, num_regions: int = 3, memory: int | None = None
) -> Cluster:
    """Return devices of unequal speed and price in far regions; links differ by direction."""
    inside = np.eye(num_regions, dtype=bool)
    shape = (num_regions, num_regions)
    latency = np.where(inside, 0.001, rng.uniform(0.01, 0.1, shape))
    bandwidth = np.where(inside, 1e9, rng.uniform(5e6, 1e8, shape))
    return Cluster(
        name="random",
        devices=tuple(
            Device(
                name=f"d{i}",
                region=f"r{rng.integers(num_regions)}",
                memory=memory,
                speed=float(rng.uniform(0.5, 2)),
                price_per_hour=float(rng.uniform(0.5, 3)),
            )
            for i in range(num_devices)
        ),
        regions=tuple(f"r{i}" for i in range(num_regions)),
        latency=tuple(map(tuple, latency.tolist())),
        bandwidth=tuple(map(tuple, bandwidth.tolist())),
        egress_price_per_gb=tuple(map(float, rng.uniform(0, 0.2, num_regions))),
    )


def random_model(
    rng: np.random.Generator, num_layers: int, *, sizes: tuple[int, ...] = (1,)
) -> ModelProfile:
    """Return unequal layers; times and bytes are proportional to the micro-batch size."""

    def layer(number: int) -> Layer:
        forward, backward = float(rng.uniform(0.01, 0.05)), float(rng.uniform(0.02, 0.1))
        sent, stored, weights = (int(rng.uniform(*r)) for r in ((1e4, 1e6), (1e5, 1e7), (1e5, 4e6)))
        first = Layer(
            name=f"layer {number}",
            forward=forward * sizes[0],
            backward=backward * sizes[0],
            parameter_bytes=weights,
            activation_bytes=sent * sizes[0],
            stored_bytes=stored * sizes[0],
        )
        others = tuple(
            AtSize(
                microbatch_size=size,
                forward=forward * size,
                backward=backward * size,
                activation_bytes=sent * size,
                stored_bytes=stored * size,
            )
            for size in sizes[1:]
        )
        return replace(first, sizes=others)

    return ModelProfile(
        name="random", microbatch_size=sizes[0], layers=tuple(map(layer, range(num_layers)))
    )


def random_problem(
    rng: np.random.Generator, num_devices: int, num_layers: int, job: TrainingJob, **options: int
) -> Problem:
    return Problem(
        cluster=random_cluster(rng, num_devices, **options),
        profile=random_model(rng, num_layers),
        job=job,
    )
