"""Time and memory of every layer of a model, on this machine.

Each layer is timed separately, forward and backward, on the previous layer's output; all are in
training mode. Memory comes first, for all sizes: a size at which a layer fails costs no timing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polyrhythm.describe.measure import finish
from polyrhythm.describe.model import AtSize, Layer
from polyrhythm.describe.sample import Sample
from polyrhythm.errors import DescriptionError
from polyrhythm.run.profile.layer_io import describe_layer_errors, detached_copy, tensors_of
from polyrhythm.run.profile.memory import forward_memory
from polyrhythm.run.profile.profiled_model import ProfiledModel
from polyrhythm.types import Bytes, Seconds


def measure_layers(
    model: ProfiledModel,
    *,
    size: int,
    other_sizes: Sequence[int],
    repeat: int,
    device: torch.device,
    optional: Sequence[int] = (),
    on_progress: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[Layer, ...]:
    """Measure every layer with micro-batches of `size`, and in its `sizes` with other sizes.

    An `optional` size at which a layer fails is skipped with a warning.
    """
    with torch.enable_grad(), _train_mode(model.layers):
        memory: dict[int, list[tuple[Bytes, Bytes]]] = {}
        for each in (size, *other_sizes):
            on_progress(f"micro-batches of {each}: memory")
            try:
                memory[each] = forward_memory(model.layers, model.resized_example(each), each)
            except DescriptionError as error:
                if each not in optional:
                    raise
                warn(f"skipped micro-batches of {each}: {error.wrong}")
        found = {
            each: _at_size(model, each, memory[each], repeat, device, on_progress)
            for each in memory
        }
    others = sorted(found.keys() - {size})
    return tuple(
        Layer(
            name=name,
            forward=found[size][index].forward.median,
            backward=found[size][index].backward.median,
            parameter_bytes=sum(p.nbytes for p in layer.parameters()),
            activation_bytes=found[size][index].output_bytes,
            stored_bytes=found[size][index].stored_bytes,
            forward_spread=found[size][index].forward.spread,
            backward_spread=found[size][index].backward.spread,
            sizes=tuple(found[other][index].at(other) for other in others),
        )
        for index, (name, layer) in enumerate(model.layers.items())
    )


@dataclass(frozen=True, slots=True)
class _LayerSamples:
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


@contextmanager
def _train_mode(layers: dict[str, nn.Module]) -> Iterator[None]:
    """Set all modules to training mode, as in the planned training, and restore them after."""
    modules = [module for layer in layers.values() for module in layer.modules()]
    modes = [module.training for module in modules]
    for layer in layers.values():
        layer.train()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _at_size(
    model: ProfiledModel,
    size: int,
    memory: list[tuple[Bytes, Bytes]],
    repeat: int,
    device: torch.device,
    on_progress: Callable[[str], None],
) -> list[_LayerSamples]:
    # Sweeps over all layers: a slow moment affects one sample of each layer, not all of one.
    sweeps: list[list[tuple[Seconds, Seconds]]] = []
    for number in range(repeat + 1):  # the first one warms up
        on_progress(f"micro-batches of {size}: run {number} of {repeat}")
        sweeps.append(list(_sweep(model.layers, model.resized_example(size), size, device)))
    for layer in model.layers.values():
        layer.zero_grad()
    found = []
    per_layer = zip(*sweeps[1:], strict=True)
    for (output_bytes, stored_bytes), times in zip(memory, per_layer, strict=True):
        forwards, backwards = zip(*times, strict=True)
        found.append(
            _LayerSamples(Sample.of(forwards), Sample.of(backwards), output_bytes, stored_bytes)
        )
    return found


def _sweep(
    layers: dict[str, nn.Module], arguments: tuple[Any, ...], size: int, device: torch.device
) -> Iterator[tuple[Seconds, Seconds]]:
    """Yield the forward and backward times of each layer."""
    for name, layer in layers.items():
        with describe_layer_errors(name, "forward", size):
            finish(device)
            start = time.perf_counter()
            value = layer(*arguments)
            finish(device)
            forward = time.perf_counter() - start
        outputs = [tensor for tensor in tensors_of(value, name) if tensor.requires_grad]
        with describe_layer_errors(name, "backward", size):
            gradients = [torch.ones_like(output) for output in outputs]
            arguments = (detached_copy(value),)
            finish(device)
            start = time.perf_counter()
            if outputs:  # otherwise the layer has no gradients
                torch.autograd.backward(outputs, gradients)
            finish(device)
            backward = time.perf_counter() - start
        yield forward, backward
