"""What a forward keeps for its backward: bytes of each layer, as autograd really saves them.

Each storage counts once, at the last layer that keeps it, so that the bytes of consecutive layers
add up. Parameters and buffers are not among it, nor what is freed before the forward is over.
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
    """Bytes of each layer's output, and of what it keeps, in one forward of the whole model."""
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
    """What autograd holds instead of a saved tensor: it dies with the graph that needs it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # itself would keep its own graph alive, for ever


def _live_storages(holders: list[weakref.ref[_SavedTensor]], layer: nn.Module) -> dict[int, Bytes]:
    """The bytes of each storage that is still held, by its address, but for the layer's own."""
    held = [holder.tensor.untyped_storage() for each in holders if (holder := each()) is not None]
    # Asked for after the forward: a lazy layer has none before.
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in itertools.chain(layer.parameters(), layer.buffers())
    }
    return {each.data_ptr(): each.nbytes() for each in held if each.data_ptr() not in own}


def _record_saved_tensors(
    kept: list[weakref.ref[_SavedTensor]],
) -> torch.autograd.graph.saved_tensors_hooks:
    def note(tensor: Tensor) -> _SavedTensor:
        holder = _SavedTensor(tensor)
        kept.append(weakref.ref(holder))
        return holder

    return torch.autograd.graph.saved_tensors_hooks(note, lambda holder: holder.tensor)
