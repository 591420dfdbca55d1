"""Layers, in forward order, and their division into buckets for communication."""

from collections.abc import Sequence
from dataclasses import dataclass

from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, Seconds

Buckets = tuple[range, ...]  # the layers of each bucket, in forward order


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    size: Bytes  # of its gradients
    forward: Seconds
    backward: Seconds

    def __post_init__(self) -> None:
        if not (self.size >= 0 and self.forward >= 0 and self.backward >= 0):
            raise DescriptionError(
                f"a layer of {self.size:g} bytes, forward {self.forward:g} s, backward "
                f"{self.backward:g} s",
                expected="values of 0 or more",
                fix="pass the measured values",
            )


def check_buckets(buckets: Buckets, num_layers: int) -> None:
    """Check that buckets are runs of neighbouring layers that cover each layer once."""
    covered = [layer for bucket in buckets for layer in bucket]
    if covered != list(range(num_layers)) or not all(buckets):
        raise DescriptionError(
            f"buckets {[f'{b.start}-{b.stop - 1}' for b in buckets]} of {num_layers} layers",
            expected="runs of neighbours that cover each layer once, in order",
            fix="create them with by_bytes, by_count, unfused or mg_wfbp_buckets",
        )


def unfused(num_layers: int) -> Buckets:
    """One bucket per layer."""
    return by_count(num_layers, 1)


def by_count(num_layers: int, most: int) -> Buckets:
    """Buckets of `most` neighbours (DeAR-NL: 4), from the last layer: its gradients come first."""
    if most < 1:
        raise DescriptionError(f"{most} layers in a bucket", expected="1 or more", fix="use 4")
    stops = range(num_layers, 0, -most)
    return tuple(range(max(0, stop - most), stop) for stop in reversed(stops))


def by_bytes(sizes: Sequence[Bytes], most: Bytes) -> Buckets:
    """Buckets of neighbours with up to `most` bytes, counted from the last layer.

    A larger layer has its own bucket. Gradients of the last layer come first; so the remaining
    small bucket is that of the first layers, whose all-gather is never hidden.
    """
    if not most > 0:
        raise DescriptionError(
            f"buckets of {most:g} bytes", expected="more than 0", fix="use 25e6, as DDP does"
        )
    buckets: list[range] = []
    stop = len(sizes)
    while stop > 0:
        start, size = stop - 1, sizes[stop - 1]
        while start > 0 and size + sizes[start - 1] <= most:
            start -= 1
            size += sizes[start]
        buckets.append(range(start, stop))
        stop = start
    return tuple(reversed(buckets))


def bucket_bounds(sizes: Sequence[int], first: int, most: int) -> list[int]:
    """Bounds of buckets of a flat buffer of tensors, in the order in which they are computed.

    The first bucket has up to `first` numbers, so that the exchange starts early, each next one
    twice as many, up to `most`. A bucket ends at the end of a tensor; a tensor with more than
    `most` numbers is split, so that its parts can be exchanged one after the other.
    """
    if not 0 < first <= most:
        raise DescriptionError(
            f"buckets of {first} to {most} numbers",
            expected="0 < first <= most",
            fix="use 1 MB and 25 MB, as DDP does",
        )
    bounds, position, limit = [0], 0, first
    for size in sizes:
        if bounds[-1] < position and position + size - bounds[-1] > limit:
            bounds.append(position)
            limit = min(2 * limit, most)
        position += size
        while position - bounds[-1] > most:
            bounds.append(bounds[-1] + most)
            limit = most
    return bounds if bounds[-1] == position else [*bounds, position]
