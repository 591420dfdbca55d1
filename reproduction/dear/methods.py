"""What the paper compares: systems that average gradients, each as a step played through.

- WFBP: an all-reduce per layer. ByteScheduler: an all-reduce per tensor, in pieces of 4 MB (as the
  authors' scripts set it), the first layers first, each agreed on beforehand: a message up and down
  a binary tree of all workers.
- Horovod: buffers of a fixed size, which are agreed on in the same way. PyTorch-DDP: the same, but
  the first one (the last layers') of 1 MB, and nothing to agree on. MG-WFBP: buffers by its rule,
  which goes by what its code says of the network.
- DeAR: buffers of a fixed size; of four layers (NL); or of a size found by Bayesian optimization
  (BO). Without tensor fusion, layers.
"""

import math
from collections.abc import Sequence
from functools import cache

from polyrhythm.cost.decoupled import Ring
from polyrhythm.sync.fusion.layers import Buckets, LayerTimes, by_bytes, by_count, unfused
from polyrhythm.sync.fusion.mg_wfbp import mg_wfbp_buckets
from polyrhythm.sync.fusion.timeline import StepEstimate, bytescheduler, dear, wfbp
from polyrhythm.sync.fusion.tuner import SIZES, Bayesian, BucketMode, Search, Space
from polyrhythm.types import Bytes, Seconds
from reproduction.dear.setting import WORKERS, Network, Work

BUFFER: Bytes = 25_000_000  # of all, where the paper compares them
HOROVOD_BUFFER: Bytes = 64_000_000  # its default
SMALL_BUFFER: Bytes = 5_000_000  # DeAR-FB's
NEARBY = 4  # layers, DeAR-NL's
TRIALS = 10  # of Bayesian optimization: the authors' code has ten
OVERHEADS = (
    "here nothing costs anything but compute and network: launching a collective, copying into "
    "buffers, and the update, which the paper's system makes during the forward, take no time"
)
_FIRST_BUFFER: Bytes = 1_000_000  # DDP's
_PIECE: Bytes = 4_000_000


def wait_free(work: Work, network: Network) -> StepEstimate:
    return wfbp(work.layers, unfused(len(work.layers)), network.ring, WORKERS)


def wait_free_by_tensors(work: Work, network: Network) -> StepEstimate:
    """As the authors' code has it."""
    return wfbp(work.tensors, unfused(len(work.tensors)), network.ring, WORKERS)


def byte_scheduler(work: Work, network: Network) -> StepEstimate:
    agreed = _negotiation(network.ring)
    return bytescheduler(work.tensors, network.ring, WORKERS, piece=_PIECE, negotiation=agreed)


def horovod(work: Work, network: Network, buffer: Bytes = BUFFER) -> StepEstimate:
    """What all agree on before a buffer travels is as if each of its messages took longer."""
    agreed = _negotiation(network.ring) / (2 * (WORKERS - 1))
    slower = Ring(latency=network.ring.latency + agreed, bandwidth=network.ring.bandwidth)
    return wfbp(work.layers, _fixed(work.layers, buffer), slower, WORKERS)


def horovod_tuned(work: Work, network: Network) -> StepEstimate:
    """By the best of all sizes: what no search of its own can beat."""
    steps = (horovod(work, network, size) for size in (HOROVOD_BUFFER, *SIZES))
    return min(steps, key=lambda step: step.seconds)


def ddp(work: Work, network: Network) -> StepEstimate:
    layers = work.layers
    first = _fixed(layers, _FIRST_BUFFER)[-1]
    return wfbp(layers, (*_fixed(layers[: first.start], BUFFER), first), network.ring, WORKERS)


def mg_wfbp(work: Work, network: Network) -> StepEstimate:
    return wfbp(
        work.layers, mg_wfbp_buckets(work.layers, network.believed, WORKERS), network.ring, WORKERS
    )


def mg_wfbp_informed(work: Work, network: Network) -> StepEstimate:
    """If it knew the network as it is."""
    return wfbp(
        work.layers, mg_wfbp_buckets(work.layers, network.ring, WORKERS), network.ring, WORKERS
    )


def dear_unfused(work: Work, network: Network) -> StepEstimate:
    return dear(work.layers, unfused(len(work.layers)), network.ring, WORKERS)


def dear_nearby(work: Work, network: Network) -> StepEstimate:
    return dear(work.layers, by_count(len(work.layers), NEARBY), network.ring, WORKERS)


def dear_fixed(work: Work, network: Network, buffer: Bytes = BUFFER) -> StepEstimate:
    return dear(work.layers, _fixed(work.layers, buffer), network.ring, WORKERS)


def space_of(work: Work) -> Space:
    """Sizes of buffers that lead to different ones, for DeAR alone."""
    return Space(lambda c: _fixed(work.layers, c.bucket_bytes), kinds=(BucketMode.DECOUPLED,))


def found_by(search: Search, work: Work, network: Network) -> list[StepEstimate]:
    """The best step after each trial."""
    best: list[StepEstimate] = []
    while not search.is_over:
        candidate = search.suggest()
        step = dear_fixed(work, network, candidate.bucket_bytes)
        search.observe(candidate, step.seconds)
        best.append(min([step, *best[-1:]], key=lambda each: each.seconds))
    return best


@cache
def tuning(work: Work, network: Network) -> list[StepEstimate]:
    """The best step after each trial of Bayesian optimization."""
    return found_by(Bayesian(space=space_of(work), num_trials=TRIALS), work, network)


def dear_tuned(work: Work, network: Network) -> StepEstimate:
    return tuning(work, network)[-1]


def _negotiation(ring: Ring) -> Seconds:
    return 2 * math.ceil(math.log2(WORKERS)) * ring.latency


def _fixed(layers: Sequence[LayerTimes], most: Bytes) -> Buckets:
    return by_bytes([layer.size for layer in layers], most)
