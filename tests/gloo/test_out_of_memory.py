"""A failed allocation names worker, step, action and what is held; the other workers end, too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from polyrhythm.errors import PeerError, TrainingError, is_out_of_memory, peer_errors
from polyrhythm.processes import wait_for_all
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.commands import run_forked
from tests.gloo.trainer_jobs import plan_of, samples
from tests.grids import long_except

TIMEOUT = 20.0
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Countdown:
    """Raises at its `last` call."""

    def __init__(self, last: int) -> None:
        self._num_left = last

    def __call__(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            raise torch.OutOfMemoryError(NO_MEMORY)


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, countdown: Countdown) -> Tensor:
        ctx.countdown = countdown
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.countdown()
        return gradient, None


class Failing(nn.Module):
    """Passes its input on, and runs out of memory in a forward or a backward."""

    def __init__(self, what: str, last: int) -> None:
        super().__init__()
        self._what, self._countdown = what, Countdown(last)

    def forward(self, x: Tensor) -> Tensor:
        if self._what == "forward":
            self._countdown()
        return _FailingBackward.apply(x, self._countdown) if self._what == "backward" else x


def failing_adam(named: Any, last: int) -> torch.optim.Optimizer:
    optimizer, countdown = torch.optim.AdamW(named, lr=1e-2), Countdown(last)
    optimizer.register_step_pre_hook(lambda *_: countdown())
    return optimizer


def model(what: str, last: int, layer: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    layers[layer] = nn.Sequential(layers[layer], Failing(what, last))
    return nn.Sequential(*layers, nn.Linear(16, 4))


def trainer_of(stages: int, pipelines: int, what: str, rank: int, own: int) -> Trainer:
    """Two micro-batches of 6 in a step; the process `rank` runs out of memory, in the second."""
    last = {"forward": 4, "backward": 3}.get(what, 10**6) if rank == own else 10**6
    layer = 2 if stages == 2 and rank % 2 else 0
    last_update = 2 if what == "update" and rank == own else 10**6
    return Trainer(
        lambda: model(what, last, layer),
        mse_loss,
        partial(failing_adam, last=last_update),
        samples(),
        batch_size=12 * pipelines,
        microbatch_size=6,
        plan=plan_of(stages, pipelines),
        timeout=TIMEOUT,
    )


# The action that fails in step 1: with two stages the first one has both micro-batches in flight.
ACTIONS = {"forward": "F1 of step 1", "backward": "B0 of step 1", "update": "the update of step 1"}


def check_error(error: TrainingError, worker: str, what: str, num_in_flight: int) -> None:
    where = ACTIONS[what]
    assert error.wrong == f"{worker} ran out of memory in {where}"
    held = f"activations of {num_in_flight} micro-batch{'es' * (num_in_flight != 1)}"
    for text in ("weights ", "gradients ", "optimizer state ", held):
        assert text in error.expected, error.expected
    assert "optimizer state 0B" not in error.expected  # it has made one step
    if num_in_flight:
        assert "B each" in error.expected
    advice = "more stages, or an optimizer" if what == "update" else "a microbatch_size below 6"
    assert advice in error.fix
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert str(error.__cause__) == NO_MEMORY


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ACTIONS)
def test_single_process_names_it_and_continues_unless_weights_may_be_half_updated(
    what: str,
) -> None:
    with trainer_of(1, 1, what, 0, 0) as trainer:
        with pytest.raises(TrainingError) as caught:
            trainer.fit(max_steps=4, progress=False)
        check_error(caught.value, "s0p0", what, {"forward": 0, "backward": 1, "update": 0}[what])
        del caught
        assert trainer.global_step == 1
        if what == "update":
            with pytest.raises(ValueError, match="after a failed fit"):
                trainer.fit(max_steps=4, progress=False)
        else:
            assert len(trainer.fit(max_steps=4, progress=False).losses) == 3


SHAPES = [(2, 1, 0), (2, 1, 1), (1, 2, 1), (2, 2, 0), (2, 2, 3)]
CASES = [(*shape, what) for shape in SHAPES for what in ACTIONS]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("stages", "pipelines", "failing", "what"), long_except(CASES, 0, 4, 7, 8, 14)
)
def test_failing_worker_names_it_and_all_others_end_with_a_peer_error(
    stages: int, pipelines: int, failing: int, what: str, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> None:
        expected = TrainingError if ctx.rank == failing else PeerError
        with (
            pytest.raises(expected) as caught,
            trainer_of(stages, pipelines, what, ctx.rank, failing) as trainer,
        ):
            trainer.fit(max_steps=4, progress=False)
        if isinstance(caught.value, TrainingError):
            worker = f"s{failing % stages}p{failing // stages}"
            is_first = stages == 2 and failing % 2 == 0
            num_in_flight = {"forward": int(is_first), "backward": 1 + is_first, "update": 0}
            check_error(caught.value, worker, what, num_in_flight[what])

    with LocalJob(work, stages * pipelines, output_folder=tmp_path) as job:
        assert wait_for_all(job._workers, 3 * TIMEOUT), "it hangs"
        assert [w.status for w in job._workers] == [0] * stages * pipelines, [
            w.reason for w in job._workers
        ]


SCRIPT = f"""
import os, torch, polyrhythm as pr
from torch.utils.data import TensorDataset

class Failing(torch.nn.Module):
    def forward(self, x):
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("{NO_MEMORY}")
        return x

inputs = torch.randn(64, 8)
trainer = pr.Trainer(
    lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), Failing()),
    torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1),
    TensorDataset(inputs, inputs[:, :4]), batch_size=16, timeout=20,
)
trainer.fit(progress=False, max_steps=2)
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("degree", ["--stages", "--pipelines"])
def test_command_shows_it_once_and_no_lost_peer(degree: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = run_forked("train", "script.py", degree, "2", cwd=tmp_path)
    shown = found.stdout + found.stderr
    assert shown.count("ran out of memory in F0 of step 0") == 1
    if degree == "--pipelines":  # the other one goes on
        assert found.returncode == 0
        return
    assert found.returncode == 2
    assert shown.count(f"OutOfMemoryError: {NO_MEMORY}") == shown.count("Traceback") == 1
    assert "lost " not in shown


@contextmanager
def raised(error: Exception) -> Iterator[None]:
    with pytest.raises(type(error)) as caught:
        yield
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_failed_allocations_are_recognised_and_are_no_lost_peer(
    error: Exception, expected: bool
) -> None:
    assert is_out_of_memory(error) == expected
    if expected:
        with raised(error), peer_errors("another stage", "sending F0"):
            raise error


def test_real_failed_allocation_on_the_host() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("called", ["step", "eval"])
def test_pipeline_without_an_optimizer_names_what_it_knows(called: str) -> None:
    failing = Failing("forward", 3)
    pipeline = Pipeline(
        nn.Sequential(nn.Linear(4, 4), failing),
        n_microbatches=4,
        loss_fn=mse_loss,
        schedule="gpipe",
    )
    call: Callable[..., object] = getattr(pipeline, called)
    with pipeline, pytest.raises(TrainingError) as caught:
        call(torch.randn(8, 4), target=torch.randn(8, 4))
    where = {"step": "step 0", "eval": "an evaluation after 0 steps"}[called]
    assert caught.value.wrong == f"s0p0 ran out of memory in F2 of {where}"
    num_in_flight = {"step": 2, "eval": 0}[called]
    assert f"weights 80B, gradients 0B, activations of {num_in_flight}" in caught.value.expected
    assert ("fewer micro-batches in flight" in caught.value.fix) == (called == "step")
