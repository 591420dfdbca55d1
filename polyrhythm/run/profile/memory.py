"""Bytes that each layer's forward stores for its backward, as autograd saves them.

Each storage counts once, at the last layer that stores it, so that the bytes of consecutive layers
add up. Parameters and buffers do not count, nor tensors freed before the end of the forward.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.run.profile.layer_io import describe_layer_errors, tensors_of
from polyrhythm.types import Bytes


def forward_memory(
    layers: dict[str, nn.Module], arguments: tuple[Any, ...], size: int
) -> list[tuple[Bytes, Bytes]]:
    """Return the bytes of each layer's output and stored tensors in a forward of the model."""
    kept: list[list[weakref.ref[_SavedTensor]]] = []
    outputs: list[Bytes] = []
    for name, layer in layers.items():
        kept.append([])
        with describe_layer_errors(name, "forward", size), _record_saved_tensors(kept[-1]):
            value = layer(*arguments)
        outputs.append(sum(tensor.nbytes for tensor in tensors_of(value, name)))
        arguments = (value,)
    counted: set[int] = set()
    stored: list[Bytes] = []
    for layer, holders in zip(reversed(layers.values()), reversed(kept), strict=True):
        storages = _live_storages(holders, layer)
        stored.insert(0, sum(storages[each] for each in storages.keys() - counted))
        counted |= storages.keys()
    return list(zip(outputs, stored, strict=True))


class _SavedTensor:
    """Autograd holds this in place of a saved tensor; it is freed with the graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # `tensor` would keep its own graph alive for ever


def _live_storages(holders: list[weakref.ref[_SavedTensor]], layer: nn.Module) -> dict[int, Bytes]:
    """Return the bytes of live storages by address, except for the layer's parameters."""
    held = [holder.tensor.untyped_storage() for each in holders if (holder := each()) is not None]
    # Collected after the forward: a lazy layer has no parameters before.
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in itertools.chain(layer.parameters(), layer.buffers())
    }
    return {each.data_ptr(): each.nbytes() for each in held if each.data_ptr() not in own}


def _record_saved_tensors(
    kept: list[weakref.ref[_SavedTensor]],
) -> torch.autograd.graph.saved_tensors_hooks:
    def pack(tensor: Tensor) -> _SavedTensor:
        holder = _SavedTensor(tensor)
        kept.append(weakref.ref(holder))
        return holder

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor)
