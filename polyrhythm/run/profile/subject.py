"""The model to be measured, understood: layers by name, and an example of what the first takes."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyrhythm.errors import DescriptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    layers: dict[str, nn.Module]
    example: tuple[Any, ...]  # arguments of the first layer
    num_samples: int  # in the example: the first dimension of its first tensor

    @classmethod
    def of(cls, returned: object, *, source: str) -> Self:
        """What a factory returned; raises DescriptionError."""
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise _misfit(source, _kind(returned))
        model, example = returned
        layers = _layers(model, source)
        arguments = example if isinstance(example, tuple) else (example,)
        tensors = [each for each in arguments if isinstance(each, Tensor) and each.dim()]
        if not tensors or len(tensors[0]) == 0:
            raise _misfit(source, f"{_kind(example)} as the example")
        return cls(layers=layers, example=arguments, num_samples=len(tensors[0]))

    def default_sizes(self) -> list[int]:
        """One sample, a quarter, half and all of the example."""
        shares = (self.num_samples, self.num_samples // 2, self.num_samples // 4, 1)
        return sorted({max(1, share) for share in shares})

    def to(self, device: torch.device, dtype: torch.dtype | None) -> Self:
        """On a device; where a type is given, numbers with a point have it."""
        for layer in self.layers.values():
            layer.to(device, dtype)
        example = [
            each.to(device, dtype if each.is_floating_point() else None)
            if isinstance(each, Tensor)
            else each
            for each in self.example
        ]
        return replace(self, example=tuple(example))

    def sized(self, size: int) -> tuple[Any, ...]:
        """The example, cut or repeated to so many samples."""
        return tuple(
            each[torch.arange(size, device=each.device) % self.num_samples]
            if isinstance(each, Tensor) and each.dim() and len(each) == self.num_samples
            else each
            for each in self.example
        )


def _layers(model: object, source: str) -> dict[str, nn.Module]:
    if isinstance(model, nn.Sequential):
        named = dict(model._modules)  # named_children() leaves out a layer's second appearance
    elif isinstance(model, list | tuple | nn.ModuleList):
        named = {str(place): layer for place, layer in enumerate(model)}
    else:
        raise _misfit(source, f"{_kind(model)} as the model")
    if not named:
        raise _misfit(source, "a model without layers")
    layers: dict[str, nn.Module] = {}
    for name, layer in named.items():
        if not isinstance(layer, nn.Module):
            raise _misfit(source, f"{_kind(layer)} as layer {name}")
        layers[f"{name}.{type(layer).__name__}" if name.isdigit() else name] = layer
    return layers


def _misfit(source: str, what: str) -> DescriptionError:
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
