"""What a step is made of, as far as its communication is concerned: layers, in forward order."""

from collections.abc import Sequence
from dataclasses import dataclass

from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, Seconds

Buckets = tuple[range, ...]  # of layers that travel together, in forward order


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
                expected="nothing below 0",
                fix="give what was measured",
            )


def check_buckets(buckets: Buckets, num_layers: int) -> None:
    """Each layer is in one bucket, and buckets are runs of neighbours, in order."""
    covered = [layer for bucket in buckets for layer in bucket]
    if covered != list(range(num_layers)) or not all(buckets):
        raise DescriptionError(
            f"buckets {[f'{b.start}-{b.stop - 1}' for b in buckets]} of {num_layers} layers",
            expected="runs of neighbours that cover each layer once, in order",
            fix="make them with by_bytes, by_count, unfused or merged",
        )


def unfused(num_layers: int) -> Buckets:
    """Each layer on its own."""
    return by_count(num_layers, 1)


def by_count(num_layers: int, most: int) -> Buckets:
    """So many neighbours together (DeAR-NL has four), counted from the last, whose gradients come
    first.
    """
    if most < 1:
        raise DescriptionError(f"{most} layers in a bucket", expected="1 or more", fix="use 4")
    stops = range(num_layers, 0, -most)
    return tuple(range(max(0, stop - most), stop) for stop in reversed(stops))


def by_bytes(sizes: Sequence[Bytes], most: Bytes) -> Buckets:
    """Neighbours together while they have no more than `most` bytes, counted from the last.

    One that is larger is on its own. Counted from the last since its gradients come first: the one
    bucket that is left over, and small, is the first layers', whose gather everybody waits for.
    """
    if not most > 0:
        raise DescriptionError(
            f"buckets of {most:g} bytes", expected="more than 0", fix="use 25e6, as DDP has it"
        )
    found: list[range] = []
    stop = len(sizes)
    while stop > 0:
        start, held = stop - 1, sizes[stop - 1]
        while start > 0 and held + sizes[start - 1] <= most:
            start -= 1
            held += sizes[start]
        found.append(range(start, stop))
        stop = start
    return tuple(reversed(found))
