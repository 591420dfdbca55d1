"""What may come between the steps of a decoupled optimizer: checkpoints, evaluation, mistakes."""

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from polyrhythm.errors import LaunchError, PeerError, PolicyError
from polyrhythm.run.decoupled.checks import ELEMENTWISE
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.launch import Place
from tests.gloo.pipelines import run_alone, run_stages
from tests.gloo.replicas import run_with_losses

WIDTH, TIMEOUT = 6, 20.0


def stack(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def ours(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> Any:
    return DistributedOptimizer(
        optimizer or adam(model), model, **{"bucket_bytes": 200, "timeout": TIMEOUT, **more}
    )


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def mean_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range, steps: range
) -> None:
    """What all workers together do, in one process."""
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, inputs_of(rank, step)) / len(ranks)).backward()
        optimizer.step()


def own_steps(place: Place, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, inputs_of(place.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def close_to(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[k], v, atol=1e-6, rtol=0) for k, v in expected.items())


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_checkpoint_is_that_of_the_plain_optimizer(num_workers: int, tmp_path: Path) -> None:
    """From one process to several, and back to one."""

    def work(place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.use_deterministic_algorithms(True)
        ranks = range(num_workers)
        plain = stack()
        before = adam(plain)
        mean_steps(plain, before, ranks, range(2))
        model = copy.deepcopy(plain)
        optimizer = ours(model)
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
        own_steps(place, model, optimizer, range(2, 5))
        saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        after = adam(plain)
        plain.load_state_dict(weights)
        after.load_state_dict(copy.deepcopy(saved))
        mean_steps(plain, after, ranks, range(5, 7))
        optimizer.close()
        return plain.state_dict(), saved

    def alone() -> tuple[dict[str, Any], dict[str, Any]]:
        model = stack()
        optimizer = adam(model)
        mean_steps(model, optimizer, range(num_workers), range(5))
        saved = copy.deepcopy(optimizer.state_dict())
        mean_steps(model, optimizer, range(num_workers), range(5, 7))
        return model.state_dict(), saved

    found = run_stages(num_workers, work, tmp_path)
    expected_weights, expected = run_stages(1, lambda place: alone(), tmp_path)[0]
    for weights, saved in found:
        assert close_to(weights, expected_weights)
        assert saved["param_groups"] == expected["param_groups"]
        assert saved["state"].keys() == expected["state"].keys()
        for index, of in expected["state"].items():
            assert saved["state"][index].keys() == of.keys()
            assert close_to(saved["state"][index], of)


def test_between_steps_anybody_may_look(tmp_path: Path) -> None:
    """Evaluation, the model's state and a new forward all see the last update."""

    def work(place: Place) -> list[bool]:
        model, reference = stack(), stack()
        optimizer, plain = ours(model), adam(reference)
        found = []
        for step in range(4):
            own_steps(place, model, optimizer, range(step, step + 1))
            mean_steps(reference, plain, range(2), range(step, step + 1))
            if step % 2:
                found.append(close_to(model.state_dict(), reference.state_dict()))
            else:
                with torch.no_grad():
                    x = inputs_of(9, step)
                    found.append(torch.allclose(model(x), reference(x), atol=1e-6))
        model.load_state_dict(reference.state_dict())
        own_steps(place, model, optimizer, range(4, 5))
        mean_steps(reference, plain, range(2), range(4, 5))
        optimizer.synchronize()
        found.append(close_to(model.state_dict(), reference.state_dict()))
        optimizer.close()
        return found

    assert run_stages(2, work, tmp_path) == [[True] * 5] * 2


def test_a_backward_without_a_step_is_forgotten_by_zero_grad(tmp_path: Path) -> None:
    def work(place: Place) -> bool:
        model, reference = stack(), stack()
        optimizer, plain = ours(model), adam(reference)
        loss_of(model, inputs_of(place.rank, 7)).backward()
        optimizer.zero_grad()
        own_steps(place, model, optimizer, range(2))
        mean_steps(reference, plain, range(2), range(2))
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]


def test_a_grad_scaler_leaves_out_the_same_steps_everywhere(tmp_path: Path) -> None:
    """Step 1 overflows on rank 1 alone, in the first layer, which rank 0 may own."""

    def work(place: Place) -> tuple[dict[str, Tensor], float]:
        model = stack()
        optimizer = ours(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            loss = loss_of(model, inputs_of(place.rank, step))
            if step == 1 and place.rank == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        optimizer.close()
        return weights, scaler.get_scale()

    (weights, scale), (others, other_scale) = run_stages(2, work, tmp_path)
    assert (scale, other_scale) == (512.0, 512.0)
    assert close_to(weights, others)
    reference = stack()
    plain = adam(reference)
    for step in (0, 2, 3):
        plain.zero_grad()
        for rank in range(2):
            (loss_of(reference, inputs_of(rank, step)) / 2).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    assert close_to(weights, reference.state_dict())


def test_every_optimizer_that_is_taken_trains_as_it_does_alone(tmp_path: Path) -> None:
    def work(place: Place) -> list[str]:
        wrong = []
        for kind in ELEMENTWISE:
            model, reference = stack(), stack()
            optimizer = ours(model, kind(model.parameters(), lr=0.01))
            own_steps(place, model, optimizer, range(4))
            mean_steps(reference, kind(reference.parameters(), lr=0.01), range(2), range(4))
            if not close_to(model.state_dict(), reference.state_dict()):
                wrong.append(kind.__name__)
            optimizer.close()
        return wrong

    assert run_stages(2, work, tmp_path) == [[], []]


def test_a_compiled_model_trains_alike(tmp_path: Path) -> None:
    def work(place: Place) -> bool:
        model, reference = stack(), stack()
        optimizer, plain = ours(model), adam(reference)
        # Dynamo looks at what flows between the graphs, which the hooks cut apart.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        compiled = torch.compile(model, backend="aot_eager")
        own_steps(place, compiled, optimizer, range(4))
        mean_steps(reference, plain, range(2), range(4))
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]


def refused(call: Callable[[], object], *, kind: type[Exception] = PolicyError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_mistakes_are_told(tmp_path: Path) -> None:
    def work(place: Place) -> dict[str, str]:
        model = stack()
        optimizer = ours(model)
        said = {"no backward": refused(optimizer.step)}
        loss_of(model, inputs_of(place.rank, 0)).backward()
        parameters = list(model.parameters())
        said["clip"] = refused(lambda: nn.utils.clip_grad_norm_(parameters, 1.0))
        said["again"] = refused(lambda: loss_of(model, inputs_of(place.rank, 1)).backward())
        optimizer.step()
        said["forgotten"] = refused(lambda: loss_of(model, inputs_of(place.rank, 1)).backward())
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        saved["state"][1]["exp_avg"] = torch.zeros(3, 3)
        said["shape"] = refused(lambda: optimizer.load_state_dict(saved))
        saved["param_groups"][0]["params"] = [0, 1]
        said["groups"] = refused(lambda: optimizer.load_state_dict(saved))
        optimizer.close()
        other = stack()
        said["foreign"] = refused(lambda: ours(model, adam(other)))
        said["swapped"] = refused(lambda: DistributedOptimizer(model, adam(model)))
        muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
        said["muon"] = refused(lambda: ours(model, muon))
        wrapped = DistributedDataParallel(other)
        said["ddp"] = refused(lambda: ours(wrapped))
        larger = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5 + place.rank))
        said["differs"] = refused(lambda: ours(larger))
        return said

    for said in run_stages(2, work, tmp_path):
        assert "step() without a backward()" in said["no backward"]
        assert "optimizer.clip_grad_norm_(max_norm)" in said["clip"]
        assert "with optimizer.no_sync()" in said["again"]
        assert "call optimizer.zero_grad()" in said["forgotten"]
        assert "exp_avg of 0.bias has shape (3, 3) in the checkpoint" in said["shape"]
        assert "groups of [2]" in said["groups"]
        assert "not the model's" in said["foreign"]
        assert "an optimizer of torch.optim, then the model" in said["swapped"]
        assert "a Muon" in said["muon"]
        assert "give the module inside" in said["ddp"]
        assert "parameter 2 is '1.weight' (" in said["differs"]


