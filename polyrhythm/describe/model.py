"""A model's profile: the time and bytes of each layer for one micro-batch.

Planning and simulation need nothing else of a model. Times are those of a device of speed 1; a
stage of consecutive layers takes their sum. A profile that was measured with several micro-batch
sizes is interpolated for any size between them.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyrhythm.describe.read import read
from polyrhythm.describe.sample import check_measured_at
from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, Seconds

MAX_SAMPLES = 1_000_000_000  # in a micro-batch; more is a typing error


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSize:
    """Times and bytes of a layer for one micro-batch size."""

    microbatch_size: int
    forward: Seconds
    backward: Seconds
    activation_bytes: Bytes
    stored_bytes: Bytes
    recompute_bytes: Bytes | None = None
    temporary_bytes: Bytes | None = None

    def __post_init__(self) -> None:
        check_size(self.microbatch_size)
        _check_layer(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    name: str
    forward: Seconds
    backward: Seconds
    parameter_bytes: Bytes
    activation_bytes: Bytes  # the output, which is sent if the next layer is on another device
    stored_bytes: Bytes  # kept from the forward of a micro-batch to its backward
    recompute_bytes: Bytes | None = None  # kept by a layer that recomputes; None: its input
    # While the layer runs, beyond what it stores: the largest part of it; None: not measured.
    temporary_bytes: Bytes | None = None
    cast_bytes: Bytes | None = None  # copies of weights in the dtype of autocast, in each step
    forward_spread: float | None = None  # see Sample
    backward_spread: float | None = None
    sizes: tuple[AtSize, ...] = ()  # for other micro-batch sizes than the profile's

    def __post_init__(self) -> None:
        _check_layer(self)
        check_amount("parameter_bytes", self.parameter_bytes, Bytes)
        check_amount("cast_bytes", self.cast_bytes, Bytes)
        check_amount("forward_spread", self.forward_spread)
        check_amount("backward_spread", self.backward_spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    name: str
    microbatch_size: int  # samples in the micro-batch that was measured
    layers: tuple[Layer, ...]
    source: str = ""  # who measured this, and on what machine
    measured_at: str = ""  # ISO 8601; empty if not measured
    flops: float | None = None  # of that machine, as `probe` measures them: its speed is 1
    flops_dtype: str = ""  # dtype of `flops`, such as bfloat16
    workspace_bytes: Bytes | None = None  # that a GPU's libraries keep, such as cuBLAS

    def __post_init__(self) -> None:
        check_measured_at(self.measured_at)
        check_size(self.microbatch_size)
        check_amount("flops", self.flops, zero=False)
        check_amount("workspace_bytes", self.workspace_bytes, Bytes)
        if not self.layers:
            raise DescriptionError(
                f"model {self.name!r} has no layers",
                expected="at least one",
                fix="add a [[layers]] table",
            )
        for name, count in Counter(layer.name for layer in self.layers).items():
            if count > 1:
                raise DescriptionError(
                    f"{count} layers are named {name!r}",
                    expected="one layer per name",
                    fix=f"number them: '{name}.0', '{name}.1', ...",
                )
        self._check_sizes()

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """All measured sizes in ascending order."""
        others = (each.microbatch_size for each in self.layers[0].sizes)
        return tuple(sorted((self.microbatch_size, *others)))

    def at(self, microbatch_size: int) -> "ModelProfile":
        """Return the profile for another micro-batch size, interpolated between measured sizes.

        Raises DescriptionError for a size outside the measured range.
        """
        known = self.microbatch_sizes
        if not known[0] <= microbatch_size <= known[-1]:
            raise DescriptionError(
                f"micro-batches of {microbatch_size} for model {self.name!r}",
                expected=f"a size that was measured, or between two: {', '.join(map(str, known))}",
                fix=f"measure it: polyrhythm profile --sizes {microbatch_size} ...",
            )
        if microbatch_size == self.microbatch_size:
            return self
        layers = tuple(self._layer_at(layer, microbatch_size) for layer in self.layers)
        return replace(self, microbatch_size=microbatch_size, layers=layers)

    @classmethod
    def load(cls, path: str | Path) -> "ModelProfile":
        """Read a .toml or .json file."""
        return read(Path(path), cls)

    def _layer_at(self, layer: Layer, size: int) -> Layer:
        points = sorted((*layer.sizes, self._own(layer)), key=lambda each: each.microbatch_size)
        low, high = next((a, b) for a, b in itertools.pairwise(points) if size <= b.microbatch_size)
        share = (size - low.microbatch_size) / (high.microbatch_size - low.microbatch_size)
        return replace(
            layer,
            forward=_between(low.forward, high.forward, share),
            backward=_between(low.backward, high.backward, share),
            activation_bytes=round(_between(low.activation_bytes, high.activation_bytes, share)),
            stored_bytes=round(_between(low.stored_bytes, high.stored_bytes, share)),
            recompute_bytes=_bytes_between(low.recompute_bytes, high.recompute_bytes, share),
            temporary_bytes=_bytes_between(low.temporary_bytes, high.temporary_bytes, share),
            forward_spread=None,
            backward_spread=None,
            sizes=(),
        )

    def _own(self, layer: Layer) -> AtSize:
        return AtSize(
            microbatch_size=self.microbatch_size,
            forward=layer.forward,
            backward=layer.backward,
            activation_bytes=layer.activation_bytes,
            stored_bytes=layer.stored_bytes,
            recompute_bytes=layer.recompute_bytes,
            temporary_bytes=layer.temporary_bytes,
        )

    def _check_sizes(self) -> None:
        for layer in self.layers:
            sizes = sorted((self.microbatch_size, *(each.microbatch_size for each in layer.sizes)))
            if tuple(sizes) != self.microbatch_sizes or len(set(sizes)) < len(sizes):
                raise DescriptionError(
                    f"layer {layer.name!r} has micro-batches of {', '.join(map(str, sizes))}",
                    expected="every size once, and the same ones in each layer",
                    fix="correct its [[layers.sizes]], where the profile's own size has no place",
                )


def blocks_with_parameters(has_parameters: Sequence[bool]) -> list[range]:
    """Return blocks of consecutive layers, each with one layer that has parameters.

    A layer without parameters, such as an activation function, joins the layer before it.
    """
    starts: list[int] = []
    has_some = False  # in the last block
    for number, has_own in enumerate(has_parameters):
        if not starts or (has_own and has_some):
            starts.append(number)
            has_some = False
        has_some = has_some or has_own
    return [range(a, b) for a, b in itertools.pairwise([*starts, len(has_parameters)])]


def recompute_blocks(layers: Sequence[Layer]) -> list[range]:
    """Return the consecutive layers that recompute together.

    An activation function alone would keep as much as it stores.
    """
    return blocks_with_parameters([layer.parameter_bytes > 0 for layer in layers])


def recompute_bytes(layers: Sequence[Layer]) -> list[Bytes]:
    """Return what each layer of a model keeps per micro-batch if it recomputes.

    If it was not measured, the first layer of a block keeps the output of the layer before.
    """
    starts = [block.start for block in recompute_blocks(layers)]
    inputs = {start: layers[start - 1].activation_bytes for start in starts if start > 0}
    return [
        inputs.get(number, 0) if layer.recompute_bytes is None else layer.recompute_bytes
        for number, layer in enumerate(layers)
    ]


def _between(low: float, high: float, share: float) -> float:
    return low + share * (high - low)


def _bytes_between(low: Bytes | None, high: Bytes | None, share: float) -> Bytes | None:
    return None if low is None or high is None else round(_between(low, high, share))


def check_size(microbatch_size: int) -> None:
    """Refuse a micro-batch that no device could hold."""
    if not 1 <= microbatch_size <= MAX_SAMPLES:
        raise DescriptionError(
            f"microbatch_size is {microbatch_size if abs(microbatch_size) < 10**18 else 'endless'}",
            expected=f"1 or more samples, at most {MAX_SAMPLES}",
            fix="give the micro-batch size that the layers were measured with",
        )


def _check_layer(layer: Layer | AtSize) -> None:
    check_amount("forward", layer.forward, Seconds)
    check_amount("backward", layer.backward, Seconds)
    check_amount("activation_bytes", layer.activation_bytes, Bytes)
    check_amount("stored_bytes", layer.stored_bytes, Bytes)
    check_amount("recompute_bytes", layer.recompute_bytes, Bytes)
    check_amount("temporary_bytes", layer.temporary_bytes, Bytes)
