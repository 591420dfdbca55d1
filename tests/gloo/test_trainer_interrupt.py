"""Ctrl-C saves and exits; after another error in fit the last complete step can be saved, or not.

Without a run folder Ctrl-C is an error like others.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from polyrhythm.cli import main
from polyrhythm.errors import LaunchError
from polyrhythm.processes import INTERRUPTED, Child
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.trainer.preemption import InterruptDelay
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sinks.metrics import StepInfo
from polyrhythm.types import Worker
from tests.gloo.trainer_jobs import (
    BATCH,
    NUM_SAMPLES,
    NUM_STEPS,
    fit,
    model,
    plan_of,
    run_job,
    samples,
    trainer,
)
from tests.gloo.transport_peers import wait_until

STEP = 4  # in which the error is raised
NUM_MICROBATCHES = BATCH // 2


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise ValueError("an odd sample")


class FailingLoss:
    """Calls a function in the middle of a step."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._num_calls = call, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._num_calls += 1
        if self._num_calls == STEP * NUM_MICROBATCHES + 3:
            self._call()
        return mse_loss(output, target)


class InterruptedAdamW(torch.optim.AdamW):
    """Receives Ctrl-C in the middle of an update."""

    num_updates = 0

    def step(self, closure: Any = None) -> None:
        self.num_updates += 1
        if self.num_updates == STEP + 1:
            interrupt()
        super().step(closure)


def trainer_with(loss: Callable[..., Tensor], optimizer: Any, **more: Any) -> Trainer:
    return Trainer(
        model,
        loss,
        partial(optimizer, lr=1e-2),
        samples(),
        batch_size=BATCH,
        microbatch_size=2,
        clip_grad_norm=0.5,
        lr_schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step / 5)),
        plan=plan_of(1, 1),
        **more,
    )


@pytest.mark.parametrize("call", [interrupt, fail])
def test_one_process_continues_after_the_last_complete_step(
    tmp_path: Path, call: Callable[[], None]
) -> None:
    whole, weights = fit(tmp_path, 1, 1)
    run_dir = tmp_path / "run" if call is fail else None
    with trainer_with(FailingLoss(call), torch.optim.AdamW, run_dir=run_dir) as made:
        with pytest.raises((KeyboardInterrupt, ValueError)):
            made.fit(max_steps=NUM_STEPS)
        assert made.global_step == STEP
        if run_dir is not None:
            made.save()
        again = made.fit(max_steps=NUM_STEPS).losses
        assert again == pytest.approx(whole[STEP:], abs=1e-6)
        for name, value in made.model.state_dict().items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
    if run_dir is None:
        return
    with trainer_with(mse_loss, torch.optim.AdamW, run_dir=run_dir) as made:
        assert made.restore() == STEP
        assert made.fit(max_steps=NUM_STEPS).losses == pytest.approx(whole[STEP:], abs=1e-6)


def test_interrupted_update_is_completed_first(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path, 1, 1)
    with trainer_with(mse_loss, InterruptedAdamW) as made:
        with pytest.raises(KeyboardInterrupt):
            made.fit(max_steps=NUM_STEPS)
        assert made.global_step == STEP + 1
        assert made.fit(max_steps=NUM_STEPS).losses == pytest.approx(whole[STEP + 1 :], abs=1e-6)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class SlowMetric:
    """A metric whose first call interrupts the process."""

    num_calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> float:
        self.num_calls += 1
        if self.num_calls == 1:
            interrupt()
        time.sleep(0.05)
        return 0.0


def test_interrupt_with_a_run_folder_saves_and_exits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a long evaluation, which it ends, too."""
    whole, _ = fit(tmp_path, 1, 1, steps=20)

    slow = SlowMetric()
    run_dir = tmp_path / "run"
    with trainer(plan_of(1, 1), run_dir=run_dir) as made, pytest.raises(SystemExit) as left:
        made.fit(max_steps=10**6, eval_dataset=samples(), eval_every=7, metrics={"slow": slow})
    assert left.value.code == INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert slow.num_calls < NUM_SAMPLES / 2  # micro-batches of an evaluation
    assert f"interrupted after step 7, saved in {run_dir}; to continue, " in capfd.readouterr().err
    with trainer(plan_of(1, 1), run_dir=run_dir) as made:
        assert made.restore() == 7
        assert made.fit(max_steps=20).losses == pytest.approx(whole[7:], abs=1e-6)


SCRIPT = """
import sys, time, torch, polyrhythm as pr
from torch.utils.data import TensorDataset