class Borrowing(nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.lender = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls_lender = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.calls_lender:
            return torch.as_tensor(self.lender(x))
        return nn.functional.linear(x, self.lender.weight)


def test_a_weight_that_is_read_without_its_layer_is_waited_for_in_the_step(tmp_path: Path) -> None:
    def work(place: Place) -> bool:
        model, reference = Borrowing(), Borrowing()
        optimizer, plain = ours(model), adam(reference)
        own_steps(place, model, optimizer, range(5))
        mean_steps(reference, plain, range(2), range(5))
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]


def test_evaluation_may_take_another_way_through_the_model(tmp_path: Path) -> None:
    """It reads the weight of a layer that training calls."""

    def work(place: Place) -> list[bool]:
        model, reference = Borrowing(), Borrowing()
        inner, plain = adam(model), adam(reference)
        if place.rank == 1:  # its part of the update comes late
            inner.register_step_pre_hook(lambda *_: time.sleep(0.1))
        optimizer = ours(model, inner, bucket_bytes=170)  # a layer each
        same = []
        for step in range(3):
            for each in (model, reference):
                each.train()
                each.calls_lender = True
            own_steps(place, model, optimizer, range(step, step + 1))
            mean_steps(reference, plain, range(2), range(step, step + 1))
            for each in (model, reference):
                each.eval()
                each.calls_lender = False
            with torch.no_grad():
                outputs = [each(inputs_of(9, step)) for each in (model, reference)]
            same.append(torch.allclose(*outputs, atol=1e-6, rtol=0))
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [[True] * 3] * 2


