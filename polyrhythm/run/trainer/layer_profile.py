"""Time and memory of the model's layers, measured on this device with samples of the dataset.

A copy of the model is measured, and random states are restored afterwards: training is the same
with and without the measurement.
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
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.reader import make_order
from polyrhythm.run.profile.profile import measure_layers
from polyrhythm.run.profile.profiled_model import ProfiledModel
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.evaluate import as_arguments
from polyrhythm.run.trainer.layer_split import LayerSplit

_MAX_MICROBATCH_SIZE = 64  # samples; larger ones use no device better
_REPEAT = 3


def profile_sizes(config: TrainerConfig, num_processes: int) -> tuple[int, ...]:
    """Return the sizes to measure, largest first; a batch has a micro-batch per process."""
    assert config.batch_size is not None, "choose_plan checks it"
    if config.microbatch_size is not None:
        return (config.microbatch_size,)
    largest = max(1, min(_MAX_MICROBATCH_SIZE, config.batch_size // num_processes))
    divisors = [size for size in range(1, largest + 1) if config.batch_size % size == 0]
    between = min(divisors, key=lambda size: abs(size * size - divisors[-1]))
    return tuple(sorted({divisors[-1], between, 1}, reverse=True))


def profile_layers(
    config: TrainerConfig,
    model: nn.Module,
    dataset: Any,
    *,
    sizes: tuple[int, ...],
    device: torch.device,
) -> tuple[Layer, ...]:
    """Profile every layer that a stage may start with.

    Skips a size at which a layer fails, except for the first of `sizes`. Raises DescriptionError,
    DataError and PlanError.
    """
    with preserve_rng_state(device):
        inputs = _first_inputs(config, dataset, max(sizes))
        arguments, keywords = as_arguments(inputs)
        layers = _layers(config.split, _deepcopy_model(model), tuple(keywords))
        example = (*arguments, *keywords.values())
        tensors = [x for x in pytree.tree_leaves(example) if isinstance(x, Tensor) and x.dim()]
        if not tensors:
            raise PlanError(
                f"inputs of type {type(inputs).__name__}, without a tensor",
                expected="samples whose inputs are a tensor, several, or several by name",
                fix="pass a plan, or a dataset whose items are (inputs, target)",
            )
        subject = ProfiledModel(layers=layers, example=example, num_samples=len(tensors[0]))
        with config.precision(device):
            return measure_layers(
                subject.to(device, None),
                size=sizes[0],
                other_sizes=sizes[1:],
                optional=sizes[1:],
                repeat=_REPEAT,
                device=device,
            )


def layer_blocks(split: LayerSplit, model: nn.Module) -> tuple[int, ...]:
    """Return the sizes of blocks of layers that no stage may split: a stage needs parameters."""
    if split.layers is not None or not isinstance(model, nn.Sequential):
        return (1,) * split.num_layers(model)
    counts: list[int] = []
    has_parameters = False  # in the last block
    for layer in model._modules.values():
        is_trained = layer is not None and any(True for _ in layer.parameters())
        if not counts or (is_trained and has_parameters):
            counts.append(1)
            has_parameters = is_trained
        else:
            counts[-1] += 1
            has_parameters = has_parameters or is_trained
    return tuple(counts)


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class _PositionalInputs(nn.Module):
    """Passes its last positional arguments to a module as keyword arguments `names`."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self._names = module, names

    def forward(self, *values: Any) -> Any:
        num_positional = len(values) - len(self._names)
        named = dict(zip(self._names, values[num_positional:], strict=True))
        return self.module(*values[:num_positional], **named)


def _layers(split: LayerSplit, model: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    if split.layers is None and isinstance(model, nn.Sequential):
        parts = [layer for layer in model._modules.values() if layer is not None]
        kinds = [type(layer).__name__ for layer in parts]
    else:
        num_layers = split.num_layers(model)
        sizes = (1,) * num_layers
        parts = [split.extract_stage(model, stage, sizes).module for stage in range(num_layers)]
        kinds = [type(model).__name__] * num_layers
    parts[0] = _PositionalInputs(parts[0], names)
    layer_names = [f"{index}.{kind}" for index, kind in enumerate(kinds)]
    return dict(zip(layer_names, parts, strict=True))


def _deepcopy_model(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # the user's modules may raise anything
        raise PlanError(
            f"the model cannot be copied for profiling: {type(error).__name__}: {error}",
            expected="a model that copy.deepcopy can copy",
            fix="pass a plan: polyrhythm profile, then polyrhythm plan",
        ) from error


def _first_inputs(config: TrainerConfig, dataset: Any, num_samples: int) -> Any:
    order = make_order(dataset, seed=config.data.seed, shuffle=config.data.shuffle)
    samples = SampleLoader(dataset, order, config.data.collate_fn, needs_target=False)
    try:
        return samples.load(((0, num_samples),)).inputs
    finally:
        if (start := samples.state_at(0)) is not None:  # an iterable dataset: rewind it
            dataset.load_state_dict(start.state)
