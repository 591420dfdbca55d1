"""Small planning problems, and the enumeration of all their plans."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from typing import Any

from hypothesis import strategies as st

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.problem import Problem

GIGABYTE = 10**9


def layers(works: Sequence[float], *, parameters: int = 10**8, activations: int = 10**7) -> tuple:
    """Return layers; a third of the work is forward."""
    return tuple(
        Layer(
            name=f"layer{number}",
            forward=work / 3,
            backward=work * 2 / 3,
            parameter_bytes=parameters,
            activation_bytes=activations,
            stored_bytes=2 * activations,
        )
        for number, work in enumerate(works)
    )


def cluster(
    sizes: Sequence[int],
    *,
    speeds: Sequence[float] = (1.0,),
    inner: tuple[float, float] = (1e-4, 1.25e9),
    outer: tuple[float, float] = (0.03, 1.25e7),
    **of_device: object,
) -> Cluster:
    """Return a cluster with `sizes` devices per region; `inner`, `outer`: (latency, bandwidth)."""
    devices = [
        Device(name=f"r{region}/{number}", region=f"r{region}", **of_device)
        for region, size in enumerate(sizes)
        for number in range(size)
    ]
    faster = [replace(d, speed=speeds[i % len(speeds)]) for i, d in enumerate(devices)]
    regions = range(len(sizes))
    return Cluster(
        name="small",
        devices=tuple(faster),
        regions=tuple(f"r{region}" for region in regions),
        latency=tuple(tuple(inner[0] if a == b else outer[0] for b in regions) for a in regions),
        bandwidth=tuple(tuple(inner[1] if a == b else outer[1] for b in regions) for a in regions),
    )


def problem(
    over: Cluster, works: Sequence[float] = (1.0,) * 8, *, batch: int = 16, **options: Any
) -> Problem:
    profile = ModelProfile(name="model", microbatch_size=1, layers=layers(works))
    job = TrainingJob(batch_size=batch, **options)
    return Problem(cluster=over, profile=profile, job=job)


@st.composite
def small_problems(draw: st.DrawFn, *, max_devices: int = 3, max_layers: int = 3) -> Problem:
    """Draw a problem in which every device is a region with its own links."""
    size = draw(st.integers(1, max_devices))
    speeds = [draw(st.sampled_from([0.3, 1.0, 2.0])) for _ in range(size)]
    bandwidths = st.sampled_from([1e7, 5e7, 1e9])
    latencies = st.sampled_from([1e-4, 0.05])
    matrix = [[draw(bandwidths) for _ in range(size)] for _ in range(size)]
    far = [[draw(latencies) for _ in range(size)] for _ in range(size)]
    for a, b in combinations(range(size), 2):
        matrix[a][b], far[a][b] = matrix[b][a], far[b][a]
    names = tuple(f"d{number}" for number in range(size))
    over = Cluster(
        name="small",
        devices=tuple(
            Device(name=name, region=name, speed=speed)
            for name, speed in zip(names, speeds, strict=True)
        ),
        regions=names,
        latency=tuple(map(tuple, far)),
        bandwidth=tuple(map(tuple, matrix)),
    )
    works = draw(st.lists(st.sampled_from([0.2, 1.0]), min_size=1, max_size=max_layers))
    sync = draw(st.sampled_from(["all_reduce", "decoupled", "groups", "ring", "sequential"]))
    return problem(over, works, batch=draw(st.integers(1, 4)), sync=sync)


def all_plans(over: Problem) -> Iterator[Plan]:
    """Yield all plans: pipelines of some devices, partitions of layers, micro-batches."""
    names = [device.name for device in over.cluster.devices]
    for teams in _teams(names, most=over.num_layers):
        if len(teams) > over.job.batch_size:
            continue
        for cuts in _all_cuts([len(team) for team in teams], over.num_layers):
            ends = sorted({end for cut in cuts for end in cut})
            for numbers in _compositions(over.job.batch_size, len(teams)):
                for schedule in ("gpipe", "1f1b"):
                    yield Plan(
                        layers_per_stage=tuple(
                            b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)
                        ),
                        pipelines=tuple(
                            PipelinePlan(
                                devices=tuple(_holder(team, cut, end) for end in ends),
                                num_microbatches=number,
                                schedule=schedule,
                            )
                            for team, cut, number in zip(teams, cuts, numbers, strict=True)
                        ),
                        microbatch_size=1,
                        sync=over.job.sync,
                    )


def _holder(team: Sequence[str], cut: Sequence[int], end: int) -> str:
    return next(device for device, last in zip(team, cut, strict=True) if end <= last)


def _teams(names: Sequence[str], *, most: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield teams of devices in order; not all devices need to be used."""
    seen = set()
    for count in range(1, len(names) + 1):
        for row in permutations(names, count):
            for bars in range(count):
                for ends in combinations(range(1, count), bars):
                    edges = [0, *ends, count]
                    teams = frozenset(row[a:b] for a, b in pairwise(edges))
                    if max(map(len, teams)) <= most and teams not in seen:
                        seen.add(teams)
                        yield tuple(sorted(teams))


def _all_cuts(sizes: Sequence[int], num_layers: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield, for each team, the layers at which its devices' parts end."""
    if not sizes:
        yield ()
        return
    for ends in combinations(range(1, num_layers), sizes[0] - 1):
        for rest in _all_cuts(sizes[1:], num_layers):
            yield ((*ends, num_layers), *rest)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, total), parts - 1):
        edges = [0, *ends, total]
        yield tuple(b - a for a, b in pairwise(edges))
