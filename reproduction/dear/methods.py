"""The systems that the paper compares; each computes the timeline of one training step.

- WFBP: one all-reduce per layer.
- ByteScheduler: one all-reduce per tensor in pieces of 4 MB (as the authors' scripts set it), first
  layers first. Workers negotiate each piece: a message up and down a binary tree of all workers.
- Horovod: buckets of a fixed size, negotiated in the same way.
- PyTorch-DDP: the same without negotiation, and with a first bucket (the last layers) of 1 MB.
- MG-WFBP: buckets by its rule (`mg_wfbp_buckets`), which uses the network constants in its code.
- DeAR: buckets of a fixed size, of four layers (NL), or of a size found by Bayesian optimization
  (BO); without tensor fusion, one bucket per layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from polyrhythm.sync.fusion.layers import Buckets, LayerTimes, by_bytes, by_count, unfused
from polyrhythm.sync.fusion.tuner import SIZES, BayesianSearch, BucketMode, Search, Space
from polyrhythm.types import Bytes, Seconds
from reproduction.dear.layers import Gpu
from reproduction.dear.ring import Ring
from reproduction.dear.testbed import (
    GPU,
    NUM_WORKERS,
    ComputeTimes,
    DearModel,
    DearNetwork,
    compute_times,
)
from reproduction.dear.timeline import StepEstimate, bytescheduler, dear, wfbp

Method = Callable[[ComputeTimes, DearNetwork], StepEstimate]

BUCKET: Bytes = 25_000_000  # of every system, where the paper compares them
HOROVOD_BUCKET: Bytes = 64_000_000  # Horovod's default
SMALL_BUCKET: Bytes = 5_000_000  # of DeAR-FB
NUM_TRIALS = 10  # of Bayesian optimization, as in the authors' code
NO_OVERHEADS = (
    "only compute and the network take time here; launching a collective, copying into buckets and "
    "the update, which the paper's system runs during the forward, take none"
)
_NEARBY_LAYERS = 4  # of DeAR-NL
_DDP_FIRST_BUCKET: Bytes = 1_000_000
_PIECE: Bytes = 4_000_000  # of ByteScheduler


def wait_free(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    return wfbp(times.layers, unfused(len(times.layers)), network.ring, NUM_WORKERS)


def wait_free_by_tensors(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    """WFBP as in the authors' code."""
    return wfbp(times.tensors, unfused(len(times.tensors)), network.ring, NUM_WORKERS)


