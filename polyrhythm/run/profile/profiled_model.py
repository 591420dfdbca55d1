"""The model to profile: its layers by name, and example arguments of the first."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.describe.factory import error_summary
from polyrhythm.errors import DescriptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledModel:
    layers: dict[str, nn.Module]
    example: tuple[Any, ...]  # arguments of the first layer
    num_samples: int  # in the example: the first dimension of its first tensor

    @classmethod
    def of(cls, returned: object, *, source: str) -> Self:
        """Parse what a factory returned; raises DescriptionError."""
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise _unusable_model(source, _kind(returned))
        model, example = returned
        layers = _layers(model, source)
        arguments = example if isinstance(example, tuple) else (example,)
        leaves = pytree.tree_leaves(arguments)
        tensors = [each for each in leaves if isinstance(each, Tensor) and each.dim()]
        if not tensors or len(tensors[0]) == 0:
            raise _unusable_model(source, f"{_kind(example)} as the example")
        return cls(layers=layers, example=arguments, num_samples=len(tensors[0]))

    def default_sizes(self) -> list[int]:
        """Return the sizes of one sample, a quarter, half and all of the example."""
        shares = (self.num_samples, self.num_samples // 2, self.num_samples // 4, 1)
        return sorted({max(1, share) for share in shares})

    def to(self, device: torch.device, dtype: torch.dtype | None) -> Self:
        """Move the model to a device; `dtype` is the type of its floating-point tensors.

        Raises DescriptionError if it cannot be moved: it is on "meta", or too large.
        """
        self._check_trainable()

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        what = "the example"
        try:
            example = pytree.tree_map_only(Tensor, move, self.example)
            for name, layer in self.layers.items():
                what = f"layer {name!r}"
                layer.to(device, dtype)
        except Exception as error:  # out of memory; or a layer that has a to() of its own
            raise DescriptionError(
                f"{what} cannot be moved to {device}: {error_summary(error)}",
                expected="a model that fits into the memory of one device, with one micro-batch",
                fix="measure a model of fewer such layers, or use --device cpu or --dtype bfloat16",
            ) from None
        return replace(self, example=example)

    def resized_example(self, size: int) -> tuple[Any, ...]:
        """Return a copy of the example, cut or repeated to `size` samples."""

        def resize(tensor: Tensor) -> Tensor:
            detached = tensor.detach()
            if not detached.dim() or len(detached) != self.num_samples:
                return detached.clone()
            return detached[torch.arange(size, device=detached.device) % self.num_samples]

        try:
            arguments: tuple[Any, ...] = pytree.tree_map_only(Tensor, resize, self.example)
        except (RuntimeError, MemoryError) as error:
            raise DescriptionError(
                f"an example of {size} samples cannot be made: {error_summary(error)}",
                expected="micro-batches that fit into memory",
                fix="pass smaller --sizes",
            ) from None
        return arguments

    def _check_trainable(self) -> None:
        """Reject a model without data (on "meta"), or in inference mode."""
        parameters = [each for layer in self.layers.values() for each in layer.parameters()]
        buffers = [each for layer in self.layers.values() for each in layer.buffers()]
        everything = [*pytree.tree_leaves(self.example), *parameters, *buffers]
        if any(isinstance(each, Tensor) and each.is_meta for each in everything):
            raise DescriptionError(
                "the model or its example is on the device 'meta', which holds no data",
                expected="a model that can be run",
                fix="build it without torch.device('meta'), or call model.to_empty(device='cpu')",
            )
        if any(each.is_inference() for each in parameters):
            raise DescriptionError(
                "the model was built in torch.inference_mode(), without gradients",
                expected="a model that can be trained",
                fix="build it outside of torch.inference_mode()",
            )


def _layers(model: object, source: str) -> dict[str, nn.Module]:
    if isinstance(model, nn.Sequential):
        named = dict(model._modules)  # named_children() leaves out a layer's second appearance
    elif isinstance(model, list | tuple | nn.ModuleList):
        named = {str(index): layer for index, layer in enumerate(model)}
    else:
        raise _unusable_model(source, f"{_kind(model)} as the model")
    if not named:
        raise _unusable_model(source, "a model without layers")
    layers: dict[str, nn.Module] = {}
    for name, layer in named.items():
        if not isinstance(layer, nn.Module):
            raise _unusable_model(source, f"{_kind(layer)} as layer {name}")
        layers[f"{name}.{type(layer).__name__}" if name.isdigit() else name] = layer
    return layers


def _unusable_model(source: str, what: str) -> DescriptionError:
    return DescriptionError(
        f"{source}() returned {what}",
        expected="two things: an nn.Sequential or a list of nn.Modules, "
        "and a tensor for the first of them (a tuple if it takes several arguments)",
        fix="return nn.Sequential(...), torch.randn(8, 512): the first dimension counts samples",
    )


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}" if value is not None else "nothing"
