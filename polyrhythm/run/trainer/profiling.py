"""What the layers of the model take, measured on this device with samples that it is to learn from.

It is a copy that is measured, and whatever is random goes on afterwards where it was: training is
the same with and without it.
"""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.describe.model import Layer
from polyrhythm.errors import PlanError
from polyrhythm.run.data.loading import Samples
from polyrhythm.run.data.reading import order_of
from polyrhythm.run.profile.layers import measured_layers
from polyrhythm.run.profile.subject import Subject
from polyrhythm.run.trainer.cutting import Cut
from polyrhythm.run.trainer.loop import as_arguments
from polyrhythm.run.trainer.settings import Settings

_LARGEST = 64  # samples in a micro-batch: more of them fill no device better
_REPEAT = 3


def sizes_of(settings: Settings, num_processes: int) -> tuple[int, ...]:
    """Micro-batches to measure, the largest first: it leaves each process one of a batch."""
    assert settings.batch_size is not None, "checked"
    if settings.microbatch_size is not None:
        return (settings.microbatch_size,)
    most = max(1, min(_LARGEST, settings.batch_size // num_processes))
    good = [size for size in range(1, most + 1) if settings.batch_size % size == 0]
    between = min(good, key=lambda size: abs(size * size - good[-1]))
    return tuple(sorted({good[-1], between, 1}, reverse=True))


def profiled_layers(
    settings: Settings,
    model: nn.Module,
    dataset: Any,
    *,
    sizes: tuple[int, ...],
    device: torch.device,
) -> tuple[Layer, ...]:
    """Every layer that a stage could begin with; raises DescriptionError, DataError, PlanError.

    A size that a layer cannot do is left out, but for the largest if it was asked for.
    """
    with undisturbed(device):
        inputs = _first_inputs(settings, dataset, max(sizes))
        arguments, keywords = as_arguments(inputs)
        layers = _layers(settings.cut, _copied(model), tuple(keywords))
        example = (*arguments, *keywords.values())
        tensors = [x for x in pytree.tree_leaves(example) if isinstance(x, Tensor) and x.dim()]
        if not tensors:
            raise PlanError(
                f"inputs of type {type(inputs).__name__}, without a tensor",
                expected="samples whose inputs are a tensor, several, or several by name",
                fix="give a plan, or a dataset whose items are (inputs, target)",
            )
        subject = Subject(layers=layers, example=example, num_samples=len(tensors[0]))
        with settings.precision(device):
            return measured_layers(
                subject.to(device, None),
                size=sizes[0],
                other_sizes=sizes[1:],
                optional=sizes[1:],
                repeat=_REPEAT,
                device=device,
            )


def layers_together(cut: Cut, model: nn.Module) -> tuple[int, ...]:
    """How many layers in a row stay together: what has no parameters is no stage."""
    if cut.layers is not None or not isinstance(model, nn.Sequential):
        return (1,) * cut.num_layers(model)
    counts: list[int] = []
    has_parameters = False  # the last of them
    for layer in model._modules.values():
        learns = layer is not None and any(True for _ in layer.parameters())
        if not counts or (learns and has_parameters):
            counts.append(1)
            has_parameters = learns
        else:
            counts[-1] += 1
            has_parameters = has_parameters or learns
    return tuple(counts)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """What is random goes on afterwards as if nothing had been drawn."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


class _Named(nn.Module):
    """A module that takes what comes by position under these names."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self._names = module, names

    def forward(self, *values: Any) -> Any:
        number = len(values) - len(self._names)
        named = dict(zip(self._names, values[number:], strict=True))
        return self.module(*values[:number], **named)


def _layers(cut: Cut, model: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    if cut.layers is None and isinstance(model, nn.Sequential):
        parts = [layer for layer in model._modules.values() if layer is not None]
        kinds = [type(layer).__name__ for layer in parts]
    else:
        number = cut.num_layers(model)
        parts = [cut.part(model, stage, (1,) * number).module for stage in range(number)]
        kinds = [type(model).__name__] * number
    parts[0] = _Named(parts[0], names)
    names_of = [f"{place}.{kind}" for place, kind in enumerate(kinds)]
    return dict(zip(names_of, parts, strict=True))


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever the user's modules hold
        raise PlanError(
            f"the model cannot be copied, to be measured: {type(error).__name__}: {error}",
            expected="a model for copy.deepcopy",
            fix="give a plan: polyrhythm profile, then polyrhythm plan",
        ) from error


def _first_inputs(settings: Settings, dataset: Any, number: int) -> Any:
    order = order_of(dataset, seed=settings.seed, shuffle=settings.shuffle)
    samples = Samples(dataset, order, settings.collate_fn, needs_target=False)
    try:
        return samples.load(((0, number),)).inputs
    finally:
        if (begin := samples.bookmark(0)) is not None:  # a stream, which has been read from
            dataset.load_state_dict(begin.state)