def byte_scheduler(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    negotiation = _negotiation(network.ring)
    return bytescheduler(
        times.tensors, network.ring, NUM_WORKERS, piece=_PIECE, negotiation=negotiation
    )


def horovod(times: ComputeTimes, network: DearNetwork, bucket: Bytes = BUCKET) -> StepEstimate:
    """Horovod; the negotiation of a bucket is added to the latency of its messages."""
    negotiation = _negotiation(network.ring) / (2 * (NUM_WORKERS - 1))
    slower = Ring(latency=network.ring.latency + negotiation, bandwidth=network.ring.bandwidth)
    return wfbp(times.layers, _fixed(times.layers, bucket), slower, NUM_WORKERS)


def horovod_tuned(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    """Horovod with the best of all bucket sizes: a bound for its own search."""
    steps = (horovod(times, network, size) for size in (HOROVOD_BUCKET, *SIZES))
    return min(steps, key=lambda step: step.seconds)


def ddp(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    layers = times.layers
    first = _fixed(layers, _DDP_FIRST_BUCKET)[-1]
    buckets = (*_fixed(layers[: first.start], BUCKET), first)
    return wfbp(layers, buckets, network.ring, NUM_WORKERS)


def mg_wfbp(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    buckets = mg_wfbp_buckets(times.layers, network.assumed_by_mg_wfbp, NUM_WORKERS)
    return wfbp(times.layers, buckets, network.ring, NUM_WORKERS)


def mg_wfbp_informed(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    """MG-WFBP with the real latency and bandwidth of the network."""
    buckets = mg_wfbp_buckets(times.layers, network.ring, NUM_WORKERS)
    return wfbp(times.layers, buckets, network.ring, NUM_WORKERS)


def dear_unfused(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    return dear(times.layers, unfused(len(times.layers)), network.ring, NUM_WORKERS)


def dear_nearby(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    buckets = by_count(len(times.layers), _NEARBY_LAYERS)
    return dear(times.layers, buckets, network.ring, NUM_WORKERS)


def dear_fixed(times: ComputeTimes, network: DearNetwork, bucket: Bytes = BUCKET) -> StepEstimate:
    return dear(times.layers, _fixed(times.layers, bucket), network.ring, NUM_WORKERS)


def dear_tuned(times: ComputeTimes, network: DearNetwork) -> StepEstimate:
    return tuning(times, network)[-1]


UNFUSED: Mapping[str, Method] = {
    "DeAR": dear_unfused,
    "WFBP": wait_free,
    "ByteScheduler": byte_scheduler,
}
FUSED: Mapping[str, Method] = {
    "Horovod": horovod,
    "PyTorch-DDP": ddp,
    "MG-WFBP": mg_wfbp,
    "DeAR": dear_fixed,
}
TUNED: Mapping[str, Method] = {
    "DeAR-BO": dear_tuned,
    "DeAR-NL": dear_nearby,
    "DeAR-FB": lambda times, network: dear_fixed(times, network, SMALL_BUCKET),
    "Horovod-BO": horovod_tuned,
    "Horovod-FB": lambda times, network: horovod(times, network, HOROVOD_BUCKET),
}
OUT_OF_MEMORY = {("MG-WFBP", "BERT-Large"), ("ByteScheduler", "BERT-Large")}  # in the paper


def gain(
    model: DearModel, network: DearNetwork, method: Method, over: Method, gpu: Gpu = GPU
) -> float:
    """How many times as fast `method` is as `over`."""
    times = compute_times(model, gpu=gpu)
    return over(times, network).seconds / method(times, network).seconds


def bucket_space(times: ComputeTimes) -> Space:
    """The bucket sizes that give different buckets, for DeAR alone."""
    return Space(lambda c: _fixed(times.layers, c.bucket_bytes), modes=(BucketMode.DECOUPLED,))


def run_search(search: Search, times: ComputeTimes, network: DearNetwork) -> list[StepEstimate]:
    """Return the best step after each trial."""
    best: list[StepEstimate] = []
    while not search.is_over:
        candidate = search.suggest()
        step = dear_fixed(times, network, candidate.bucket_bytes)
        search.observe(candidate, step.seconds)
        best.append(min([step, *best[-1:]], key=lambda each: each.seconds))
    return best


@cache
def tuning(times: ComputeTimes, network: DearNetwork) -> list[StepEstimate]:
    """The best step after each trial of Bayesian optimization."""
    search = BayesianSearch(space=bucket_space(times), num_trials=NUM_TRIALS)
    return run_search(search, times, network)


def mg_wfbp_buckets(layers: Sequence[LayerTimes], ring: Ring, num_workers: int) -> Buckets:
    """Merge a layer's gradients with the next ones when that saves more than it costs.

    Gradients that are ready could be sent at once; but the next ones are ready soon, and one bucket
    for both saves the latency of one all-reduce. The rule visits the layers in backward order, and
    merges a layer with the next one if the next one's gradients are ready before this layer's
    all-reduce could have started and spent its latency.

    Source: Shi et al., "MG-WFBP: Merging gradients wisely for efficient communication in
    distributed deep learning", IEEE TPDS 32(8), 2021, Algorithm 1 (layer l merges if the backward
    of layer l - 1 ends before the start of l's communication plus a). Departures: none known; the
    latency a is that of a whole all-reduce, 2 (P - 1) alpha.
    """
    startup = ring.all_reduce(0, num_workers)
    buckets: list[range] = []
    free: Seconds = 0.0  # when the network has sent the buckets so far
    ready: Seconds = 0.0  # when the gradients so far are ready
    stop = len(layers)
    for start in range(len(layers) - 1, -1, -1):
        ready += layers[start].backward
        send_start = max(ready, free)
        next_ready = ready + layers[start - 1].backward
        if start > 0 and next_ready < send_start + startup:
            continue
        buckets.append(range(start, stop))
        size = sum(layer.size for layer in layers[start:stop])
        free = send_start + ring.all_reduce(size, num_workers)
        stop = start
    return tuple(reversed(buckets))


def _negotiation(ring: Ring) -> Seconds:
    return 2 * math.ceil(math.log2(NUM_WORKERS)) * ring.latency


def _fixed(layers: Sequence[LayerTimes], max_bytes: Bytes) -> Buckets:
    return by_bytes([layer.size for layer in layers], max_bytes)
