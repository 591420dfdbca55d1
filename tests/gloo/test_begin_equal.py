"""Replicas begin with one model, which is sent only if one of them has another."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.run.average.group_sync import GroupSync
from polyrhythm.run.average.meeting import Meeting
from polyrhythm.run.decoupled.team import Team
from polyrhythm.run.fingerprint import fingerprint
from polyrhythm.run.launch import Place
from tests.gloo.decoupled import adam, ours, stack
from tests.gloo.pipelines import run_stages
from tests.gloo.replicas import TIMEOUT

NUM = {"groups": 4, "decoupled": 3}  # of four in groups, the second hands on to the last


@pytest.mark.parametrize(
    ("way", "other"), [(way, other) for way, num in NUM.items() for other in (None, *range(num))]
)
def test_models_are_sent_if_one_of_them_is_another(
    way: str, other: int | None, tmp_path: Path
) -> None:
    def work(place: Place) -> tuple[bool, dict[str, Tensor]]:
        sent = list[int]()
        for kind in (Meeting, Team):  # in this process alone, which ends
            noted(kind, sent)
        model = stack(seed=7 if place.rank == other else 0)
        if way == "groups":
            GroupSync(model, adam(model), "age", timeout=TIMEOUT).close()
        else:
            ours(model).close()
        return bool(sent), model.state_dict()

    expected = stack(seed=7 if other == 0 else 0).state_dict()
    for has_sent, found in run_stages(NUM[way], work, tmp_path):
        assert has_sent == (other is not None)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("way", NUM)
def test_where_only_buffers_differ_only_they_are_sent(way: str, tmp_path: Path) -> None:
    def work(place: Place) -> tuple[int, int]:
        sent = list[int]()
        noted(Meeting, sent)
        noted(Team, sent)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        model(torch.full((2, 6), float(place.rank)))
        if way == "groups":
            GroupSync(model, adam(model), "age", timeout=TIMEOUT).close()
        else:
            ours(model).close()
        return max(sent), sum(parameter.numel() for parameter in model.parameters())

    for largest, num_weights in run_stages(2, work, tmp_path):
        assert 0 < largest < num_weights


def noted(kind: type, sent: list[int]) -> None:
    """How many numbers each time."""
    spread = kind._spread  # type: ignore[attr-defined]

    def spread_and_note(self: object, given: Tensor | Sequence[Tensor]) -> object:
        tensors = [given] if isinstance(given, Tensor) else given
        sent.append(sum(tensor.numel() for tensor in tensors))
        return spread(self, given)

    kind._spread = spread_and_note  # type: ignore[attr-defined]


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
def test_a_fingerprint_tells_what_differs(change: object) -> None:
    changed = tensors()
    assert fingerprint(changed) == fingerprint(tensors())
    assert callable(change)
    change(changed)
    assert fingerprint(changed) != fingerprint(tensors())


def test_a_fingerprint_is_of_values_wherever_they_lie() -> None:
    wide = torch.arange(12.0).view(3, 4)
    assert fingerprint([wide.t().contiguous().t()]) == fingerprint([wide])
