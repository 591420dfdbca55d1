"""What would go wrong in silence: loops, models and checkpoints that are not quite usual."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import PeerError
from polyrhythm.run.launch import Place
from tests.gloo.decoupled import (
    adam,
    close_to,
    inputs_of,
    loss_of,
    mean_steps,
    ours,
    own_steps,
    refused,
    stack,
)
from tests.gloo.pipelines import run_stages
from tests.gloo.replicas import run_with_losses


def test_a_gradient_that_the_model_forgot_has_gone_already(tmp_path: Path) -> None:
    """A step is left out after the model's own zero_grad(): told, and not averaged in part."""

    def work(place: Place) -> str:
        model = stack()
        optimizer = ours(model)
        own_steps(place, model, optimizer, range(2))
        loss_of(model, inputs_of(place.rank, 2)).backward()
        model.zero_grad()
        said = refused(lambda: loss_of(model, inputs_of(place.rank, 3)).backward())
        optimizer.zero_grad()
        own_steps(place, model, optimizer, range(4, 5))
        optimizer.close()
        return said

    for said in run_stages(2, work, tmp_path):
        assert "call optimizer.zero_grad(), not the model's" in said


def test_without_a_backward_that_averages_nothing_is_stepped_with(tmp_path: Path) -> None:
    def work(place: Place) -> list[str]:
        model = stack()
        optimizer = ours(model)
        own_steps(place, model, optimizer, range(2))
        with optimizer.no_sync():
            loss_of(model, inputs_of(place.rank, 2)).backward()
        assert all(p.grad is None for of in optimizer.param_groups for p in of["params"])
        said = [refused(lambda: optimizer.clip_grad_norm_(1.0)), refused(optimizer.step)]
        optimizer.close()
        return said

    for said in run_stages(2, work, tmp_path):
        assert all("outside of no_sync() at least once" in text for text in said)


def test_every_part_of_a_model_has_the_last_update_in_its_state(tmp_path: Path) -> None:
    def work(place: Place) -> list[bool]:
        model, reference = stack(), stack()
        optimizer, plain = ours(model), adam(reference)
        own_steps(place, model, optimizer, range(3))
        mean_steps(reference, plain, range(2), range(3))
        found = [close_to(model[2].state_dict(), reference[2].state_dict())]
        own_steps(place, model, optimizer, range(3, 4))
        zeros = {name: torch.zeros_like(value) for name, value in model[2].state_dict().items()}
        own_steps(place, model, optimizer, range(4, 5))
        model[2].load_state_dict(zeros)
        optimizer.synchronize()
        found.append(all(not value.any() for value in model[2].state_dict().values()))
        optimizer.close()
        return found

    assert run_stages(2, work, tmp_path) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        ("strides", "strides"),
        ("groups", "in group 1"),
        ("size", "bucket_bytes=200"),
        ("mode", "mode=all_reduce"),
        ("kind", "optimizer AdamW"),
        ("rate", "lr=0.01 in group 0"),
    ],
)
def test_workers_that_do_not_agree_are_told_of_the_first_difference(
    differs: str, expected: str, tmp_path: Path
) -> None:
    def work(place: Place) -> str:
        model: nn.Module = stack()
        more: dict[str, Any] = {}
        optimizer = adam(model)
        if differs == "strides":
            model = nn.Conv2d(2, 4, 3)
            if place.rank:
                model = model.to(memory_format=torch.channels_last)
            optimizer = adam(model)
        elif differs == "groups" and place.rank:
            first, *others = model.parameters()
            optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.01)
        elif differs == "size" and place.rank:
            more["bucket_bytes"] = 400
        elif differs == "mode" and place.rank:
            more["mode"] = "all_reduce"
        elif differs == "kind" and place.rank:
            optimizer = torch.optim.SGD(model.parameters())
        elif differs == "rate" and place.rank:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return refused(lambda: ours(model, optimizer, **more))

    for said in run_stages(2, work, tmp_path):
        assert expected in said


class Layerwise(torch.optim.SGD):
    """Not elementwise any more, perhaps."""