inputs = torch.randn(64, 8)
trainer = pr.Trainer(
    lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)),
    torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1),
    TensorDataset(inputs, inputs[:, :4]), batch_size=16, timeout=30,
    run_dir="run" if sys.argv[1] == "saves" else None,
)
def show(info):
    print("trains", flush=True)
    time.sleep(0.02)

trainer.fit(max_steps=10**6, callbacks=[show])
print("fit has returned")
"""


@pytest.mark.parametrize("what", ["saves", "does not save"])
def test_train_command_forwards_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    shown, command = Path("shown.txt"), ["train", "script.py", "--stages", "2", "--pipelines", "2"]
    child = Child(lambda: main([*command, what]), output=shown)
    try:
        wait_until(lambda: "trains" in shown.read_text() or child.status is not None, "training")
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(40) == INTERRUPTED, shown.read_text()
    finally:
        child.end()
    text = shown.read_text()
    assert "fit has returned" not in text
    assert "Traceback" not in text
    if what == "saves":
        assert "saved in run; to continue, run the same script with trainer.restore()" in text
        assert len(list(Path("run/checkpoints").glob("step-*"))) == 1
    else:
        assert text.endswith("error: interrupted\n")


def test_second_ctrl_c_ends_the_process_at_once(tmp_path: Path) -> None:
    def work() -> None:
        def hang(info: StepInfo) -> None:
            (tmp_path / "hangs").touch()
            time.sleep(60)

        with trainer(plan_of(1, 1), run_dir=tmp_path / "run") as made:
            made.fit(max_steps=5, callbacks=[hang])

    child = Child(work, output=tmp_path / "shown.txt")
    try:
        wait_until((tmp_path / "hangs").exists, "training")
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(1.0) is None
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(20) == INTERRUPTED
    finally:
        child.end()
    assert "interrupted again" in (tmp_path / "shown.txt").read_text()


def test_interrupt_is_not_lost_if_the_update_fails() -> None:
    interrupts = InterruptDelay()
    with (
        pytest.raises(KeyboardInterrupt) as raised,
        interrupts.installed(),
        interrupts.delayed(),
    ):
        interrupt()
        fail()
    assert isinstance(raised.value.__cause__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_is_delayed_only_within_blocks() -> None:
    interrupts, done = InterruptDelay(), list[str]()
    with interrupts.installed():
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        with pytest.raises(KeyboardInterrupt), interrupts.delayed():
            interrupt()
            done.append("the block is complete")
        with pytest.raises(KeyboardInterrupt), interrupts.delayed():
            interrupt()
            interrupt()
            done.append("not after the second one")
        with interrupts.delayed():
            done.append("earlier ones are forgotten")
    assert done == ["the block is complete", "earlier ones are forgotten"]


def test_failing_lr_state_is_reported_and_not_saved(tmp_path: Path) -> None:
    class FailingLR(LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            if self.last_epoch >= STEP:
                raise ValueError("an odd state")
            return super().state_dict()

    def make(optimizer: Any) -> LambdaLR:
        return FailingLR(optimizer, lambda step: 1.0)

    options = {"loss_fn": FailingLoss(fail), "lr_schedule": make}
    with trainer(plan_of(1, 1), run_dir=tmp_path / "run", **options) as made:
        with pytest.raises(ValueError, match="odd state"):
            made.fit(max_steps=NUM_STEPS)
        with pytest.raises(LaunchError, match=r"learning rate scheduler .* unknown"):
            made.save()


def test_failed_update_is_not_saved_but_can_be_restored(tmp_path: Path) -> None:
    class FailingAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            if made.global_step == STEP and not done:
                done.append(True)
                fail()
            super().step(closure)

    done: list[bool] = []
    with trainer_with(mse_loss, FailingAdamW, run_dir=tmp_path / "run") as made:
        made.fit(max_steps=2)
        made.save()
        with pytest.raises(ValueError, match="odd"):
            made.fit(max_steps=NUM_STEPS)
        for call in (made.save, partial(made.fit, max_steps=6), partial(made.evaluate, samples())):
            with pytest.raises(LaunchError, match="after a failed fit"):
                call()
        assert made.restore() == 2
        assert len(made.fit(max_steps=6).losses) == 4


def run_stages_with(tmp_path: Path, num_stages: int, num_pipelines: int) -> list[Any]:
    plan = plan_of(num_stages, num_pipelines)

    def work(ctx: DistContext | None) -> Any:
        calls = FailingLoss(fail)
        with trainer(plan, run_dir=tmp_path / "run", microbatch_size=2, loss_fn=calls) as made:
            calls._num_calls = STEP * NUM_MICROBATCHES * (num_pipelines - 1) // num_pipelines
            try:
                made.fit(max_steps=NUM_STEPS)
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
            refused = []
            for call in (made.save, partial(made.fit, max_steps=NUM_STEPS)):
                try:
                    call()
                    refused.append("")
                except LaunchError as error:
                    refused.append(error.wrong)
            return failed, made.global_step, *refused

    return run_job(plan.num_workers, work, tmp_path / "job")


def test_stages_that_ended_after_the_same_step_can_save(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path, 1, 1)
    first, last = run_stages_with(tmp_path, 2, 1)
    assert first[0].startswith("PeerError: lost s1p0")
    assert last[0] == "ValueError: an odd sample"
    for _, step, saved, fitted in (first, last):
        assert (step, saved) == (STEP, "")
        assert fitted.startswith("fit() after a failed fit(): ")
    with trainer(plan_of(1, 1), run_dir=tmp_path / "run") as made:
        assert made.restore() == STEP
        assert made.fit(max_steps=NUM_STEPS).losses == pytest.approx(whole[STEP:], abs=1e-5)


def test_sharded_optimizer_is_not_saved_after_an_error(tmp_path: Path) -> None:
    for _, _, saved, fitted in run_stages_with(tmp_path, 1, 2):
        assert "shard of the optimizer's state" in saved or "is incomplete" in saved
        assert fitted.startswith("fit() after a failed fit(): ")


@pytest.mark.parametrize(("num_stages", "num_pipelines"), [(2, 1), (1, 2)])
def test_error_between_steps_ends_the_other_process_at_once(
    tmp_path: Path, num_stages: int, num_pipelines: int
) -> None:
    """The process with the error stays alive, and would be waited for until the timeout."""
    plan, has_ended = plan_of(num_stages, num_pipelines), tmp_path / "the other has ended"

    def work(ctx: DistContext | None) -> tuple[str, int]:
        def fail_on_first(info: StepInfo) -> None:
            if made.worker == Worker(0, 0) and info.step == STEP:
                fail()

        run_dir, failed = tmp_path / "run", ""
        with trainer(plan, run_dir=run_dir, timeout=60.0) as made:
            try:
                made.fit(max_steps=NUM_STEPS, callbacks=[fail_on_first])
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
            if made.worker == Worker(0, 0):
                wait_until(has_ended.exists, "the error of the other process")
            has_ended.touch()
            if num_stages > 1:
                made.save()
            return failed, made.global_step

    (first, step), (second, _) = run_job(2, work, tmp_path / "job")
    assert (first, step) == ("ValueError: an odd sample", STEP + 2)  # metrics are one step late
    assert second.startswith("PeerError: lost ")
    if num_stages > 1:
        with trainer(plan_of(1, 1), run_dir=tmp_path / "run") as made:
            assert made.restore() == STEP + 2


def test_interrupt_in_the_last_evaluation_saves_and_exits(tmp_path: Path) -> None:
    slow = SlowMetric()
    with trainer(plan_of(1, 1), run_dir=tmp_path) as made, pytest.raises(SystemExit) as left:
        made.fit(max_steps=2, eval_dataset=samples(), metrics={"slow": slow})
    assert left.value.code == INTERRUPTED
    with trainer(plan_of(1, 1), run_dir=tmp_path) as made:
        assert made.restore() == 2
