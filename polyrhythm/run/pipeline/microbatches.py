"""A batch cut into micro-batches, and the outputs of the micro-batches joined again.

Tensors are cut along their first dimension, which counts samples; anything else (a flag, a scalar)
goes to every micro-batch as it is. Sizes differ by one at the most when they are chosen by number,
and the last one may be smaller when they are chosen by size.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional ones, and those by name


def sizes_by_number(batch_size: int, num_microbatches: int) -> list[int]:
    """As even as it goes, larger ones first."""
    if batch_size < num_microbatches:
        raise ScheduleError(
            f"a batch of {batch_size} for {num_microbatches} micro-batches",
            expected=f"{num_microbatches} samples or more",
            fix=f"use larger batches, or num_microbatches={max(1, batch_size)} at the most",
        )
    each, rest = divmod(batch_size, num_microbatches)
    return [each + (m < rest) for m in range(num_microbatches)]


def sizes_by_size(batch_size: int, microbatch_size: int) -> list[int]:
    full, rest = divmod(batch_size, microbatch_size)
    return [microbatch_size] * full + [rest] * (rest > 0)


def batch_size_of(arguments: object, what: str) -> int | None:
    """The common first dimension of all tensors; None where there is no tensor with one."""
    found: dict[int, tuple[int, ...]] = {}
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, Tensor) and leaf.dim():
            found.setdefault(leaf.shape[0], tuple(leaf.shape))
    if len(found) > 1:
        shapes = " and ".join(str(shape) for shape in found.values())
        raise ScheduleError(
            f"{what} have shapes {shapes}",
            expected="tensors with the samples of one batch along their first dimension",
            fix="make what is not per sample a buffer of the module, or expand it to the batch",
        )
    return next(iter(found), None)


def split_microbatches(arguments: Any, sizes: Sequence[int], what: str) -> list[Any]:
    """One set of arguments per micro-batch."""
    found = batch_size_of(arguments, what)
    if found is None:
        return [arguments] * len(sizes)
    if found != sum(sizes):
        raise ScheduleError(
            f"{what} hold {found} samples, the first stage got {sum(sizes)}",
            expected="the same batch on every stage",
            fix="give every stage its share of one batch of one data loader",
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
    """Whether every tensor is on the device already."""
    leaves = pytree.tree_leaves(arguments)
    return all(leaf.device == device for leaf in leaves if isinstance(leaf, Tensor))


def kind_of(arguments: Any, size: int, *, training: bool) -> int:
    """A number for how a micro-batch of a size looks: shapes, types, what needs gradients.

    `arguments` are those of the batch, of which all micro-batches look alike but for their size.
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
    """The outputs of all micro-batches as those of the batch; None where there are none."""
    if not outputs:
        return None
    leaves, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves[0]):
        return list(outputs)  # what cannot be joined is left to the caller
    whole = [torch.cat(parts) for parts in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(whole, structures[0])


def tensors_of(returned: object, *, stage: int) -> tuple[Tensor, ...]:
    """What a stage's module returned, which has to be a tensor or several."""
    several = returned if isinstance(returned, tuple | list) else (returned,)
    if several and all(isinstance(x, Tensor) and _is_plain(x) for x in several):
        return tuple(several)
    if isinstance(returned, Mapping):
        shown = f"{type(returned).__name__} with {', '.join(map(str, returned))}"
    elif isinstance(returned, tuple | list):
        shown = f"{type(returned).__name__} of {', '.join(map(_shown, returned)) or 'nothing'}"
    else:
        shown = _shown(returned)
    raise ScheduleError(
        f"stage {stage} returned a {shown}",
        expected="a tensor, or a tuple of tensors, to send to the next stage; each a plain one, "
        "whose numbers are here",
        fix="return only tensors from the stage's module, and keep the rest in the module; "
        "of a DTensor return x.to_local() or x.full_tensor(), of others x.to_dense()",
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not isinstance(tensor, DTensor)


def _shown(value: object) -> str:
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return f"{value.layout} tensor"
    return type(value).__name__
