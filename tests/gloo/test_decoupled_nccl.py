"""A DistributedOptimizer over NCCL on CPUs: its groups, and steps that only the GPU could skip."""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import PeerError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled import gradient_sync
from polyrhythm.run.decoupled.optimizer import StepClock
from tests.gloo.decoupled import (
    TIMEOUT,
    close_to,
    inputs_of,
    loss_of,
    reference_steps,
    stack,
    train_steps,
    wrap_optimizer,
)
from tests.gloo.emulated_nccl import emulate_nccl
from tests.gloo.pipelines import run_stages


def test_the_users_nccl_group_is_neither_used_nor_aborted(tmp_path: Path) -> None:
    """Its timeout and its failures are the user's; ours must end with the optimizer."""

    def work(ctx: DistContext) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate_nccl(monkeypatch)
            bounded: list[dist.ProcessGroup] = []
            monkeypatch.setattr(
                gradient_sync, "set_timeout", lambda group, _: bounded.append(group)
            )
            model = stack()
            optimizer = wrap_optimizer(model)
            train_steps(ctx, model, optimizer, range(2))
            collectives, world = optimizer._gradient_sync.collectives, dist.group.WORLD
            assert world is not None
            optimizer.synchronize()
            start = time.monotonic()
            if ctx.rank == 0:
                optimizer.abort()
            else:
                with pytest.raises((PeerError, RuntimeError)):
                    collectives.all_gather(torch.zeros(4), 0).wait()
            ended_after = time.monotonic() - start
            world.allreduce([torch.zeros(1)]).wait()
            optimizer.abort()
            return {
                "own": collectives._group is not world,
                "bounded": collectives._group in bounded,
                "ended_after": ended_after,
            }

    for found in run_stages(2, work, tmp_path):
        assert found["own"]
        assert found["bounded"]
        assert found["ended_after"] < TIMEOUT / 2


def test_close_aborts_no_group_before_all_workers_have_their_weights(tmp_path: Path) -> None:
    """NCCL's abort drops what is not sent yet; a slower worker would keep old weights."""

    def work(ctx: DistContext) -> tuple[float, float]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate_nccl(monkeypatch)
            model = stack()
            optimizer = wrap_optimizer(model)
            train_steps(ctx, model, optimizer, range(2))
            comm_thread, times = optimizer._collectives.comm_thread, [0.0, 0.0]
            end, confirm = comm_thread.close, optimizer._gradient_sync.confirm

            def confirm_late() -> None:
                time.sleep(1.0 * ctx.rank)
                confirm()
                times[0] = time.monotonic()

            def record_end() -> None:
                times[1] = time.monotonic()
                end()

            monkeypatch.setattr(optimizer._gradient_sync, "confirm", confirm_late)
            monkeypatch.setattr(comm_thread, "close", record_end)
            optimizer.close()
            return times[0], times[1]

    found = run_stages(2, work, tmp_path)
    assert max(finished for finished, _ in found) <= min(ended for _, ended in found)


def test_close_tells_that_a_worker_is_lost(tmp_path: Path) -> None:
    """At once: without it nobody knows whether all have the last weights."""

    def work(ctx: DistContext) -> float:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate_nccl(monkeypatch)
            model = stack()
            optimizer = wrap_optimizer(model)
            train_steps(ctx, model, optimizer, range(2))
            optimizer.synchronize()
            start = time.monotonic()
            if ctx.rank == 0:
                optimizer.abort()
            else:
                with pytest.raises(PeerError, match=r"close\(\)"):
                    optimizer.close()
            return time.monotonic() - start

    assert max(run_stages(2, work, tmp_path)) < TIMEOUT / 2


def test_before_the_first_step_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    """Each call returns at once, and changes no weight; a step follows as after a new start."""

    def work(ctx: DistContext) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate_nccl(monkeypatch)
            model = stack()
            optimizer = wrap_optimizer(model)
            optimizer.synchronize()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.detach()
            optimizer.attach()
            train_steps(ctx, model, optimizer, range(2))
            optimizer.close()
            return before, model.state_dict()

    model = stack()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    reference_steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(2), range(2))
    for before, after in run_stages(2, work, tmp_path):
        assert all(torch.equal(before[name], value) for name, value in first.items())
        assert close_to(after, model.state_dict())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused sgd, dampened": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.1, fused=True
    ),
}
SKIPPING = ("fused adamw", "fused sgd")


