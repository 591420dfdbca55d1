"""One batch on one stage: split into micro-batches in the same way on every stage.

The first stage has the inputs, decides how to split them, and sends a header to the others. Each
stage splits its own arguments: the last one targets, all of them keyword arguments. With a given
number of micro-batches, sizes differ by at most one; with a given size, the last micro-batch may be
smaller. The Trainer passes micro-batches that are separate already, each padded by itself.

Tensors and block masks are split along their first dimension, which counts samples; anything else
(a flag, a scalar, a tensor with one row) goes unchanged to every micro-batch. Chunk specs, those of
torch.distributed.pipelining, say otherwise. A tensor that might as well be the same for all samples
(a mask of T x T positions in a batch of T samples) is refused without one, as is an object that
hides tensors of samples.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate, groupby
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline.loss import Count
from polyrhythm.run.pipeline.options import SPEC_IMPORT, PipelineOptions, is_chunk_spec
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
    # Whether the first input has two dimensions of the length of the batch (samples, positions):
    # the length of a dimension then does not show what it counts.
    is_ambiguous: bool = False

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
            microbatches = self._split(step_inputs, header)
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

    def _arguments(self, step_inputs: StepInputs) -> tuple["ArgumentTree", "ArgumentTree"]:
        """Return positional and keyword arguments with what the chunk specs say of them."""
        specs = self.options.specs
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
        descriptions = [
            (tuple(leaf.shape), str(leaf.dtype), leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else type(leaf).__name__
            for leaf in leaves
        ]
        pairs.append((_hash_kind(m.size, training, descriptions, str(structure)), m.size))
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


@dataclass(slots=True)
class ArgumentLeaf:
    """A tensor, block mask or other object among a stage's arguments, and how it is split."""

    key: int | str  # position or name of the argument that contains it
    value: Any
    dim: int | None  # the dimension that counts samples; None: every micro-batch gets the whole
    has_own_spec: bool = False
    has_spec: bool = False  # its own, or the one for all arguments
    num_rows: int = field(default=0, init=False)  # of a sample along `dim`; 0: nothing is split

    @classmethod
    def of(cls, key: int | str, value: Any, spec: Any, *, is_own: bool) -> "ArgumentLeaf":
        """Apply a chunk spec: the leaf's own, or the one for all arguments, or None."""
        is_splittable = isinstance(value, BlockMask) or (isinstance(value, Tensor) and value.dim())
        if not isinstance(spec, TensorChunkSpec):
            is_whole = spec is not None or not is_splittable
            return cls(key, value, None if is_whole else 0, has_spec=spec is not None)
        num_dims = 0 if not is_splittable else 1 if isinstance(value, BlockMask) else value.dim()
        if -num_dims <= spec.split_dim < num_dims:
            return cls(key, value, spec.split_dim % num_dims, is_own, has_spec=True)
        if not is_own and not is_splittable:
            return cls(key, value, None)
        shown = f"a tensor with {num_dims} dimensions" if isinstance(value, Tensor) else repr(value)
        if isinstance(value, BlockMask):
            shown = "a BlockMask, whose samples are along dimension 0"
        raise ScheduleError(
            f"TensorChunkSpec({spec.split_dim}) for {_name(key)}: {shown}",
            expected="a dimension that the argument has",
            fix=f"change the dimension, or pass _Replicate() from {SPEC_IMPORT}",
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def length(self) -> int:
        """The length of the dimension that counts samples."""
        assert self.dim is not None, "only of a leaf with samples"
        return self.shape[self.dim]

    def rows_per_sample(self, batch_size: int) -> int | None:
        """Return the rows of a sample, 0 if there is one row for all; None if neither fits."""
        if self.dim is None:
            return 0
        is_mask = isinstance(self.value, BlockMask)
        if self.length == 1 != batch_size and (is_mask or not self.has_own_spec):
            return 0
        rows, rest = divmod(self.length, batch_size)
        return None if rest or (rows > 1 and (is_mask or not self.has_own_spec)) else rows or None

    def split(self, sizes: Sequence[int]) -> Sequence[Any]:
        if not self.num_rows:
            return [self.value] * len(sizes)
        if isinstance(self.value, BlockMask):
            return split_block_mask(self.value, sizes)
        assert self.dim is not None, "otherwise it has no rows"
        return torch.split(self.value, [size * self.num_rows for size in sizes], self.dim)

    def description(self, size: int) -> object:
        """Describe the leaf of a micro-batch with `size` samples."""
        if not isinstance(self.value, Tensor | BlockMask):
            return type(self.value).__name__
        shape = list(self.shape)
        if self.num_rows and self.dim is not None:
            shape[self.dim] = size * self.num_rows
        if isinstance(self.value, BlockMask):
            return "BlockMask", shape
        return shape, str(self.value.dtype), self.value.requires_grad


@dataclass(slots=True)
class ArgumentTree:
    """The positional or the keyword arguments of a stage, flattened."""

    leaves: list[ArgumentLeaf]
    structure: pytree.TreeSpec

    @classmethod
    def of(
        cls, arguments: tuple[Any, ...] | dict[str, Any], spec: Any, option: str
    ) -> "ArgumentTree":
        """Flatten the arguments; `spec` is one for all, or one for each, or None."""
        values, structure = pytree.tree_flatten(
            arguments, is_leaf=lambda value: isinstance(value, BlockMask)
        )
        keys: list[int | str] = [
            *(arguments if isinstance(arguments, dict) else range(len(arguments)))
        ]
        is_own = not is_chunk_spec(spec)
        specs = _own_specs(spec, keys, option) if is_own and keys else dict.fromkeys(keys, spec)
        leaves, remaining = [], iter(values)
        for key, part in zip(keys, structure.children(), strict=True):
            flat = [specs.get(key)] * part.num_leaves
            if not is_chunk_spec(specs.get(key)):
                flat = pytree.tree_leaves(specs[key])
            if len(flat) != part.num_leaves:
                raise ScheduleError(
                    f"{option} has {len(flat)} specs for {_name(key)}, which has "
                    f"{part.num_leaves} tensors and other values",
                    expected="one spec for the argument, or one for each of its values",
                    fix=f"give {option} the structure of the argument",
                )
            leaves += [
                ArgumentLeaf.of(key, next(remaining), leaf_spec, is_own=is_own)
                for leaf_spec in flat
            ]
        return cls(leaves, structure)

    def resolve(
        self,
        batch_size: int,
        num_microbatches: int,
        *,
        is_ambiguous: bool,
        first: ArgumentLeaf | None,
    ) -> None:
        """Find the rows of a sample in each leaf; `first` defines the batch on the first stage."""
        for leaf in self.leaves:
            rows = leaf.rows_per_sample(batch_size)
            if rows is None:
                raise _mismatch(leaf, batch_size, first)
            leaf.num_rows = rows
            if num_microbatches == 1 or leaf.has_spec or leaf is first:
                continue
            if holds_samples(leaf.value, batch_size):
                raise _opaque(_name(leaf.key), leaf.value, batch_size, _whole(leaf.key))
            is_tensor = rows and isinstance(leaf.value, Tensor)
            if is_tensor and (is_ambiguous or leaf.shape[1:2] == (batch_size,)):
                raise _ambiguity(leaf, batch_size)

    def split(self, sizes: Sequence[int]) -> list[Any]:
        """Return the arguments of every micro-batch."""
        if not self.leaves:
            return [pytree.tree_unflatten([], self.structure)] * len(sizes)
        columns = [leaf.split(sizes) for leaf in self.leaves]
        return [pytree.tree_unflatten(row, self.structure) for row in zip(*columns, strict=True)]


def first_with_samples(arguments: Sequence[ArgumentTree]) -> ArgumentLeaf | None:
    """Return the tensor that defines the batch size: the first one that is split."""
    leaves = (leaf for tree in arguments for leaf in tree.leaves)
    return next((x for x in leaves if x.dim is not None and isinstance(x.value, Tensor)), None)


def holds_samples(value: object, batch_size: int) -> bool:
    """Whether an object that cannot be split holds a tensor with as many rows as samples."""
    if isinstance(value, Tensor | BlockMask | str | int | float | None | type):
        return False
    held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return any(
        isinstance(tensor, Tensor) and tensor.shape[:1] == (batch_size,)
        for tensor in pytree.tree_leaves(list(held.values()))
    )


def split_targets(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the targets of every micro-batch, split along the first dimension as torch does."""
    leaves, structure = pytree.tree_flatten(target)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        if len(sizes) > 1 and holds_samples(leaf, sum(sizes)):
            raise _opaque("the target", leaf, sum(sizes), "")
        if not isinstance(leaf, Tensor) or not leaf.dim():
            columns.append([leaf] * len(sizes))
        elif leaf.shape[0] == sum(sizes):
            columns.append(torch.split(leaf, list(sizes)))
        else:
            raise _other_batch("targets", leaf.shape[0], sum(sizes), fix=_ONE_BATCH)
    return [pytree.tree_unflatten(row, structure) for row in zip(*columns, strict=True)]


def split_block_mask(mask: BlockMask, sizes: Sequence[int]) -> list[BlockMask]:
    """Split a flex-attention mask by samples, as torch.distributed.pipelining does."""

    def split(blocks: Tensor | None) -> Sequence[Any]:
        return [None] * len(sizes) if blocks is None else torch.split(blocks, list(sizes))

    def mask_mod(start: int) -> Callable[..., Tensor]:
        def of_microbatch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            # A tensor, not a number: a compiled mask would be compiled anew for every number.
            return mask.mask_mod(b + torch.full_like(b, start), h, q_idx, kv_idx)

        return of_microbatch

    tables = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    starts = accumulate(sizes[:-1], initial=0)
    return [
        BlockMask.from_kv_blocks(
            counts,
            indices,
            full_counts,
            full_indices,
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=mask_mod(start),
            seq_lengths=mask.seq_lengths,
            compute_q_blocks=mask.q_indices is not None,
        )
        for start, counts, indices, full_counts, full_indices in zip(
            starts, *map(split, tables), strict=True
        )
    ]


def kind_of(arguments: Sequence[ArgumentTree], size: int, *, training: bool) -> MicrobatchKind:
    """Hash the kind of a micro-batch: shapes, dtypes, which tensors need gradients.

    `arguments` are those of the batch: its micro-batches differ only in `size`.
    """
    descriptions = [[leaf.description(size) for leaf in tree.leaves] for tree in arguments]
    return _hash_kind(size, training, descriptions, [str(tree.structure) for tree in arguments])


def _hash_kind(size: int, training: bool, descriptions: Any, structures: Any) -> int:
    autocast = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    text = repr((training, size, autocast, descriptions, structures))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def merge_outputs(outputs: Sequence[Any], spec: Any = None) -> Any:
    """Merge the outputs of all micro-batches as `spec` says; None if there are none."""
    if not outputs:
        return None
    flat, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if spec is None:
        if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in flat[0]):
            return list(outputs)  # other objects cannot be concatenated: the caller gets a list
        spec = TensorChunkSpec(0)
    specs, structure = pytree.tree_flatten(spec)
    if structure.is_leaf():  # one for all outputs
        specs, structure = specs * len(flat[0]), structures[0]
    if len(specs) != len(flat[0]):
        raise ScheduleError(
            f"output_merge_spec has {len(specs)} specs, the model {len(flat[0])} outputs",
            expected="one spec for all outputs, or one for each",
            fix="give output_merge_spec the structure of the model's outputs",
        )
    columns = zip(*flat, strict=True)
    merged = [_merge(spec, column) for spec, column in zip(specs, columns, strict=True)]
    return pytree.tree_unflatten(merged, structure)


def _merge(spec: Any, parts: tuple[Any, ...]) -> Any:
    """Merge one output of all micro-batches."""
    if isinstance(spec, _CustomReducer):
        return reduce(spec.reduce_fn, parts, spec.init_value)
    if isinstance(spec, TensorChunkSpec):
        dim = spec.split_dim
        if all(isinstance(part, Tensor) and -part.dim() <= dim < part.dim() for part in parts):
            return torch.cat(parts, dim)
        shown = f"TensorChunkSpec({dim}) for a model's output {type(parts[0]).__name__}"
        if isinstance(parts[0], Tensor):
            shown += f" of {parts[0].dim()} dimensions"
        raise ScheduleError(
            shown,
            expected="a tensor that has this dimension",
            fix=f"change output_merge_spec: _CustomReducer from {SPEC_IMPORT} combines numbers",
        )
    is_tensor = isinstance(parts[0], Tensor)
    if all(torch.equal(parts[0], part) if is_tensor else parts[0] == part for part in parts[1:]):
        return parts[0]
    raise ScheduleError(
        "an output that output_merge_spec replicates differs between micro-batches",
        expected="the same value from every micro-batch",
        fix=f"use TensorChunkSpec(dim) to concatenate, or _CustomReducer, from {SPEC_IMPORT}",
    )


def _own_specs(spec: Any, keys: Sequence[int | str], option: str) -> dict[int | str, Any]:
    """Return the specs by argument; refuse those of arguments that are not passed."""
    specs = dict(spec if isinstance(spec, Mapping) else enumerate(spec))
    if unknown := [key for key in specs if key not in keys]:
        raise ScheduleError(
            f"{option} for {', '.join(map(_name, unknown))}, which this stage was not called with",
            expected=f"specs for {', '.join(map(_name, keys))}",
            fix=f"change {option}, or pass the argument",
        )
    return specs


_ONE_BATCH = "pass every stage its part of one batch of one data loader"


def _name(key: int | str) -> str:
    return f"keyword argument {key!r}" if isinstance(key, str) else f"positional argument {key}"


def _option(key: int | str, spec: str) -> str:
    """Return how to set the spec of one argument."""
    if isinstance(key, str):
        return f"kwargs_chunk_spec={{{key!r}: {spec}}}"
    return f"args_chunk_spec=({'None, ' * key}{spec},)"


def _whole(key: int | str) -> str:
    return f"{_option(key, '_Replicate()')} from {SPEC_IMPORT}, if it has no samples"


def _opaque(name: str, value: object, batch_size: int, whole: str) -> ScheduleError:
    return ScheduleError(
        f"{name} is a {type(value).__name__} that holds a tensor of {batch_size} rows, as many as "
        "the batch has samples",
        expected="tensors in tuples, lists or dicts, which can be split",
        fix=f"pass its tensors as a dict{'; ' * bool(whole)}{whole}",
    )


def _mismatch(leaf: ArgumentLeaf, batch_size: int, first: ArgumentLeaf | None) -> ScheduleError:
    whole = _whole(leaf.key)
    if first is None:
        what = "keyword arguments"
        return _other_batch(what, leaf.length, batch_size, fix=f"{_ONE_BATCH}; {whole}")
    multiple = " or a multiple" if leaf.has_own_spec else ""
    return ScheduleError(
        f"{INPUTS} have shapes {first.shape} and {leaf.shape} ({_name(leaf.key)})",
        expected=f"{batch_size} samples{multiple} along dimension {leaf.dim}",
        fix=f"{_option(leaf.key, 'TensorChunkSpec(dim)')} if its samples are along another "
        f"dimension or have several rows each; {whole}",
    )


def _other_batch(what: str, num_samples: int, batch_size: int, *, fix: str) -> ScheduleError:
    return ScheduleError(
        f"{what} have {num_samples} samples, the inputs of the first stage {batch_size}",
        expected="the same batch on every stage",
        fix=fix,
    )


def _ambiguity(leaf: ArgumentLeaf, batch_size: int) -> ScheduleError:
    return ScheduleError(
        f"{_name(leaf.key)} has shape {leaf.shape} in a batch of {batch_size} samples: its rows "
        "may be the samples, or as many positions in a sequence",
        expected="a chunk spec that says which: a mask for all samples must not be split",
        fix=f"{_option(leaf.key, 'TensorChunkSpec(0)')} to split it by samples, or "
        f"{_option(leaf.key, '_Replicate()')} to pass all of it to every micro-batch, "
        f"both from {SPEC_IMPORT}",
    )