class Odd(nn.Module):
    """A number without dimensions, complex ones, one frozen, an integer buffer; few of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("counts", torch.tensor([1, 2], dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * self.scale * self.waves.abs().sum() + self.frozen.sum() + self.empty.sum()


def test_odd_parameters_are_trained_clipped_and_kept_in_checkpoints(tmp_path: Path) -> None:
    def work(place: Place) -> tuple[bool, float, float]:
        model, reference = Odd(), Odd()
        optimizer, plain = ours(model), adam(reference)
        for step in range(4):
            if step == 3:
                model.frozen.requires_grad_(True)
                reference.frozen.requires_grad_(True)
            for rank in range(2):
                (loss_of(reference, inputs_of(rank, step)) / 2).backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item()
            plain.step()
            plain.zero_grad()
            loss_of(model, inputs_of(place.rank, step)).backward()
            norm = optimizer.clip_grad_norm_(0.1).item()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same, norm, expected

    for same, norm, expected in run_stages(2, work, tmp_path):
        assert same
        assert norm == pytest.approx(expected, rel=1e-5)


def test_a_graph_from_before_the_step_is_out_of_date(tmp_path: Path) -> None:
    def work(place: Place) -> str:
        model = stack()
        optimizer = ours(model)
        old = loss_of(model, inputs_of(place.rank, 0))
        own_steps(place, model, optimizer, range(2))
        said = refused(old.backward, kind=RuntimeError)
        optimizer.zero_grad()
        return said

    for said in run_stages(2, work, tmp_path):
        assert "modified by an inplace operation" in said


def test_a_scaler_works_where_a_worker_has_nothing_to_update(tmp_path: Path) -> None:
    """Two numbers are trained, by three workers."""

    def work(place: Place) -> float:
        model = nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(0.0)
        optimizer = ours(model, torch.optim.SGD(model.parameters(), lr=0.5))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            factor = torch.inf if (step, place.rank) == (1, 2) else 1.0
            scaler.scale(factor * model(torch.ones(1, 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.synchronize()
        return model.weight.item()

    assert run_stages(3, work, tmp_path) == [0.0, 0.0, 0.0], "two steps of 0.5, one left out"


def test_other_optimizers_need_a_word_and_copies_are_refused(tmp_path: Path) -> None:
    def work(place: Place) -> list[str]:
        model, half = stack(), stack().to(torch.bfloat16)
        said = [refused(lambda: ours(model, Layerwise(model.parameters())))]
        optimizer = ours(model, Layerwise(model.parameters(), lr=0.1), elementwise=True)
        own_steps(place, model, optimizer, range(1))
        said.append(refused(optimizer.__getstate__))
        optimizer.close()
        single = stack()
        before = adam(single)
        mean_steps(single, before, range(1), range(1))
        lower = ours(half)
        lower.load_state_dict(before.state_dict())  # of float32
        loss_of(half, inputs_of(place.rank, 0).to(torch.bfloat16)).backward()
        lower.step()
        lower.close()
        return said

    for said in run_stages(2, work, tmp_path):
        assert "elementwise=True" in said[0]
        assert "state_dict()" in said[1]


def test_after_a_loss_weights_that_are_not_whole_are_never_given(tmp_path: Path) -> None:
    """Rank 1 dies in its update: its parts of the new weights do not come."""

    def work(place: Place) -> list[str]:
        model = stack()
        inner = adam(model)
        optimizer = ours(model, inner)
        own_steps(place, model, optimizer, range(2))
        other_has_stepped = tmp_path / "stepped"

        def die(*_: object) -> None:
            ends = time.monotonic() + 30  # what it has sent before is to arrive
            while not other_has_stepped.exists() and time.monotonic() < ends:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        if place.rank == 1:
            inner.register_step_pre_hook(die)
        own_steps(place, model, optimizer, range(2, 3))
        other_has_stepped.touch()
        said = [refused(model.state_dict, kind=PeerError) for _ in range(3)]
        return [*said, refused(lambda: model(inputs_of(0, 0)), kind=PeerError)]

    said = run_with_losses(2, work, tmp_path, lost={1})[0]
    assert len(said) == 4
    assert all("lost rank 1" in text for text in said)


def test_weights_changed_too_early_and_the_wrong_step_are_told(tmp_path: Path) -> None:
    def work(place: Place) -> list[str]:
        model = stack()
        inner = adam(model)
        optimizer = ours(model, inner)
        own_steps(place, model, optimizer, range(2))
        with torch.no_grad():
            model[0].weight.mul_(0.9)
        said = [refused(lambda: model(inputs_of(0, 0)))]
        optimizer.synchronize()
        with torch.no_grad():
            model[0].weight.mul_(0.9)
        own_steps(place, model, optimizer, range(2, 3))
        said.append(refused(inner.step))
        said.append(refused(lambda: ours(model, optimizer)))
        optimizer.close()
        return said

    for changed, stepped, twice in run_stages(2, work, tmp_path):
        assert "0.weight was changed while its update was on its way" in changed
        assert "step() of an optimizer that is wrapped" in stepped
        assert "distributed already" in twice


def test_workers_in_different_calls_are_told_which(tmp_path: Path) -> None:
    """The first one alone saves, or clips; nobody reads what was meant for another call."""

    def work(place: Place) -> str:
        model = stack()
        optimizer = ours(model)
        loss_of(model, inputs_of(place.rank, 0)).backward()
        if place.rank == 0:
            return refused(lambda: optimizer.clip_grad_norm_(1.0))
        return refused(optimizer.step)

    first, second = run_stages(2, work, tmp_path)
    assert "rank 0 is in clip_grad_norm_(), and rank 1 in step()" in first
    assert "rank 1 is in step(), and rank 0 in clip_grad_norm_()" in second


def test_each_worker_clips_its_part_by_value(tmp_path: Path) -> None:
    def work(place: Place) -> bool:
        model, reference = stack(), stack()
        optimizer, plain = ours(model, bucket_bytes="1kB"), adam(reference)
        for step in range(3):
            for rank in range(2):
                (loss_of(reference, inputs_of(rank, step)) / 2).backward()
            nn.utils.clip_grad_value_(reference.parameters(), 0.01)
            plain.step()
            plain.zero_grad()
            loss_of(model, inputs_of(place.rank, step)).backward()
            own = [p for of in optimizer.param_groups for p in of["params"]]
            nn.utils.clip_grad_value_(own, 0.01)
            optimizer.step()
            optimizer.zero_grad()
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]