def test_a_weight_that_is_read_too_early_is_told(tmp_path: Path) -> None:
    """Its layer was called in the first step, and is not any more."""

    def work(place: Place) -> str:
        model = Borrowing()
        model.calls_lender = True
        optimizer = ours(model, bucket_bytes=170)  # a layer each
        own_steps(place, model, optimizer, range(2))
        model.calls_lender = False
        said = refused(lambda: own_steps(place, model, optimizer, range(2, 3)))
        optimizer.synchronize()
        return said

    for said in run_stages(2, work, tmp_path):
        assert "lender.weight was used before its update had arrived" in said


def test_layers_may_be_frozen_and_thawed_on_the_way(tmp_path: Path) -> None:
    def toggle(model: nn.Sequential, step: int) -> None:
        model[0].requires_grad_(step % 2 == 0)

    def work(place: Place) -> bool:
        model, reference = stack(), stack()
        optimizer, plain = ours(model), adam(reference)
        for step in range(5):
            toggle(model, step)
            own_steps(place, model, optimizer, range(step, step + 1))
            toggle(reference, step)
            mean_steps(reference, plain, range(2), range(step, step + 1))
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]


def test_a_model_that_was_moved_or_replaced_is_told(tmp_path: Path) -> None:
    def work(place: Place) -> dict[str, str]:
        said = {}
        model = stack()
        optimizer = ours(model)
        own_steps(place, model, optimizer, range(1))
        said["replaced"] = refused(
            lambda: model.load_state_dict(stack(1).state_dict(), assign=True)
        )
        optimizer.close()
        model = stack()
        optimizer = ours(model)
        own_steps(place, model, optimizer, range(1))
        model[0].weight.data = model[0].weight.data.clone()
        said["moved"] = refused(lambda: own_steps(place, model, optimizer, range(1, 2)))
        said["mode"] = refused(lambda: ours(stack(), mode="nested decoupled"))
        said["group"] = refused(lambda: optimizer.add_param_group({"params": []}))
        sparse = nn.Sequential(nn.Embedding(4, WIDTH, sparse=True))
        lookup = ours(sparse, torch.optim.SGD(sparse.parameters()))
        said["sparse"] = refused(lambda: sparse(torch.tensor([1])).sum().backward())
        lookup.close()
        said["no mode"] = refused(lambda: ours(stack(), mode="best"))
        said["size"] = refused(lambda: ours(stack(), bucket_bytes=0))
        return said

    for said in run_stages(2, work, tmp_path):
        assert "0.weight was replaced" in said["replaced"]
        assert "without assign=True" in said["replaced"]
        assert "0.weight was moved" in said["moved"]
        assert "two nodes or more" in said["mode"]
        assert "a parameter group added" in said["group"]
        assert "sparse=False" in said["sparse"]
        assert "mode='best'" in said["no mode"]
        assert "bucket_bytes=0" in said["size"]


def test_after_close_the_model_belongs_to_nobody(tmp_path: Path) -> None:
    def work(place: Place) -> bool:
        model, reference = stack(), stack()
        optimizer = ours(model)
        own_steps(place, model, optimizer, range(2))
        mean_steps(reference, adam(reference), range(2), range(2))
        optimizer.close()
        for each in (model, reference):
            mean_steps(each, torch.optim.SGD(each.parameters(), lr=0.1), range(2), range(2, 4))
        return close_to(model.state_dict(), reference.state_dict())

    assert run_stages(2, work, tmp_path) == [True, True]


def test_use_after_the_process_group_is_gone_is_told(tmp_path: Path) -> None:
    """Of a job of one worker, too."""

    def work() -> list[str]:
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        model = stack()
        optimizer = ours(model)
        mean_steps(model, optimizer, range(1), range(2))
        optimizer.zero_grad()
        loss_of(model, inputs_of(0, 2)).backward()
        dist.destroy_process_group()
        return [refused(optimizer.step), refused(optimizer.state_dict)]

    for said in run_alone(work, tmp_path):
        assert "after destroy_process_group()" in said


def test_outside_of_a_job_it_says_how_to_start_one() -> None:
    assert "torchrun" in refused(lambda: ours(stack()), kind=LaunchError)


def test_a_lost_worker_is_noticed(tmp_path: Path) -> None:
    def work(place: Place) -> str:
        model = stack()
        optimizer = ours(model)
        own_steps(place, model, optimizer, range(2))
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return refused(lambda: own_steps(place, model, optimizer, range(2, 50)), kind=PeerError)

    found = run_with_losses(2, work, tmp_path, lost={1})
    assert "lost rank 1 during averaging" in found[0]
