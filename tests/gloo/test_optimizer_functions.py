"""What `pr.adamw` makes of a stage's parameters."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import polyrhythm as pr


def fused_of(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> bool | None:
    with FakeTensorMode():
        named = [("w", nn.Parameter(torch.empty(2, 2, device=device, dtype=dtype)))]
        found: bool | None = pr.adamw(lr=0.1, **options)(named).param_groups[0]["fused"]
    return found


def test_adamw_is_fused_on_a_gpu_by_default() -> None:
    assert fused_of("cuda:1") is True
    assert not fused_of("cpu")
    assert not fused_of("cuda:1", torch.complex64)


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_a_chosen_implementation_of_adamw_is_kept(options: dict[str, bool]) -> None:
    assert not fused_of("cuda:1", **options)


def test_adamw_decays_no_biases_and_norms() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    groups = pr.adamw(lr=0.1, weight_decay=0.3)(model.named_parameters()).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.3), (3, 0)]


@pytest.mark.parametrize("layer", [nn.Linear(2, 2, bias=False), nn.LayerNorm(2)])
def test_adamw_takes_a_stage_whose_parameters_are_all_decayed_or_none(layer: nn.Module) -> None:
    optimizer = pr.adamw(lr=0.1)(layer.named_parameters())
    assert sorted(len(group["params"]) for group in optimizer.param_groups)[0] == 0
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
