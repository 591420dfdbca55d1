"""Time and memory of every layer of a model, on this machine.

A layer is timed by itself, forward and backward, on what the layer before gives it. What is kept
for the backward is what autograd really saves: each storage once, at the last layer that keeps it,
so that the bytes of consecutive layers add up. Parameters and buffers are not among it.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.describe.factory import told
from polyrhythm.describe.measure import finish
from polyrhythm.describe.model import AtSize, Layer
from polyrhythm.describe.sample import Sample
from polyrhythm.errors import DescriptionError
from polyrhythm.run.profile.subject import Subject
from polyrhythm.types import Bytes, Seconds


def measured_layers(
    subject: Subject,
    *,
    size: int,
    other_sizes: Sequence[int],
    repeat: int,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Layer, ...]:
    """Every layer with micro-batches of `size`, and in its `sizes` with those of other sizes."""
    found = {each: _at_size(subject, each, repeat, device, say) for each in (size, *other_sizes)}
    return tuple(
        Layer(
            name=name,
            forward=found[size][place].forward.median,
            backward=found[size][place].backward.median,
            parameter_bytes=sum(p.nbytes for p in layer.parameters()),
            activation_bytes=found[size][place].output_bytes,
            stored_bytes=found[size][place].stored_bytes,
            forward_spread=found[size][place].forward.spread,
            backward_spread=found[size][place].backward.spread,
            sizes=tuple(found[other][place].at(other) for other in sorted(other_sizes)),
        )
        for place, (name, layer) in enumerate(subject.layers.items())
    )


@dataclass(frozen=True, slots=True)
class _Found:
    forward: Sample
    backward: Sample
    output_bytes: Bytes
    stored_bytes: Bytes

    def at(self, size: int) -> AtSize:
        return AtSize(
            microbatch_size=size,
            forward=self.forward.median,
            backward=self.backward.median,
            activation_bytes=self.output_bytes,
            stored_bytes=self.stored_bytes,
        )


def _at_size(
    subject: Subject, size: int, repeat: int, device: torch.device, say: Callable[[str], None]
) -> list[_Found]:
    say(f"micro-batches of {size}: memory")
    arguments = subject.sized(size)
    memory = _memory(subject.layers, arguments, size)
    # Sweeps over all layers: a slow moment of the machine spoils one time of each, not all of one.
    sweeps: list[list[tuple[Seconds, Seconds]]] = []
    for number in range(repeat + 1):  # the first one warms up
        say(f"micro-batches of {size}: run {number} of {repeat}")
        sweeps.append(list(_sweep(subject.layers, arguments, size, device)))
    for layer in subject.layers.values():
        layer.zero_grad()
    found = []
    per_layer = zip(*sweeps[1:], strict=True)
    for (output_bytes, stored_bytes), times in zip(memory, per_layer, strict=True):
        forwards, backwards = zip(*times, strict=True)
        found.append(_Found(Sample.of(forwards), Sample.of(backwards), output_bytes, stored_bytes))
    return found


def _memory(
    layers: dict[str, nn.Module], arguments: tuple[Any, ...], size: int
) -> list[tuple[Bytes, Bytes]]:
    """Bytes of each layer's output, and of what it keeps, in one forward of the whole model."""
    kept: list[dict[int, Bytes]] = []  # per layer, by storage
    outputs: list[Bytes] = []
    for name, layer in layers.items():
        kept.append({})
        with _telling(name, "forward", size), _noting(layer, kept[-1]):
            value = layer(*arguments)
        outputs.append(sum(tensor.nbytes for tensor in _tensors(value)))
        arguments = (value,)
    counted: set[int] = set()
    stored: list[Bytes] = []
    for storages in reversed(kept):
        stored.insert(0, sum(storages[each] for each in storages.keys() - counted))
        counted |= storages.keys()
    return list(zip(outputs, stored, strict=True))


def _noting(layer: nn.Module, kept: dict[int, Bytes]) -> torch.autograd.graph.saved_tensors_hooks:
    always_there = {
        tensor.untyped_storage().data_ptr()
        for tensor in itertools.chain(layer.parameters(), layer.buffers())
    }

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in always_there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # itself would keep its own graph alive, for ever

    return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


def _sweep(
    layers: dict[str, nn.Module], arguments: tuple[Any, ...], size: int, device: torch.device
) -> Iterator[tuple[Seconds, Seconds]]:
    """Forward and backward of one layer after the other."""
    for name, layer in layers.items():
        with _telling(name, "forward", size):
            finish(device)
            began = time.perf_counter()
            value = layer(*arguments)
            finish(device)
            forward = time.perf_counter() - began
        outputs = [tensor for tensor in _tensors(value) if tensor.requires_grad]
        gradients = [torch.ones_like(output) for output in outputs]
        arguments = (_fresh(value),)
        with _telling(name, "backward", size):
            finish(device)
            began = time.perf_counter()
            if outputs:  # else nothing in it learns
                torch.autograd.backward(outputs, gradients)
            finish(device)
            yield forward, time.perf_counter() - began


def _fresh(value: Any) -> Any:
    """The same without its past, asking for a gradient. A copy: a layer may write into it."""
    if isinstance(value, Tensor):
        tensor = value.detach()
        return tensor.requires_grad_().clone() if tensor.is_floating_point() else tensor.clone()
    if isinstance(value, tuple | list):
        return type(value)(map(_fresh, value))
    return {key: _fresh(each) for key, each in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


@contextmanager
def _telling(name: str, action: str, size: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the user's layer raises
        raise DescriptionError(
            f"layer {name!r} fails in its {action} with micro-batches of {size}: {told(error)}",
            expected="layers that take what the one before returns, with any number of samples",
            fix="mend the layer, or measure only sizes that it can do: --sizes",
        ) from None
