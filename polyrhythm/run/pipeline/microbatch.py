"""Split arguments into those of micro-batches, and merge outputs, by torch's chunk specs.

Tensors and block masks are split along their first dimension, which counts samples; anything else
(a flag, a scalar, a tensor with one row) goes unchanged to every micro-batch. Chunk specs, those of
torch.distributed.pipelining, say otherwise. A tensor that might as well be the same for all samples
(a mask of T x T positions in a batch of T samples) is refused without one, as is an object that
hides tensors of samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError

INPUTS = "the model's inputs"  # in error messages
SPEC_IMPORT = "torch.distributed.pipelining.microbatch"  # where users import chunk specs from


def is_chunk_spec(spec: object) -> bool:
    """Whether this is a single spec, in one of torch's ways of writing it, or None."""
    return spec is None or spec is _Replicate or isinstance(spec, TensorChunkSpec | _Replicate)


@dataclass(frozen=True, slots=True)
class ChunkSpecs:
    """How arguments are split and outputs merged: a spec, or a tree of specs, for each."""

    args_chunk_spec: Any = None
    kwargs_chunk_spec: Any = None
    output_merge_spec: Any = None

    def __post_init__(self) -> None:
        for name in ("args_chunk_spec", "kwargs_chunk_spec", "output_merge_spec"):
            spec = getattr(self, name)
            is_output, is_keyword = name == "output_merge_spec", name == "kwargs_chunk_spec"
            if not is_chunk_spec(spec) and not is_output:
                kind, shown = (Mapping, "dict by name") if is_keyword else (Sequence, "tuple")
                if not isinstance(spec, kind):
                    raise ScheduleError(
                        f"{name}={spec!r}",
                        expected=f"a {shown} of specs, or one spec for all arguments",
                        fix=f"use TensorChunkSpec(dim) from {SPEC_IMPORT}",
                    )
            for leaf in pytree.tree_leaves(spec):
                if not is_chunk_spec(leaf) and not (is_output and isinstance(leaf, _CustomReducer)):
                    reducer = ", _CustomReducer" if is_output else ""
                    raise ScheduleError(
                        f"{name} contains {leaf!r}",
                        expected=f"TensorChunkSpec(dim), _Replicate(){reducer} or None",
                        fix=f"import them from {SPEC_IMPORT}",
                    )


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
