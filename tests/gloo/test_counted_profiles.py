"""Profiles counted by formulas against the same models in torch, run and measured."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.describe.profiles import layers_of
from polyrhythm.describe.transformer_work import TransformerShape, bert_of
from polyrhythm.run.profile.layers import measured_layers
from polyrhythm.run.profile.subject import Subject
from tests.gloo import builtin_models

SAMPLES = 2
Case = tuple[list[LayerWork], nn.Sequential, Tensor]


def case(name: str) -> Case:
    """The layers as counted, the same in torch, and an input of SAMPLES samples."""
    torch.manual_seed(0)
    if name == "gpt":
        tokens = torch.randint(300, (SAMPLES, 32))
        return layers_of("gpt-2x128x32x4x300"), builtin_models.gpt(2, 128, 32, 4, 300), tokens
    if name == "bert":
        shape = TransformerShape(num_blocks=2, hidden=128, sequence=32, num_heads=4, vocabulary=300)
        tokens = torch.randint(300, (SAMPLES, 32))
        return bert_of(shape), builtin_models.bert(2, 128, 4, 300), tokens
    return layers_of("resnet50-64"), builtin_models.resnet50(), torch.randn(SAMPLES, 3, 64, 64)


def outputs_of(model: nn.Sequential, example: Tensor) -> list[Tensor]:
    outputs = []
    for layer in model:
        example = layer(example)
        outputs.append(example)
    return outputs


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet50"])
def test_parameters_and_outputs_are_exact(name: str) -> None:
    counted, model, example = case(name)
    assert len(counted) == len(model)
    parameters = [sum(p.numel() for p in layer.parameters()) for layer in model]
    assert [layer.parameters for layer in counted] == parameters
    outputs = [output.numel() for output in outputs_of(model, example)]
    assert [SAMPLES * layer.outputs for layer in counted] == outputs


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet50"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    """With attention written out: torch does not count the operations of a fused one on a CPU."""
    counted, model, example = case(name)
    for layer, module in zip(counted, model, strict=True):
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                output = module(example)
            with FlopCounterMode(display=False) as backward:
                output.backward(torch.ones_like(output))
        operations = SAMPLES * layer.operations
        assert operations == forward.get_total_flops(), layer.name
        assert layer.backward_ratio * operations == backward.get_total_flops(), layer.name
        example = output.detach().requires_grad_()


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet50"])
def test_bytes_kept_for_the_backward_are_those_that_autograd_keeps(name: str) -> None:
    counted, model, example = case(name)
    subject = Subject.of((model, example), source="test")
    cpu = torch.device("cpu")
    measured = measured_layers(subject, size=SAMPLES, other_sizes=[], repeat=1, device=cpu)
    for layer, found, module in zip(counted, measured, model, strict=True):
        # Per micro-batch, not per sample, and so not counted: mean and deviation of each channel.
        norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm2d)]
        statistics = sum(2 * 4 * norm.num_features for norm in norms)
        ours = SAMPLES * (4 * layer.stored + layer.other_bytes) + statistics
        indices = 512 if layer.name == "embedding" else 0  # of positions: one set for all samples
        assert ours == pytest.approx(found.stored_bytes, rel=0, abs=indices), layer.name
