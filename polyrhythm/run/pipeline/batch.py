"""One batch on one stage: split into micro-batches in the same way on every stage.

The first stage has the inputs, decides how to split them, and sends a header to the others. Each
stage splits its own arguments: the last one targets, all of them keyword arguments. Tensors are
split along their first dimension, which counts samples; anything else (a flag, a scalar) goes
unchanged to every micro-batch. With a given number of micro-batches, sizes differ by at most one;
with a given size, the last micro-batch may be smaller. The Trainer passes micro-batches that are
separate already, each padded by itself.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline.loss import Count
from polyrhythm.run.pipeline.options import PipelineOptions
from polyrhythm.sync.dispatch import Ranges

# A hash of the first stage's inputs: messages of one kind have equal layouts on every stage.
MicrobatchKind = int
INPUTS = "the model's inputs"  # in error messages
Fingerprint = tuple[int, tuple[float, ...]]  # of collated samples: `data/loader.py`


class BatchSlice(msgspec.Struct, frozen=True):
    """The samples of one pipeline in one of its steps."""

    step: int  # the global step
    ranges: Ranges  # of positions
    weight: float = 1.0  # of the samples' mean loss in the gradient
    next_ranges: Ranges = ()  # of its next step, if known already, for prefetching
    fingerprint: Fingerprint | None = None  # of the data that the first stage has read
    is_read_by_all: bool = False  # later stages of the model take inputs, too

    @property
    def num_samples(self) -> int:
        return sum(end - start for start, end in self.ranges)


Metadata = BatchSlice | tuple[int, ...]  # from the caller of the first stage to the other stages


class BatchHeader(msgspec.Struct, frozen=True, array_like=True):
    """How a batch is split: runs of (kind, size, number of consecutive micro-batches)."""

    training: bool
    runs: tuple[tuple[MicrobatchKind, int, int], ...]
    metadata: Metadata = ()

    @property
    def kinds(self) -> list[MicrobatchKind]:
        return [kind for kind, _, count in self.runs for _ in range(count)]

    @property
    def sizes(self) -> list[int]:
        return [size for _, size, count in self.runs for _ in range(count)]


def split_ranges(ranges: Ranges, sizes: Sequence[int]) -> list[Ranges]:
    """Return the positions of each micro-batch; the sizes sum up to those of the ranges."""
    microbatches, rest = list[Ranges](), list(reversed(ranges))
    for size in sizes:
        found = list[tuple[int, int]]()
        while size:
            start, end = rest.pop()
            if end - start > size:
                rest.append((start + size, end))
                end = start + size
            found.append((start, end))
            size -= end - start
        microbatches.append(tuple(found))
    return microbatches


END_OF_DATA = BatchHeader(training=True, runs=())


class EndOfDataError(Exception):
    """Raised by `step` or `eval` of a stage after the first stage has called `end_batches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """The arguments of one micro-batch on one stage."""

    size: int
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


# On later stages a function of the header.
Microbatches = Sequence[Microbatch] | Callable[[BatchHeader], Sequence[Microbatch]]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arguments of `step` or `eval` on this stage."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any  # or a function that returns it for the first stage's metadata
    loss_kwargs: dict[str, Any]
    keeps_outputs: bool
    metadata: Metadata
    training: bool
    microbatches: Microbatches | None = None  # instead of args, kwargs and target

    def check(self, loss_fn: Callable[..., Any] | None, *, is_last: bool) -> None:
        """Refuse to train without a loss, gradients or a target."""
        if not self.training:
            return
        if loss_fn is None or not torch.is_grad_enabled():
            problem = "without a loss_fn" if loss_fn is None else "under torch.no_grad()"
            raise ScheduleError(
                f"step {problem}", expected="a loss and gradients", fix="call eval() to run forward"
            )
        if is_last and self.target is None and self.microbatches is None:
            raise ScheduleError(
                "step on the last stage without a target",
                expected="a target for the loss function to compare the output with",
                fix="call step(target=...) on the last stage",
            )

    def with_target(self, header: BatchHeader) -> "StepInputs":
        """Compute the target of the batch that the header announces, if it is a function."""
        if header == END_OF_DATA:
            raise EndOfDataError
        if callable(self.microbatches):
            return replace(self, microbatches=self.microbatches(header))
        if not callable(self.target):
            return self
        return replace(self, target=self.target(header.metadata))


@dataclass(slots=True, kw_only=True)
class Batch:
    """The arguments of every micro-batch, and their outputs."""

    step: int
    header: BatchHeader
    arguments: Sequence[tuple[Any, ...]]  # first stage: the model's inputs
    keywords: Sequence[dict[str, Any]]
    targets: Sequence[Any]  # last stage
    loss_kwargs: dict[str, Any]
    loss_weights: Sequence[float]  # of micro-batches in the gradient, unless labels are counted
    unit: float  # labels that weigh 1 in a backward; equal in all pipelines
    is_split: bool  # otherwise, without a flush, each batch is a mean over its own labels
    keeps_outputs: bool
    needs_device_copy: bool  # some tensors are not on the device yet
    positions: Sequence[int]  # of the first sample of each micro-batch
    first: int = 0  # number of its first micro-batch; not 0 in a pipeline without a flush
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    counts: dict[int, Count] = field(default_factory=dict)  # labels by micro-batch, if counted
    on_counted: Callable[[], None] | None = None  # before the first backward, if labels are counted
    _kinds: list[MicrobatchKind] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds = self.header.kinds

    @property
    def num_microbatches(self) -> int:
        return len(self._kinds)

    @property
    def loss_counts(self) -> list[Count]:
        """What each of `losses` is a mean over: labels, or samples."""
        sizes = self.header.sizes
        return [self.counts.get(m, float(size)) for m, size in enumerate(sizes, start=self.first)]

    def weight(self, microbatch: int) -> Count:
        """Return the weight of a micro-batch's mean loss in the gradient."""
        if microbatch in self.counts:
            return self.counts[microbatch] / self.unit
        return self.loss_weights[microbatch - self.first]

    def divisor(self) -> Count | None:
        """Return what divides the gradients after the last backward; None if not counted."""
        return sum(self.counts.values()) / self.unit if self.counts and self.is_split else None

    def position(self, microbatch: int) -> int:
        return self.positions[microbatch - self.first]

    def kind(self, microbatch: int) -> MicrobatchKind:
        return self._kinds[microbatch - self.first]


@dataclass(slots=True, kw_only=True)
class BatchSplitter:
    """Splits the batches of a stage into the number of micro-batches, or into `microbatch_size`."""

    options: PipelineOptions
    device: torch.device
    is_first: bool
    is_last: bool
    microbatch_size: int | None = field(init=False)  # the tuner changes it

    def __post_init__(self) -> None:
        self.microbatch_size = next(iter(self.options.microbatch_sizes or ()), None)

    def make_header(self, step_inputs: StepInputs) -> BatchHeader:
        """Describe how the first stage splits its batch."""
        training, microbatches = step_inputs.training, step_inputs.microbatches
        if microbatches is not None:
            assert not callable(microbatches), "the first stage passes them"
            return _header_of(microbatches, training, step_inputs.metadata)
        arguments = step_inputs.args, step_inputs.kwargs
        sizes = self.sizes(batch_size_of(arguments, INPUTS))
        kinds = {size: kind_of(arguments, size, training=training) for size in set(sizes)}
        runs = tuple((kinds[size], size, len(list(run))) for size, run in groupby(sizes))
        return BatchHeader(training, runs, step_inputs.metadata)

    def batch(
        self, step_inputs: StepInputs, header: BatchHeader, *, step: int, num_samples: int
    ) -> Batch:
        """Split this stage's arguments as the header prescribes; `num_samples` came before."""
        if header.training != step_inputs.training:
            calls = {True: "step", False: "eval"}
            here, there = calls[step_inputs.training], calls[header.training]
            raise ScheduleError(
                f"{here} on this stage, {there} on the first stage",
                expected="the same call on every stage",
                fix="call step and eval in the same order in all processes",
            )
        sizes = header.sizes
        total = sum(sizes) if self.options.scale_grads else None
        microbatches, metadata = step_inputs.microbatches, header.metadata
        if microbatches is None:
            microbatches = self._split(step_inputs, sizes)
        assert not callable(microbatches), "called when the header came"
        assert [m.size for m in microbatches] == sizes, "the caller follows the header"
        ranges: Ranges = ((num_samples, num_samples + sum(sizes)),)
        if isinstance(metadata, BatchSlice):
            ranges = metadata.ranges
        leaves = pytree.tree_leaves([(m.args, m.kwargs, m.target) for m in microbatches])
        return Batch(
            step=step,
            header=header,
            arguments=[m.args for m in microbatches],
            keywords=[dict(m.kwargs) for m in microbatches],
            targets=[m.target for m in microbatches],
            positions=[part[0][0] for part in split_ranges(ranges, sizes)],
            loss_kwargs=step_inputs.loss_kwargs,
            loss_weights=[size / total if total else 1.0 for size in sizes],
            # A weight of samples that is 1 on average over pipelines: usually no gradient changes.
            unit=sum(sizes) / metadata.weight if isinstance(metadata, BatchSlice) else 1.0,
            is_split=self.options.flush,
            keeps_outputs=step_inputs.keeps_outputs and self.is_last,
            needs_device_copy=any(
                leaf.device != self.device for leaf in leaves if isinstance(leaf, Tensor)
            ),
        )

    def _split(self, step_inputs: StepInputs, sizes: Sequence[int]) -> list[Microbatch]:
        args, target, none = step_inputs.args, step_inputs.target, [None] * len(sizes)
        columns = (
            sizes,
            split_microbatches(args, sizes, INPUTS) if self.is_first else [()] * len(sizes),
            split_microbatches(step_inputs.kwargs, sizes, "keyword arguments"),
            split_microbatches(target, sizes, "targets") if self.is_last else none,
        )
        return [
            Microbatch(size=size, args=args, kwargs=kwargs, target=target)
            for size, args, kwargs, target in zip(*columns, strict=True)
        ]

    def sizes(self, batch_size: int | None) -> list[int]:
        """Return the sizes of the micro-batches of the next batch, on the first stage."""
        if batch_size is None:
            raise ScheduleError(
                "the first stage was called without a tensor",
                expected="the model's inputs, with the samples along their first dimension",
                fix="call step(inputs) on the first stage",
            )
        if self.options.n_microbatches is not None:
            return sizes_by_number(batch_size, self.options.n_microbatches)
        assert self.microbatch_size is not None, "one of the two is given"
        for size in self.options.sizes_to_try:
            if batch_size % size:
                raise ScheduleError(
                    f"micro-batches of {size} for a batch of {batch_size}",
                    expected="sizes that divide the batch, so that all are compared on equal work",
                    fix=f"remove {size} from microbatch_sizes, or change the batch",
                )
        full, rest = divmod(batch_size, self.microbatch_size)
        return [self.microbatch_size] * full + [rest] * (rest > 0)


def _header_of(
    microbatches: Sequence[Microbatch], training: bool, metadata: Metadata
) -> BatchHeader:
    """Describe micro-batches that are separate already: each may have its own kind."""
    # The whole shapes: nothing says whether a tensor has samples along its first dimension.
    pairs = [(_hash_kind((m.args, m.kwargs), m.size, 0, training), m.size) for m in microbatches]
    runs = tuple((kind, size, len(list(run))) for (kind, size), run in groupby(pairs))
    return BatchHeader(training, runs, metadata)


def mean_loss(losses: Sequence[Tensor], counts: Sequence[Count]) -> float | None:
    """Return the mean over all labels; None without a label."""
    numbers = [float(count) for count in counts]
    if not sum(numbers):
        return None
    weighted = zip(losses, numbers, strict=True)
    return sum(loss.item() * count for loss, count in weighted if count) / sum(numbers)


def sizes_by_number(batch_size: int, num_microbatches: int) -> list[int]:
    """Return sizes that are as even as possible, larger ones first."""
    if batch_size < num_microbatches:
        raise ScheduleError(
            f"a batch of {batch_size} for {num_microbatches} micro-batches",
            expected=f"{num_microbatches} samples or more",
            fix=f"use larger batches, or n_microbatches of at most {max(1, batch_size)}",
        )
    each, rest = divmod(batch_size, num_microbatches)
    return [each + (m < rest) for m in range(num_microbatches)]


def batch_size_of(arguments: object, what: str) -> int | None:
    """Return the common first dimension of all tensors; None if no tensor has a dimension."""
    shape_by_size: dict[int, tuple[int, ...]] = {}
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, Tensor) and leaf.dim():
            shape_by_size.setdefault(leaf.shape[0], tuple(leaf.shape))
    if len(shape_by_size) > 1:
        shapes = " and ".join(str(shape) for shape in shape_by_size.values())
        raise ScheduleError(
            f"{what} have shapes {shapes}",
            expected="tensors with the samples of one batch along their first dimension",
            fix="expand a tensor without samples to the batch, or make it a buffer of the module",
        )
    return next(iter(shape_by_size), None)


def split_microbatches(arguments: Any, sizes: Sequence[int], what: str) -> list[Any]:
    """Return the arguments of every micro-batch."""
    batch_size = batch_size_of(arguments, what)
    if batch_size is None:
        return [arguments] * len(sizes)
    if batch_size != sum(sizes):
        raise ScheduleError(
            f"{what} have {batch_size} samples, the inputs of the first stage {sum(sizes)}",
            expected="the same batch on every stage",
            fix="pass every stage its part of one batch of one data loader",
        )
    leaves, structure = pytree.tree_flatten(arguments)
    columns = [
        torch.split(leaf, list(sizes))
        if isinstance(leaf, Tensor) and leaf.dim()
        else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(row, structure) for row in zip(*columns, strict=True)]


def kind_of(arguments: Any, size: int, *, training: bool) -> int:
    """Hash the kind of a micro-batch: shapes, dtypes, which tensors need gradients.

    `arguments` are those of the batch: its micro-batches differ only in `size`.
    """
    return _hash_kind(arguments, size, 1, training)


def _hash_kind(arguments: Any, size: int, first_dim: int, training: bool) -> int:
    leaves, structure = pytree.tree_flatten(arguments)
    descriptions = [
        (leaf.dim(), tuple(leaf.shape[first_dim:]), str(leaf.dtype), leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in leaves
    ]
    autocast = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    text = repr((training, size, autocast, descriptions, str(structure)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of all micro-batches; None if there are none."""
    if not outputs:
        return None
    leaves, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves[0]):
        return list(outputs)  # other objects cannot be concatenated: the caller gets a list
    joined = [torch.cat(tensors) for tensors in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(joined, structures[0])
