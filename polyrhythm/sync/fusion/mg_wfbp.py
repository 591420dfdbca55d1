"""MG-WFBP: merge a layer's gradients with the next ones when that saves more than it costs.

Gradients that are there could travel at once; but the next ones will be there soon, and to travel
together saves the latency of one all-reduce. The rule goes through the layers as the backward does,
and merges a layer with the next one if the next one's gradients are there before this layer's
all-reduce could have begun and spent its latency.

Source: Shi et al., "MG-WFBP: Merging gradients wisely for efficient communication in distributed
deep learning", IEEE TPDS 32(8), 2021, Algorithm 1 (layer l merges if the backward of layer l - 1
ends before the start of l's communication plus a). Departures: none known; the latency a is that of
a whole all-reduce, 2 (P - 1) alpha.
"""

from collections.abc import Sequence

from polyrhythm.cost.decoupled import Ring
from polyrhythm.sync.fusion.layers import Buckets, LayerTimes
from polyrhythm.types import Seconds


def mg_wfbp_buckets(layers: Sequence[LayerTimes], ring: Ring, num_workers: int) -> Buckets:
    startup = ring.all_reduce(0, num_workers)
    found: list[range] = []
    free: Seconds = 0.0  # when the network has sent what was decided
    ready: Seconds = 0.0  # when the gradients so far are there
    stop = len(layers)
    for start in range(len(layers) - 1, -1, -1):
        ready += layers[start].backward
        begins = max(ready, free)
        next_ready = ready + layers[start - 1].backward
        if start > 0 and next_ready < begins + startup:
            continue
        found.append(range(start, stop))
        size = sum(layer.size for layer in layers[start:stop])
        free = begins + ring.all_reduce(size, num_workers)
        stop = start
    return tuple(reversed(found))