class Recorder(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def train_with_inf(
    ctx: DistContext, name: str, bad_step: int, *, clips: bool = False
) -> dict[str, Any]:
    """Run four steps; the gradients of rank 1 are not finite in one of them."""
    messages, norms = list[str](), list[float]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulate_nccl(monkeypatch)
        monkeypatch.setattr(torch, "empty_like", lambda t, **_: torch.full_like(t, 7.0))
        logging.getLogger("polyrhythm").addHandler(Recorder(messages))
        model = stack()
        optimizer = wrap_optimizer(model, OPTIMIZERS[name](model.parameters()))
        moved: list[float] = []
        for step in range(4):
            before = model[0].weight.detach().clone()
            factor = torch.inf if (ctx.rank, step) == (1, bad_step) else 1.0
            (loss_of(model, inputs_of(ctx.rank, step)) * factor).backward()
            if clips:
                norms.append(optimizer.clip_grad_norm_(1e-3).item())
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            moved.append((model[0].weight - before).abs().max().item())
        counts = {float(s["step"]) for s in optimizer.state.values() if "step" in s}
        optimizer.close()
        weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    return {
        "moved": moved,
        "norms": norms,
        "counts": counts,
        "messages": messages,
        "weights": weights,
    }


@pytest.mark.parametrize("bad_step", [0, 2, 3])
@pytest.mark.parametrize("name", SKIPPING)
def test_fused_optimizers_skip_a_step_that_is_not_finite(
    name: str, bad_step: int, tmp_path: Path
) -> None:
    """Weights, momentum and counters stay as they were, also in the first step."""
    first, second = run_stages(2, partial(train_with_inf, name=name, bad_step=bad_step), tmp_path)
    model = stack()
    reference = OPTIMIZERS[name](model.parameters())
    for step in range(4):
        if step != bad_step:
            reference_steps(model, reference, range(2), range(step, step + 1))
    for found in (first, second):
        assert found["moved"][bad_step] == 0.0
        assert found["counts"] <= {3.0}
        assert close_to(found["weights"], {n: p.detach() for n, p in model.named_parameters()})
    assert first["messages"] == []
    (message,) = second["messages"]
    assert f"step {bad_step}: the gradients of s0p1 are not finite" in message
    assert "skip" in message


@pytest.mark.parametrize("name", ["adamw", "fused sgd, dampened"])
def test_other_optimizers_use_gradients_of_zero_and_warn(name: str, tmp_path: Path) -> None:
    first, second = run_stages(2, partial(train_with_inf, name=name, bad_step=2), tmp_path)
    for found in (first, second):
        assert found["moved"][2] > 0.0, "by momentum"
        assert all(weights.isfinite().all() for weights in found["weights"].values())
    assert first["messages"] == []
    (message,) = second["messages"]
    assert "step 2: the gradients of s0p1 are not finite, and count as 0" in message


@pytest.mark.parametrize("name", ["adamw", SKIPPING[0]])
def test_clipping_returns_a_norm_that_is_not_finite(name: str, tmp_path: Path) -> None:
    work = partial(train_with_inf, name=name, bad_step=2, clips=True)
    for found in run_stages(2, work, tmp_path):
        assert [math.isfinite(norm) for norm in found["norms"]] == [True, True, False, True]
        assert all(weights.isfinite().all() for weights in found["weights"].values())


def test_step_clock_records_events_in_the_stream_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The current device of the process may be another GPU, whose stream is idle."""
    monkeypatch.setattr(torch.cuda, "Event", MagicMock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = StepClock(torch.device("cuda", 1))
    clock.begin()
    clock.end()
    recorded = torch.cuda.Event.return_value.record  # type: ignore[attr-defined]
    assert [each.args for each in recorded.call_args_list] == [("stream of cuda:1",)] * 2
