"""MG-WFBP: merge a layer's gradients with the next ones when that saves more than it costs.

Gradients that are ready could be sent at once; but the next ones are ready soon, and one bucket for
both saves the latency of one all-reduce. The rule visits the layers in backward order, and merges a
layer with the next one if the next one's gradients are ready before this layer's all-reduce could
have started and spent its latency.

Source: Shi et al., "MG-WFBP: Merging gradients wisely for efficient communication in distributed
deep learning", IEEE TPDS 32(8), 2021, Algorithm 1 (layer l merges if the backward of layer l - 1
ends before the start of l's communication plus a). Departures: none known; the latency a is that of
a whole all-reduce, 2 (P - 1) alpha.
"""

from collections.abc import Sequence

from polyrhythm.sync.fusion.layers import Buckets, LayerTimes
from polyrhythm.types import Seconds
from reproduction.dear.ring import Ring


def mg_wfbp_buckets(layers: Sequence[LayerTimes], ring: Ring, num_workers: int) -> Buckets:
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
