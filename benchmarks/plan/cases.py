"""Clusters with a known best layout, GPT3-XL as DT-FM trains it, and plans of equal pipelines."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyrhythm.cost.dtfm import PUBLISHED, PairTimes, device_links, pair_times
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.types import AUTO, Bytes, Seconds

# Cost of the best layout of 8 stages and 8 pipelines, to four decimals. Believed to be optimal:
# by exact search for cases 3 to 5, by an argument about the slow links for 1 and 2.
BEST: dict[str, Seconds] = {
    "case1_datacenter_ondemand": 3.4398,
    "case2_datacenter_spot": 31.6342,
    "case3_multi_datacenter": 16.0868,
    "case4_regional": 34.8020,
    "case5_worldwide": 49.2184,
}
ROUNDING: Seconds = 5e-5  # of these costs
WORLDWIDE = "case5_worldwide"

# GPT3-XL in DT-FM's evaluation: hidden size 2048, sequences of 2048 tokens, activations in fp16.
# Of one layer and a micro-batch of one sequence:
XL_FORWARD: Seconds = 240_518_168_576 / 60e12  # operations, at the assumed rate of a V100
XL_PARAMETERS = 50_358_272
XL_ACTIVATIONS: Bytes = 2048 * 2048 * 2
BACKWARD_PER_FORWARD = 3  # activations are computed again

# A search with the same seed must not draw the very permutation that undoes the shuffle.
_SHUFFLE, _NOISE, _PLANTED = 1001, 1002, 1003


def published(
    name: str, *, shuffle: int | None = None, noise: int | None = None, num_stages: int = 8
) -> PairTimes:
    """Return one of the five clusters with the published planner's constants.

    `shuffle` permutes the devices; `noise` makes each link slower or faster by lognormal(0, 0.3).
    """
    latency, bandwidth = device_links(Cluster.load(name))
    if noise is not None:
        factor = np.random.default_rng([_NOISE, noise]).lognormal(0, 0.3, latency.shape)
        factor = _symmetric(factor)
        latency, bandwidth = latency * factor, bandwidth / factor
    if shuffle is not None:
        order = np.random.default_rng([_SHUFFLE, shuffle]).permutation(len(latency))
        latency, bandwidth = latency[np.ix_(order, order)], bandwidth[np.ix_(order, order)]
    return pair_times(latency, bandwidth, PUBLISHED, num_stages=num_stages)


def planted(
    num_stages: int, num_pipelines: int, *, seed: int, depth: int = 1, paired: bool = False
) -> tuple[PairTimes, Seconds]:
    """Return a cluster in which a hidden layout uses the fastest links only, and its cost.

    A region is `depth` stages of `num_pipelines / depth` pipelines. Links inside a region, to
    regions with the same stages and to those that follow in the same pipelines are the fastest of
    all, so no layout costs less; all others are 1.5 to 8 times slower, by region and by device.
    With `paired` a link to the next region is fast only within one pipeline.
    """
    rng = np.random.default_rng([_PLANTED, seed])
    stage, pipeline = np.divmod(np.arange(num_stages * num_pipelines), num_pipelines)
    band, lane = stage // depth, pipeline // (num_pipelines // depth)
    region = band * depth + lane
    slower = _symmetric(rng.uniform(1.5, 6, (num_stages, num_stages)))[np.ix_(region, region)]
    slower *= _symmetric(rng.uniform(1, 1.3, slower.shape))
    lane = pipeline if paired else lane
    after = (abs(band[:, None] - band) == 1) & (lane[:, None] == lane)
    slower[(band[:, None] == band) | after] = 1.0
    order = rng.permutation(len(region))
    slower = slower[np.ix_(order, order)]
    times = pair_times(slower * 5e-3, 2.5e8 / slower, PUBLISHED, num_stages=num_stages)
    sync, hop = (of[of > 0].min() for of in (times.sync, times.hop))
    return times, float(sync * (num_pipelines - 1) + hop * (num_stages - 1))


def _symmetric(of: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.triu(of, 1) + np.triu(of).T


def equal_layers(
    name: str,
    num_layers: int,
    forward: Seconds,
    parameter_bytes: Bytes,
    activation_bytes: Bytes,
    stored_bytes: Bytes = 0,
) -> ModelProfile:
    """Return the profile of a model of equal layers."""
    layers = tuple(
        Layer(
            name=f"layer {number}",
            forward=forward,
            backward=BACKWARD_PER_FORWARD * forward,
            parameter_bytes=parameter_bytes,
            activation_bytes=activation_bytes,
            stored_bytes=stored_bytes,
        )
        for number in range(num_layers)
    )
    return ModelProfile(name=name, microbatch_size=1, layers=layers)


def equal_pipelines(
    devices: Sequence[str],
    num_layers: int,
    num_stages: int,
    num_microbatches: int,  # per pipeline
    *,
    microbatch_size: int = 1,
    schedule: str = AUTO,
    sync: str = "all_reduce",
) -> Plan:
    """Return a plan of equal stages and pipelines on devices in rank order."""
    return Plan(
        layers_per_stage=(num_layers // num_stages,) * num_stages,
        pipelines=tuple(
            PipelinePlan(
                devices=tuple(devices[first : first + num_stages]),
                num_microbatches=num_microbatches,
                schedule=schedule,
            )
            for first in range(0, len(devices), num_stages)
        ),
        microbatch_size=microbatch_size,
        sync=sync,
    )
