"""Timeline of one step in steady state: when each layer computes and each bucket is sent.

One processor computes layer by layer, one network sends bucket by bucket, and neither is
preemptive. Four orders of communication:
- `wfbp`: an all-reduce per bucket as soon as its gradients are ready, first come, first served; the
  next forward starts when all are done. With buckets of MG-WFBP's rule it is `mg_wfbp`, with fixed
  ones it is what DDP and Horovod do.
- `dear`: a reduce-scatter per bucket as soon as its gradients are ready; when all are done, an
  all-gather per bucket in forward order, which the forward of its first layer waits for.
- `bytescheduler`: an all-reduce per piece of at most `piece` bytes, those of the first layers
  first; the forward of a layer waits for its own pieces. Each piece costs a negotiation, since all
  workers have to agree on the order.

Source: Zhang et al., "DeAR", ICDCS 2023, Figures 1 and 2; Peng et al., "A generic communication
scheduler for distributed DNN training acceleration", SOSP 2019 (ByteScheduler). Departures: the
optimizer takes no time; ByteScheduler has one credit: a piece starts when the previous one is done.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from polyrhythm.errors import DescriptionError
from polyrhythm.sync.fusion.layers import Buckets, LayerTimes, check_buckets
from polyrhythm.types import Bytes, Seconds
from reproduction.dear.ring import Ring


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Duration of a step, and its compute time."""

    seconds: Seconds
    compute: Seconds

    @property
    def exposed(self) -> Seconds:
        """Time of communication that is not hidden by compute."""
        return self.seconds - self.compute


def wfbp(
    layers: Sequence[LayerTimes], buckets: Buckets, ring: Ring, num_workers: int
) -> StepEstimate:
    check_buckets(buckets, len(layers))
    reduced = _all_sent(layers, buckets, ring.all_reduce, num_workers)
    forward, backward = _compute(layers)
    return StepEstimate(seconds=forward + max(backward, reduced), compute=forward + backward)


def dear(
    layers: Sequence[LayerTimes],
    buckets: Buckets,
    ring: Ring,
    num_workers: int,
    *,
    gather_ring: Ring | None = None,
) -> StepEstimate:
    """`gather_ring`: of the all-gathers, if not the same."""
    check_buckets(buckets, len(layers))
    forward, backward = _compute(layers)
    scattered = _all_sent(layers, buckets, ring.reduce_scatter, num_workers)
    gathered = computed = max(backward, scattered)
    for bucket in buckets:
        gathered += (gather_ring or ring).all_gather(
            sum(layers[i].size for i in bucket), num_workers
        )
        computed = max(computed, gathered) + sum(layers[i].forward for i in bucket)
    return StepEstimate(seconds=computed, compute=forward + backward)


def bytescheduler(
    layers: Sequence[LayerTimes],
    ring: Ring,
    num_workers: int,
    *,
    piece: Bytes,
    negotiation: Seconds = 0.0,
) -> StepEstimate:
    if not piece > 0:
        raise DescriptionError(
            f"pieces of {piece:g} bytes", expected="more than 0", fix="use 4e6, its default"
        )
    forward, backward = _compute(layers)
    ready_at = list(accumulate(layer.backward for layer in reversed(layers)))[::-1]
    unready = list(range(len(layers)))  # gradients of the last layer are ready first: pop from here
    waiting: list[
        tuple[int, Bytes]
    ] = []  # a heap: the lowest layer with ready gradients goes first
    sent_at, now = list(ready_at), 0.0  # when all pieces of each layer are sent
    while unready or waiting:
        if not waiting:
            now = max(now, ready_at[unready[-1]])
        while unready and ready_at[unready[-1]] <= now:
            number = unready.pop()
            heapq.heappush(waiting, (number, layers[number].size))
        number, left = heapq.heappop(waiting)
        sent = min(left, piece)
        if sent > 0:
            now += negotiation + ring.all_reduce(sent, num_workers)
            sent_at[number] = now
        if left - sent > 0:
            heapq.heappush(waiting, (number, left - sent))
    computed = backward
    for layer, arrival in zip(layers, sent_at, strict=True):
        computed = max(computed, arrival) + layer.forward
    return StepEstimate(seconds=computed, compute=forward + backward)


def _compute(layers: Sequence[LayerTimes]) -> tuple[Seconds, Seconds]:
    return sum(layer.forward for layer in layers), sum(layer.backward for layer in layers)


def _all_sent(
    layers: Sequence[LayerTimes],
    buckets: Buckets,
    collective: Callable[[Bytes, int], Seconds],
    num_workers: int,
) -> Seconds:
    """When all buckets are sent after the start of backward, each once its gradients are ready."""
    ready = free = 0.0
    for bucket in reversed(buckets):
        ready += sum(layers[i].backward for i in bucket)
        free = max(free, ready) + collective(sum(layers[i].size for i in bucket), num_workers)
    return free
