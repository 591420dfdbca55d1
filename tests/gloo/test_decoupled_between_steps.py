"""Between the steps of a DistributedOptimizer: checkpoints, evaluation, lost workers."""

import copy
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled.checks import ELEMENTWISE
from tests.gloo.decoupled import (
    adam,
    close_to,
    error_of,
    inputs_of,
    loss_of,
    reference_steps,
    stack,
    train_steps,
    wrap_optimizer,
)
from tests.gloo.pipelines import run_stages
from tests.gloo.replicas import run_with_failures


@pytest.mark.parametrize("num_workers", [2, 3])
def test_state_dict_equals_that_of_plain_optimizer(num_workers: int, tmp_path: Path) -> None:
    """A checkpoint moves from one process to several, and back to one."""

    def work(ctx: DistContext) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.use_deterministic_algorithms(True)
        ranks = range(num_workers)
        plain = stack()
        before = adam(plain)
        reference_steps(plain, before, ranks, range(2))
        model = copy.deepcopy(plain)
        optimizer = wrap_optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
        train_steps(ctx, model, optimizer, range(2, 5))
        saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        after = adam(plain)
        plain.load_state_dict(weights)
        after.load_state_dict(copy.deepcopy(saved))
        reference_steps(plain, after, ranks, range(5, 7))
        optimizer.close()
        return plain.state_dict(), saved

    def single_process() -> tuple[dict[str, Any], dict[str, Any]]:
        model = stack()
        optimizer = adam(model)
        reference_steps(model, optimizer, range(num_workers), range(5))
        saved = copy.deepcopy(optimizer.state_dict())
        reference_steps(model, optimizer, range(num_workers), range(5, 7))
        return model.state_dict(), saved

    found = run_stages(num_workers, work, tmp_path)
    expected_weights, expected = run_stages(1, lambda ctx: single_process(), tmp_path)[0]
    for weights, saved in found:
        assert close_to(weights, expected_weights)
        assert saved["param_groups"] == expected["param_groups"]
        assert saved["state"].keys() == expected["state"].keys()
        for index, entry in expected["state"].items():
            assert saved["state"][index].keys() == entry.keys()
            assert close_to(saved["state"][index], entry)


def test_eval_and_state_dict_see_the_last_update(tmp_path: Path) -> None:
    """Evaluation, the model's state and a new forward all see the last update."""

    def work(ctx: DistContext) -> list[bool]:
        model, reference = stack(), stack()
        optimizer, plain = wrap_optimizer(model), adam(reference)
        found = []
        for step in range(4):
            train_steps(ctx, model, optimizer, range(step, step + 1))
            reference_steps(reference, plain, range(2), range(step, step + 1))
            if step % 2:
                found.append(close_to(model.state_dict(), reference.state_dict()))
            else:
                with torch.no_grad():
                    x = inputs_of(9, step)
                    found.append(torch.allclose(model(x), reference(x), atol=1e-6))
        model.load_state_dict(reference.state_dict())
        train_steps(ctx, model, optimizer, range(4, 5))
        reference_steps(reference, plain, range(2), range(4, 5))
        optimizer.synchronize()
        found.append(close_to(model.state_dict(), reference.state_dict()))
        optimizer.close()
        return found

    assert run_stages(2, work, tmp_path) == [[True] * 5] * 2


def test_zero_grad_discards_backward_without_step(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> bool:
        model, reference = stack(), stack()
        optimizer, plain = wrap_optimizer(model), adam(reference)
        loss_of(model, inputs_of(ctx.rank, 7)).backward()
        optimizer.zero_grad()
        train_steps(ctx, model, optimizer, range(2))
        reference_steps(reference, plain, range(2), range(2))
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]


def test_grad_scaler_skips_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    """Step 1 overflows only on rank 1, in the first layer, which rank 0 may own."""

    def work(ctx: DistContext) -> tuple[dict[str, Tensor], float]:
        model = stack()
        optimizer = wrap_optimizer(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            loss = loss_of(model, inputs_of(ctx.rank, step))
            if step == 1 and ctx.rank == 1:
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


def test_grad_scaler_leaves_skipping_to_a_fused_optimizer(tmp_path: Path) -> None:
    """The step is called on all ranks, as for a plain fused optimizer, and changes nothing."""

    def work(ctx: DistContext) -> tuple[bool, list[bool], float]:
        model, reference = stack(), stack()
        optimizer = wrap_optimizer(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
        plain = torch.optim.Adam(reference.parameters(), lr=0.01)
        scaler, is_skipped = torch.amp.GradScaler("cpu", init_scale=1024.0), []
        for step in range(4):
            before = copy.deepcopy(model.state_dict())
            loss = loss_of(model, inputs_of(ctx.rank, step))
            if step == 1 and ctx.rank == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = model.state_dict()
            is_skipped.append(all(torch.equal(after[name], before[name]) for name in before))
        for step in (0, 2, 3):
            reference_steps(reference, plain, range(2), range(step, step + 1))
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same, is_skipped, scaler.get_scale()

    expected = True, [False, True, False, False], 512.0
    assert run_stages(2, work, tmp_path) == [expected] * 2


def test_every_elementwise_optimizer_matches_single_process(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        wrong = []
        for kind in ELEMENTWISE:
            model, reference = stack(), stack()
            optimizer = wrap_optimizer(model, kind(model.parameters(), lr=0.01))
            train_steps(ctx, model, optimizer, range(4))
            reference_steps(reference, kind(reference.parameters(), lr=0.01), range(2), range(4))
            if not close_to(model.state_dict(), reference.state_dict()):
                wrong.append(kind.__name__)
            optimizer.close()
        return wrong

    assert run_stages(2, work, tmp_path) == [[], []]


@pytest.mark.long
def test_compiled_model_matches_single_process(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> bool:
        model, reference = stack(), stack()
        optimizer, plain = wrap_optimizer(model), adam(reference)
        # The hooks break the graph; dynamo reads .grad of the tensors in between.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        compiled = torch.compile(model, backend="aot_eager")
        train_steps(ctx, compiled, optimizer, range(4))
        reference_steps(reference, plain, range(2), range(4))
        same = close_to(model.state_dict(), reference.state_dict())
        optimizer.close()
        return same

    assert run_stages(2, work, tmp_path) == [True, True]


def test_model_trains_with_another_optimizer_after_close(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> bool:
        model, reference = stack(), stack()
        optimizer = wrap_optimizer(model)
        train_steps(ctx, model, optimizer, range(2))
        reference_steps(reference, adam(reference), range(2), range(2))
        optimizer.close()
        for each in (model, reference):
            reference_steps(each, torch.optim.SGD(each.parameters(), lr=0.1), range(2), range(2, 4))
        return close_to(model.state_dict(), reference.state_dict())

    assert run_stages(2, work, tmp_path) == [True, True]


def test_lost_worker_raises_peer_error(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = stack()
        optimizer = wrap_optimizer(model)

        def lose_rank_1() -> None:
            # Rank 0 may still be inside step 1 when rank 1 has finished it.
            train_steps(ctx, model, optimizer, range(2))
            if ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train_steps(ctx, model, optimizer, range(2, 50))

        return error_of(lose_rank_1, kind=PeerError)

    found = run_with_failures(2, work, tmp_path, lost={1})
    assert "lost rank 1 during averaging" in found[0]
