"""Values between layers: tensors, single or in tuples, dicts and other containers of pytree.

torch's pytree also supports named tuples, and registered dataclasses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyrhythm.describe.factory import error_summary
from polyrhythm.errors import DescriptionError


def tensors_of(value: Any, name: str) -> list[Tensor]:
    """Return the tensors in a layer's output; raises DescriptionError if pytree cannot find all."""
    leaves = pytree.tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    opaque = next((leaf for leaf in leaves if _hides_tensors(leaf)), None)
    if tensors and opaque is None:
        return tensors
    what = type(value if opaque is None else opaque).__name__
    raise DescriptionError(
        f"layer {name!r} returns a {what}, in which no tensor can be found",
        expected="a tensor, or a tuple, a list, a dict or a named tuple of tensors",
        fix="return a tuple of its tensors"
        + (f", or call torch.export.register_dataclass({what})" if opaque is not None else ""),
    )


def detached_copy(value: Any) -> Any:
    """Copy a value, detached and requiring gradients; a copy since a layer may write in place."""
    return pytree.tree_map_only(Tensor, _detached_tensor, value)


def _detached_tensor(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.requires_grad_().clone() if detached.is_floating_point() else detached.clone()


def _hides_tensors(leaf: Any) -> bool:
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return False
    inner = [getattr(leaf, field.name, None) for field in fields(leaf)]
    return any(isinstance(each, Tensor) for each in pytree.tree_leaves(inner))


@contextmanager
def describe_layer_errors(name: str, action: str, size: int) -> Iterator[None]:
    """Turn any error of a layer into a DescriptionError; gradients are enabled."""
    try:
        with torch.enable_grad():
            yield
    except Exception as error:  # a user's layer may raise anything
        raise DescriptionError(
            f"layer {name!r} fails in its {action} with micro-batches of {size}: "
            f"{error_summary(error)}",
            expected="layers that accept the previous layer's output, with any number of samples",
            fix="fix the layer, or measure only sizes that it supports: --sizes",
        ) from None
