"""Counted profiles match the same models in torch; device speed is measured in counted flops."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from polyrhythm.describe import measure
from polyrhythm.describe.layer_work import LayerWork
from polyrhythm.describe.profiles import layers_of
from polyrhythm.describe.transformer_work import TransformerShape, bert_of
from polyrhythm.errors import DescriptionError
from polyrhythm.run.profile.profile import ProfiledModel, measure_layers
from tests.gloo import builtin_models

SAMPLES, TOKENS = 2, 32
Shape = tuple[int, ...]
_ATEN = torch.ops.aten


def fused_forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def fused_backward(out: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(out, query, key, value)


FUSED = {  # torch counts fused attention on GPUs only; the same formulas on a CPU
    _ATEN._scaled_dot_product_flash_attention_for_cpu: fused_forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: fused_backward,
}
Case = tuple[list[LayerWork], nn.Sequential, Tensor]


def case(name: str) -> Case:
    """Return the counted layers, the torch model, and an input of SAMPLES samples."""
    torch.manual_seed(0)
    if name == "gpt":
        tokens = torch.randint(300, (SAMPLES, TOKENS))
        return layers_of("gpt-2x128x32x4x300"), builtin_models.gpt(2, 128, TOKENS, 4, 300), tokens
    if name == "bert":
        shape = TransformerShape(
            num_blocks=2, hidden=128, sequence=TOKENS, num_heads=4, vocabulary=300
        )
        tokens = torch.randint(300, (SAMPLES, TOKENS))
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
def test_operations_match_torch_flop_counter(name: str) -> None:
    counted, model, example = case(name)
    for layer, module in zip(counted, model, strict=True):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            with FlopCounterMode(display=False, custom_mapping=FUSED) as forward:
                output = module(example)
            with FlopCounterMode(display=False, custom_mapping=FUSED) as backward:
                output.backward(torch.ones_like(output))
        operations = SAMPLES * layer.operations
        assert operations == forward.get_total_flops(), layer.name
        found = backward.get_total_flops()
        assert layer.backward_ratio * operations == pytest.approx(found, rel=1e-12), layer.name
        example = output.detach().requires_grad_()


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet50"])
def test_stored_bytes_match_autograd(name: str) -> None:
    counted, model, example = case(name)
    profiled = ProfiledModel.of((model, example), source="test")
    cpu = torch.device("cpu")
    measured = measure_layers(profiled, size=SAMPLES, other_sizes=[], repeat=1, device=cpu)
    # GPT's positions are stored once for all samples: not counted. Hugging Face makes default
    # token types once; training passes them for each sample, as counted.
    indices = {"gpt": 8 * TOKENS, "bert": -8 * TOKENS * (SAMPLES - 1)}
    for layer, found, module in zip(counted, measured, model, strict=True):
        # Mean and deviation of each channel are per micro-batch, not per sample: not counted.
        norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm2d)]
        statistics = sum(2 * 4 * norm.num_features for norm in norms)
        expected = SAMPLES * (4 * layer.stored + layer.other_bytes) + statistics
        if layer.name == "embedding":
            expected += indices[name]
        assert expected == found.stored_bytes, layer.name


@pytest.mark.parametrize("size", [16, 48])
def test_matmul_operations_match_torch_flop_counter(size: int) -> None:
    with FlopCounterMode(display=False) as counter:
        measure.product(size, torch.device("cpu"), torch.float32)
    assert measure.product_operations(size) == counter.get_total_flops()


def test_device_flops_falls_back_to_smaller_matrices_when_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def product(size: int, *_: object) -> float:
        sizes.append(size)
        if size > 1024:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1e-3

    monkeypatch.setattr(measure, "product", product)
    speed = measure.device_flops(torch.device("cpu"), torch.float32, repeat=3)
    assert speed.median == pytest.approx(6 * 1024**3 / 1e-3)
    assert sizes[-3:] == [1024] * 3


def test_dtype_without_matmul_is_an_error() -> None:
    with pytest.raises(DescriptionError, match="cannot multiply matrices"):
        measure.device_flops(torch.device("cpu"), torch.int64, repeat=1)
