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
from polyrhythm.run.data.loader import SampleLoader
from polyrhythm.run.data.reader import make_order
from polyrhythm.run.profile.layers import measure_layers
from polyrhythm.run.profile.profiled_model import ProfiledModel
from polyrhythm.run.trainer.config import TrainerConfig
from polyrhythm.run.trainer.split_spec import SplitSpec
from polyrhythm.run.trainer.step_loop import as_arguments

_LARGEST = 64  # samples in a micro-batch: more of them fill no device better
_REPEAT = 3


def profile_sizes(config: TrainerConfig, num_processes: int) -> tuple[int, ...]:
    """Micro-batches to measure, the largest first: it leaves each process one of a batch."""
    assert config.batch_size is not None, "checked"
    if config.microbatch_size is not None:
        return (config.microbatch_size,)
    most = max(1, min(_LARGEST, config.batch_size // num_processes))
    good = [size for size in range(1, most + 1) if config.batch_size % size == 0]
    between = min(good, key=lambda size: abs(size * size - good[-1]))
    return tuple(sorted({good[-1], between, 1}, reverse=True))


def profile_layers(
    config: TrainerConfig,
    model: nn.Module,
    dataset: Any,
    *,
    sizes: tuple[int, ...],
    device: torch.device,
) -> tuple[Layer, ...]:
    """Every layer that a stage could begin with; raises DescriptionError, DataError, PlanError.

    A size that a layer cannot do is left out, but for the largest if it was asked for.
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
                fix="give a plan, or a dataset whose items are (inputs, target)",
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


def layer_blocks(split: SplitSpec, model: nn.Module) -> tuple[int, ...]:
    """How many layers in a row stay together: what has no parameters is no stage."""
    if split.layers is not None or not isinstance(model, nn.Sequential):
        return (1,) * split.num_layers(model)
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
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """What is random goes on afterwards as if nothing had been drawn."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


class _PositionalInputs(nn.Module):
    """A module that takes what comes by position under these names."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self._names = module, names

    def forward(self, *values: Any) -> Any:
        number = len(values) - len(self._names)
        named = dict(zip(self._names, values[number:], strict=True))
        return self.module(*values[:number], **named)


def _layers(split: SplitSpec, model: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    if split.layers is None and isinstance(model, nn.Sequential):
        parts = [layer for layer in model._modules.values() if layer is not None]
        kinds = [type(layer).__name__ for layer in parts]
    else:
        number = split.num_layers(model)
        parts = [split.extract_stage(model, stage, (1,) * number).module for stage in range(number)]
        kinds = [type(model).__name__] * number
    parts[0] = _PositionalInputs(parts[0], names)
    names_of = [f"{place}.{kind}" for place, kind in enumerate(kinds)]
    return dict(zip(names_of, parts, strict=True))


def _deepcopy_model(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever the user's modules hold
        raise PlanError(
            f"the model cannot be copied, to be measured: {type(error).__name__}: {error}",
            expected="a model for copy.deepcopy",
            fix="give a plan: polyrhythm profile, then polyrhythm plan",
        ) from error


def _first_inputs(config: TrainerConfig, dataset: Any, number: int) -> Any:
    order = make_order(dataset, seed=config.seed, shuffle=config.shuffle)
    samples = SampleLoader(dataset, order, config.collate_fn, needs_target=False)
    try:
        return samples.load(((0, number),)).inputs
    finally:
        if (begin := samples.state_at(0)) is not None:  # a stream, which has been read from
            dataset.load_state_dict(begin.state)
