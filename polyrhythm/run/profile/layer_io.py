"""What layers pass to each other: tensors, alone or in tuples, dicts and other known containers.

Containers are those of torch's pytree: also named tuples, and dataclasses that are registered.
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
    """The tensors of what the layer `name` returned; raises DescriptionError if some are hidden."""
    leaves = pytree.tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    hiding = next((leaf for leaf in leaves if _hides_tensors(leaf)), None)
    if tensors and hiding is None:
        return tensors
    what = type(value if hiding is None else hiding).__name__
    raise DescriptionError(
        f"layer {name!r} returns a {what}, in which no tensor can be found",
        expected="a tensor, or a tuple, a list, a dict or a named tuple of tensors",
        fix="return a tuple of its tensors"
        + (f", or call torch.export.register_dataclass({what})" if hiding is not None else ""),
    )


def detached_copy(value: Any) -> Any:
    """The same without its past, asking for gradients. A copy: a layer may write into it."""
    return pytree.tree_map_only(Tensor, _detached_tensor, value)


def _detached_tensor(tensor: Tensor) -> Tensor:
    alone = tensor.detach()
    return alone.requires_grad_().clone() if alone.is_floating_point() else alone.clone()


def _hides_tensors(leaf: Any) -> bool:
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return False
    inner = [getattr(leaf, field.name, None) for field in fields(leaf)]
    return any(isinstance(each, Tensor) for each in pytree.tree_leaves(inner))


@contextmanager
def describe_layer_errors(name: str, action: str, size: int) -> Iterator[None]:
    """Whatever the layer raises becomes a DescriptionError; gradients are on."""
    try:
        with torch.enable_grad():
            yield
    except Exception as error:  # whatever the user's layer raises
        raise DescriptionError(
            f"layer {name!r} fails in its {action} with micro-batches of {size}: {error_summary(error)}",
            expected="layers that take what the one before returns, with any number of samples",
            fix="mend the layer, or measure only sizes that it can do: --sizes",
        ) from None
