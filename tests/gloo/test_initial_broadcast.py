"""Replicas start with one model, which is broadcast only if one of them differs."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.rendezvous import Rendezvous
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.process_groups import Replicas, fingerprint
from tests.gloo.decoupled import adam, stack, wrap_optimizer
from tests.gloo.pipelines import run_stages
from tests.gloo.replicas import TIMEOUT

NUM = {"groups": 4, "decoupled": 3}  # of four workers, the second sends on to the last


@pytest.mark.parametrize(
    ("mode", "other"),
    [
        pytest.param(mode, other, marks=[pytest.mark.long] if other else [])
        for mode, num in NUM.items()
        for other in (None, *range(num))
    ],
)
def test_models_are_broadcast_if_any_differs(mode: str, other: int | None, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[bool, dict[str, Tensor]]:
        sent = list[int]()
        for kind in (Rendezvous, Replicas):  # only in this process, which exits
            record_broadcasts(kind, sent)
        model = stack(seed=7 if ctx.rank == other else 0)
        if mode == "groups":
            GroupSync(model, adam(model), "age", timeout=TIMEOUT).close()
        else:
            wrap_optimizer(model).close()
        return bool(sent), model.state_dict()

    expected = stack(seed=7 if other == 0 else 0).state_dict()
    for has_sent, found in run_stages(NUM[mode], work, tmp_path):
        assert has_sent == (other is not None)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("mode", NUM)
def test_only_differing_buffers_are_broadcast(mode: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[int, int]:
        sent = list[int]()
        record_broadcasts(Rendezvous, sent)
        record_broadcasts(Replicas, sent)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        model(torch.full((2, 6), float(ctx.rank)))
        if mode == "groups":
            GroupSync(model, adam(model), "age", timeout=TIMEOUT).close()
        else:
            wrap_optimizer(model).close()
        return max(sent), sum(parameter.numel() for parameter in model.parameters())

    for largest, num_weights in run_stages(2, work, tmp_path):
        assert 0 < largest < num_weights


def record_broadcasts(kind: type, sent: list[int]) -> None:
    """Append the number of elements of each broadcast to `sent`."""
    broadcast = kind._broadcast  # type: ignore[attr-defined]

    def broadcast_and_record(self: object, content: Tensor | Sequence[Tensor]) -> object:
        tensors = [content] if isinstance(content, Tensor) else content
        sent.append(sum(tensor.numel() for tensor in tensors))
        return broadcast(self, content)

    kind._broadcast = broadcast_and_record  # type: ignore[attr-defined]


def tensors() -> list[Tensor]:
    return [
        torch.arange(6.0).view(2, 3),
        torch.tensor(3),
        torch.empty(0),
        torch.ones(3).bfloat16(),
        torch.tensor([True, False]),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[0][1, 2].neg_(),
        lambda t: t[1].add_(1),
        lambda t: t[3][0].mul_(1.01),
        lambda t: t[4][1].logical_not_(),
        lambda t: t.pop(2),
        lambda t: t.reverse(),
    ],
)
def test_fingerprint_detects_any_change(change: object) -> None:
    changed = tensors()
    assert fingerprint(changed) == fingerprint(tensors())
    assert callable(change)
    change(changed)
    assert fingerprint(changed) != fingerprint(tensors())


def test_fingerprint_ignores_memory_layout() -> None:
    wide = torch.arange(12.0).view(3, 4)
    assert fingerprint([wide.t().contiguous().t()]) == fingerprint([wide])
