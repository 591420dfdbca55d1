"""Split a batch into micro-batches, and join the outputs of the micro-batches.

Tensors are split along their first dimension, which counts samples; anything else (a flag, a
scalar) goes unchanged to every micro-batch. With a given number of micro-batches, sizes differ by
at most one; with a given size, the last micro-batch may be smaller.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def sizes_by_number(batch_size: int, num_microbatches: int) -> list[int]:
    """Return sizes that are as even as possible, larger ones first."""
    if batch_size < num_microbatches:
        raise ScheduleError(
            f"a batch of {batch_size} for {num_microbatches} micro-batches",
            expected=f"{num_microbatches} samples or more",
            fix=f"use larger batches, or num_microbatches of at most {max(1, batch_size)}",
        )
    each, rest = divmod(batch_size, num_microbatches)
    return [each + (m < rest) for m in range(num_microbatches)]


def sizes_by_size(batch_size: int, microbatch_size: int) -> list[int]:
    full, rest = divmod(batch_size, microbatch_size)
    return [microbatch_size] * full + [rest] * (rest > 0)


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
    slices = [
        torch.split(leaf, list(sizes)) if isinstance(leaf, Tensor) and leaf.dim() else None
        for leaf in leaves
    ]
    return [
        pytree.tree_unflatten(
            [
                leaf if slice_ is None else slice_[m]
                for leaf, slice_ in zip(leaves, slices, strict=True)
            ],
            structure,
        )
        for m in range(len(sizes))
    ]


def all_on(device: torch.device, arguments: Any) -> bool:
    """Whether every tensor is already on the device."""
    leaves = pytree.tree_leaves(arguments)
    return all(leaf.device == device for leaf in leaves if isinstance(leaf, Tensor))


def kind_of(arguments: Any, size: int, *, training: bool) -> int:
    """Hash the kind of a micro-batch: shapes, dtypes, which tensors need gradients.

    `arguments` are those of the batch: its micro-batches differ only in `size`.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    descriptions = [
        (leaf.dim(), tuple(leaf.shape[1:]), str(leaf.dtype), leaf.requires_grad)
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


def tensors_of(returned: object, *, stage: int) -> tuple[Tensor, ...]:
    """Return the outputs of a stage as a tuple of tensors; refuse other objects."""
    outputs = returned if isinstance(returned, tuple | list) else (returned,)
    if outputs and all(isinstance(x, Tensor) and _is_plain(x) for x in outputs):
        return tuple(outputs)
    if isinstance(returned, Mapping):
        shown = f"{type(returned).__name__} with {', '.join(map(str, returned))}"
    elif isinstance(returned, tuple | list):
        shown = f"{type(returned).__name__} of {', '.join(map(_shown, returned)) or 'nothing'}"
    else:
        shown = _shown(returned)
    raise ScheduleError(
        f"stage {stage} returned a {shown}",
        expected="a tensor, or a tuple of tensors, to send to the next stage; each dense and local",
        fix="return only tensors from the stage's module, and keep the rest in the module; "
        "for a DTensor return x.to_local() or x.full_tensor(), for a sparse tensor x.to_dense()",
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not isinstance(tensor, DTensor)


def _shown(value: object) -> str:
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return f"{value.layout} tensor"
    return type(value).__name__
