"""One batch on one stage: split into micro-batches in the same way on every stage.

The first stage has the inputs, decides how to split them, and sends a header to the others. Each
stage splits its own arguments: the last one targets, all of them keyword arguments. With a given
number of micro-batches, sizes differ by at most one; with a given size, the last micro-batch may be
smaller. The Trainer passes micro-batches that are separate already, each padded by itself.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError
from polyrhythm.run.comm.process_groups import wait_for_event
from polyrhythm.run.pipeline.loss import Count, as_count
from polyrhythm.run.pipeline.microbatch import (
    ArgumentTree,
    ChunkSpecs,
    first_with_samples,
    split_targets,
)
from polyrhythm.run.pipeline.options import PipelineOptions
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.types import Seconds

# A hash of the first stage's inputs: messages of one kind have equal layouts on every stage.
MicrobatchKind = int


class BatchSlice(msgspec.Struct, frozen=True):
    """The samples of one pipeline in one of its steps."""

    step: int  # the global step
    ranges: Ranges  # of positions
    weight: float = 1.0  # of the samples' mean loss in the gradient
    is_whole: bool = False  # all samples of the step, which no other pipeline has
    data_bytes: tuple[int, ...] = ()  # that the first stage sends to each later stage

    @property
    def num_samples(self) -> int:
        return sum(end - start for start, end in self.ranges)


Metadata = BatchSlice | tuple[int, ...]  # from the caller of the first stage to the other stages


class BatchHeader(msgspec.Struct, frozen=True, array_like=True):
    """How a batch is split: runs of (kind, size, number of consecutive micro-batches)."""

    training: bool
    runs: tuple[tuple[MicrobatchKind, int, int], ...]
    metadata: Metadata = ()
    # Whether the first input has two dimensions of the length of the batch (samples, positions):
    # the length of a dimension then does not show what it counts.
    is_ambiguous: bool = False
    keywords: tuple[str, ...] = ()  # that every stage must be given

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
    is_own_mean: bool  # over the labels of this batch alone: without a flush, or a whole step
    keeps_outputs: bool
    needs_device_copy: bool  # some tensors are not on the device yet
    positions: Sequence[int]  # of the first sample of each micro-batch
    first: int = 0  # number of its first micro-batch; not 0 in a pipeline without a flush
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    counts: dict[int, Count] = field(default_factory=dict)  # weights by micro-batch, if counted
    labels: dict[int, Count] = field(default_factory=dict)  # on the last stage, if counted
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
        return [self.labels.get(m, float(size)) for m, size in enumerate(sizes, start=self.first)]

    def weight(self, microbatch: int) -> Count:
        """Return the weight of a micro-batch's mean loss in the gradient."""
        if microbatch in self.counts:
            return self.counts[microbatch] / self.unit
        return self.loss_weights[microbatch - self.first]

    def divisor(self) -> Count | None:
        """Return what divides the gradients after the last backward; None if not counted."""
        if not self.counts:
            return None
        return 1.0 if self.is_own_mean else sum(self.counts.values()) / self.unit

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
    specs: ChunkSpecs = field(default_factory=ChunkSpecs)
    microbatch_size: int | None = field(init=False)  # the tuner changes it

    def __post_init__(self) -> None:
        self.microbatch_size = next(iter(self.options.microbatch_sizes or ()), None)

    def make_header(self, step_inputs: StepInputs) -> BatchHeader:
        """Describe how the first stage splits its batch."""
        training, microbatches = step_inputs.training, step_inputs.microbatches
        if microbatches is not None:
            assert not callable(microbatches), "the first stage passes them"
            return _header_of(microbatches, training, step_inputs.metadata)
        arguments = self._arguments(step_inputs)
        first = first_with_samples(arguments)
        if first is None:
            raise ScheduleError(
                "the first stage was called without a tensor",
                expected="the model's inputs, with the samples along their first dimension",
                fix="call step(inputs) on the first stage",
            )
        sizes = self.sizes(first.length)
        other_lengths = (n for dim, n in enumerate(first.shape[:2]) if dim != first.dim)
        is_ambiguous = first.length in other_lengths
        for tree in arguments:
            tree.resolve(first.length, len(sizes), is_ambiguous=is_ambiguous, first=first)
        kinds = {size: kind_of(arguments, size, training=training) for size in set(sizes)}
        runs = tuple((kinds[size], size, len(list(run))) for size, run in groupby(sizes))
        return BatchHeader(training, runs, step_inputs.metadata, is_ambiguous)

    def batch(
        self, step_inputs: StepInputs, header: BatchHeader, *, step: int, pipeline: int = 0
    ) -> Batch:
        """Split this stage's arguments as the header prescribes."""
        if header.training != step_inputs.training:
            calls = {True: "step", False: "eval"}
            here, there = calls[step_inputs.training], calls[header.training]
            raise ScheduleError(
                f"{here} on this stage, {there} on the first stage",
                expected="the same call on every stage",
                fix="call step and eval in the same order in all processes",
            )
        sizes, metadata = header.sizes, header.metadata
        total = sum(sizes) if self.options.scale_grads else None
        # The only micro-batch of a step has its mean, so no gradient changes.
        is_step = isinstance(metadata, BatchSlice) and metadata.is_whole and len(sizes) == 1
        is_own_mean = self.options.scale_grads and (is_step or not self.options.flush)
        # A weight of samples that is 1 on average over pipelines: usually no gradient changes.
        unit = 1.0
        if isinstance(metadata, BatchSlice) and not is_own_mean:
            unit = sum(sizes) / metadata.weight
        microbatches = step_inputs.microbatches
        if microbatches is None:
            microbatches = self._split(step_inputs, header)
        assert not callable(microbatches), "called when the header came"
        assert [m.size for m in microbatches] == sizes, "the caller follows the header"
        # Unless the Trainer knows the samples, each step of each pipeline has positions of its own.
        start = pipeline << 64 | step << 32
        ranges: Ranges = ((start, start + sum(sizes)),)
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
            unit=unit,
            is_own_mean=is_own_mean,
            keeps_outputs=step_inputs.keeps_outputs and self.is_last,
            needs_device_copy=any(
                leaf.device != self.device for leaf in leaves if isinstance(leaf, Tensor)
            ),
        )

    def _split(self, step_inputs: StepInputs, header: BatchHeader) -> list[Microbatch]:
        sizes, arguments = header.sizes, self._arguments(step_inputs)
        first = first_with_samples(arguments) if self.is_first else None
        for tree in arguments if self.is_first else arguments[1:]:
            tree.resolve(sum(sizes), len(sizes), is_ambiguous=header.is_ambiguous, first=first)
        nothing: list[Any] = [None] * len(sizes)
        columns = (
            sizes,
            arguments[0].split(sizes) if self.is_first else [()] * len(sizes),
            arguments[1].split(sizes),
            split_targets(step_inputs.target, sizes) if self.is_last else nothing,
        )
        return [
            Microbatch(size=size, args=args, kwargs=kwargs, target=target)
            for size, args, kwargs, target in zip(*columns, strict=True)
        ]

    def _arguments(self, step_inputs: StepInputs) -> tuple[ArgumentTree, ArgumentTree]:
        """Return positional and keyword arguments with what the chunk specs say of them."""
        specs = self.specs
        return (
            ArgumentTree.of(step_inputs.args, specs.args_chunk_spec, "args_chunk_spec"),
            ArgumentTree.of(step_inputs.kwargs, specs.kwargs_chunk_spec, "kwargs_chunk_spec"),
        )

    def sizes(self, batch_size: int) -> list[int]:
        """Return the sizes of the micro-batches of the next batch, on the first stage."""
        if self.options.n_microbatches is not None:
            return sizes_by_number(batch_size, self.options.n_microbatches)
        assert self.microbatch_size is not None, "one of the two is given"
        if not batch_size:
            raise ScheduleError(
                "a batch of 0 samples", expected="1 sample or more", fix="use a larger batch"
            )
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
    pairs = []
    for m in microbatches:
        leaves, structure = pytree.tree_flatten((m.args, m.kwargs))
        descriptions = tuple(
            (leaf.shape, leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else type(leaf).__name__
            for leaf in leaves
        )
        pairs.append((_kind_of(m.size, training, _autocast(), descriptions, structure), m.size))
    runs = tuple((kind, size, len(list(run))) for (kind, size), run in groupby(pairs))
    return BatchHeader(training, runs, metadata)


class HostCopy:
    """Numbers that a GPU may still compute: they are copied without waiting, and read later."""

    def __init__(self, values: Iterable[Tensor | float]) -> None:
        self._values = [_local(value) for value in values]
        on_device = [v for v in self._values if isinstance(v, Tensor) and not v.is_cpu]
        self._copied: Tensor | None = None
        if on_device:
            self._copied = torch.stack(on_device).to("cpu", non_blocking=True)  # pinned memory
            self._event = torch.cuda.Event(blocking=True)  # a wait keeps no core busy
            self._event.record(torch.cuda.current_stream(on_device[0].device))

    def read(self, timeout: Seconds | None = None) -> list[float]:
        """Wait for the numbers; raises PeerError after `timeout`, None for no bound."""
        copied = iter(())
        if self._copied is not None:
            if not self._event.query():
                wait_for_event(self._event, timeout)
            copied = iter(self._copied.tolist())
        return [
            v if not isinstance(v, Tensor) else v.item() if v.is_cpu else next(copied)
            for v in self._values
        ]


def _local(value: Tensor | float) -> Tensor | float:
    """Return a number or a tensor without dimensions; of one on a CPU, the number is read later."""
    return value if type(value) is Tensor and value.is_cpu else as_count(value)


def read_losses(losses: Sequence[Tensor], counts: Sequence[Count]) -> list[tuple[float, float]]:
    """Return mean and count of each micro-batch, with one copy from a GPU for all."""
    numbers = HostCopy((*losses, *counts)).read()
    return list(zip(numbers[: len(losses)], numbers[len(losses) :], strict=True))


def mean_loss(numbers: Sequence[float]) -> float | None:
    """Return the mean over all labels, or None without one; of all losses, then all counts."""
    losses, counts = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    total = sum(counts)
    found = zip(losses, counts, strict=True)
    return sum(loss * count for loss, count in found if count) / total if total else None


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


def kind_of(arguments: Sequence[ArgumentTree], size: int, *, training: bool) -> MicrobatchKind:
    """Hash the kind of a micro-batch: shapes, dtypes, which tensors need gradients.

    `arguments` are those of the batch: its micro-batches differ only in `size`.
    """
    descriptions = [[leaf.description(size) for leaf in tree.leaves] for tree in arguments]
    structures = [str(tree.structure) for tree in arguments]
    return _hash_kind(size, training, _autocast(), descriptions, structures)


@functools.lru_cache(maxsize=256)  # a hash takes 20 us, and most steps have the same kinds
def _kind_of(
    size: int,
    training: bool,
    autocast: tuple[bool, bool],
    descriptions: tuple[Any, ...],
    structure: pytree.TreeSpec,
) -> MicrobatchKind:
    return _hash_kind(size, training, autocast, descriptions, structure)


def _autocast() -> tuple[bool, bool]:
    return torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")


def _hash_kind(
    size: int, training: bool, autocast: tuple[bool, bool], descriptions: Any, structures: Any
) -> MicrobatchKind:
    text = repr((training, size, autocast, descriptions, str(structures)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
