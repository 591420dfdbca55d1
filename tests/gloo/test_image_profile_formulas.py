"""Counted profiles of DenseNet-201 and Inception-v4 match the same models in torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.describe.profiles import layers_of
from polyrhythm.run.profile.profile import ProfiledModel, measure_layers
from tests.gloo import image_models
from tests.grids import long_except

SAMPLES = 2
Case = tuple[list[LayerWork], nn.Sequential, Tensor]


def case(name: str) -> Case:
    """Return the counted layers, the torch model, and an input."""
    torch.manual_seed(0)
    side = {"densenet201": 32, "inceptionv4": 75}[name]  # reduced to 1 x 1 at the end
    example = torch.randn(SAMPLES, 3, side, side)
    return layers_of(f"{name}-{side}"), getattr(image_models, name)(), example


both = pytest.mark.parametrize("name", long_except(["densenet201", "inceptionv4"], 0))


@both
def test_parameters_outputs_and_operations_are_exact(name: str) -> None:
    counted, model, example = case(name)
    for layer, module in zip(counted, model, strict=True):
        with FlopCounterMode(display=False) as forward:
            output = module(example)
        with FlopCounterMode(display=False) as backward:
            output.backward(torch.ones_like(output))
        assert layer.parameters == sum(p.numel() for p in module.parameters()), layer.name
        assert SAMPLES * layer.outputs == output.numel(), layer.name
        operations = SAMPLES * layer.operations
        assert operations == forward.get_total_flops(), layer.name
        assert layer.backward_ratio * operations == backward.get_total_flops(), layer.name
        example = output.detach().requires_grad_()


@both
def test_stored_bytes_match_autograd(name: str) -> None:
    counted, model, example = case(name)
    profiled = ProfiledModel.of((model, example), source="test")
    cpu = torch.device("cpu")
    measured = measure_layers(profiled, size=SAMPLES, other_sizes=[], repeat=1, device=cpu)
    for layer, found, module in zip(counted, measured, model, strict=True):
        # Mean and deviation of each channel are per micro-batch, not per sample: not counted.
        norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm2d)]
        statistics = sum(2 * 4 * norm.num_features for norm in norms)
        expected = SAMPLES * (4 * layer.stored + layer.other_bytes) + statistics
        assert expected == found.stored_bytes, layer.name
