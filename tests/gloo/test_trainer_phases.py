"""Phases of training in scripted sync modes: what must hold across a switch."""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.run.averaging.strategies import GradientAveraging
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer import sync_tuner
from polyrhythm.run.trainer.config import DeviceConfig
from polyrhythm.run.trainer.fit_loop import Phase
from polyrhythm.sinks.metrics import StepInfo
from tests.gloo.trainer_jobs import BATCH, ScriptedTuner, plan_of, run_job, trainer
from tests.grids import long_except

SYNC_MODES = ("adaptive", "balanced", "age", "decoupled", "balanced")
NUM_STEPS = 60  # enough for all modes twice, the last of which has equal replicas


def train(
    folder: Path, num_stages: int, num_pipelines: int, sync_modes: Sequence[str]
) -> list[Any]:
    """Return by rank: steps with samples and weights, and the final optimizer state."""
    plan = plan_of(num_stages, num_pipelines)

    def work(ctx: DistContext | None) -> Any:
        sync_tuner.AutoSwitch = partial(ScriptedTuner, sync_modes)
        seen: list[tuple[int, int, Tensor]] = []

        def callback(end: Any) -> None:
            weight = next(made.model.parameters()).detach().clone()
            seen.append((end.step, end.own.num_samples, weight))

        with trainer(plan, sync="auto") as made:
            made.fit(max_steps=NUM_STEPS // 2, callbacks=[callback])
            assert made.global_step == NUM_STEPS // 2
            made.fit(max_steps=NUM_STEPS, callbacks=[callback])
            state = made._progress.optimizer.state_dict()
            return seen, state

    return run_job(plan.num_workers, work, folder)


@pytest.mark.parametrize("shape", [(1, 3), pytest.param((2, 2), marks=pytest.mark.long)])
def test_replicas_are_equal_after_every_sync_mode_switch(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    found = train(tmp_path, *shape, SYNC_MODES)
    num_stages = shape[0]
    for stage in range(num_stages):
        replicas = [found[rank][0] for rank in range(stage, len(found), num_stages)]
        num_samples = sum(count for seen in replicas for _, count, _ in seen)
        assert num_samples == NUM_STEPS * BATCH
        weights = [seen[-1][2] for seen in replicas]  # of the last step, before `average_all`
        for weight in weights[1:]:
            torch.testing.assert_close(weight, weights[0], rtol=0, atol=1e-6)
    rates = {group["lr"] for _, state in found for group in state["param_groups"]}
    assert len(rates) == 1
    assert rates.pop() == pytest.approx(1e-2 / (1 + NUM_STEPS / 5))


@pytest.mark.long
def test_loss_scales_are_equal_after_a_switch_from_groups(tmp_path: Path) -> None:
    """In groups the second pipeline overflows more often, and lowers its own scale."""
    plan = plan_of(1, 2)

    def work(ctx: DistContext | None) -> Any:
        assert ctx is not None
        sync_tuner.AutoSwitch = partial(ScriptedTuner, ("adaptive", "balanced"))
        factor = 2.0 ** (12 * ctx.rank)
        seen = list[tuple[int, int, float]]()

        def callback(info: StepInfo) -> None:
            assert info.loss_scale is not None
            seen.append((info.step, len(info.pipelines), info.loss_scale))

        with trainer(
            plan,
            sync="auto",
            loss_fn=lambda output, target: factor * mse_loss(output, target),
            device=DeviceConfig("cpu", autocast=torch.float16),
        ) as made:
            made.fit(max_steps=NUM_STEPS, callbacks=[callback])
            assert made._progress.scaler is not None
            return seen, made._progress.scaler.state_dict()

    (first, state), (second, other) = run_job(plan.num_workers, work, tmp_path)
    assert state == other
    in_groups = [{scale for _, number, scale in seen if number == 1} for seen in (first, second)]
    assert max(in_groups[1]) < max(in_groups[0]) or min(in_groups[1]) < min(in_groups[0])
    in_lockstep = [[each for each in seen if each[1] == 2] for seen in (first, second)]
    assert in_lockstep[0] == in_lockstep[1]
    assert in_lockstep[0][-1][0] == NUM_STEPS - 1


def one_process_trainer(folder: Path, schedule: Callable[[Any], LRScheduler], **more: Any) -> Any:
    return trainer(plan_of(1, 1), lr_schedule=schedule, run_dir=folder, **more)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: MultiStepLR(optimizer, [4, 8], gamma=0.1),
        lambda optimizer: OneCycleLR(optimizer, max_lr=3e-2, total_steps=20),
    ],
)
def test_lr_scheduler_continues_across_checkpoint_and_fits(
    tmp_path: Path, schedule: Callable[[Any], LRScheduler]
) -> None:
    with one_process_trainer(tmp_path / "whole", schedule) as made:
        whole = made.fit(max_steps=12).losses
    with one_process_trainer(tmp_path / "parts", schedule) as made:
        parts = [*made.fit(max_steps=3).losses, *made.fit(max_steps=6).losses]
        made.save()
    with one_process_trainer(tmp_path / "parts", schedule) as made:
        assert made.restore() == 6
        parts += made.fit(max_steps=12).losses
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: MultiStepLR(optimizer, [4, 8], gamma=0.1),
        lambda optimizer: OneCycleLR(optimizer, max_lr=3e-2, total_steps=20),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 20)], [4]
        ),
    ],
)
def test_lr_scheduler_goes_back_with_samples_that_are_not_used_any_more(
    monkeypatch: pytest.MonkeyPatch, schedule: Callable[[Any], LRScheduler]
) -> None:
    seen, phases = list[dict[str, Any]](), list[Phase]()
    with trainer(plan_of(1, 1), lr_schedule=schedule) as made:
        make = Phase.__init__

        def noting(phase: Phase, *args: Any) -> None:
            make(phase, *args)
            phases.append(phase)

        def scheduled() -> dict[str, Any]:
            (group,) = made._progress.optimizer.param_groups
            return {name: value for name, value in group.items() if name != "params"}

        monkeypatch.setattr(Phase, "__init__", noting)
        made.fit(max_steps=2)
        made.fit(max_steps=12, callbacks=[lambda info: seen.append(scheduled())])
        for step in (7, 9, 3, 12):
            phases[-1].set_lr_scheduler(step)
            assert scheduled() == seen[step - 3]


def test_lr_scheduler_that_cannot_be_saved_is_rejected_at_the_start(tmp_path: Path) -> None:
    def schedule(optimizer: Any) -> LRScheduler:
        lr_scheduler = MultiStepLR(optimizer, [4, 8])
        lr_scheduler.owner = object()  # state_dict() contains every attribute
        return lr_scheduler

    seen: list[int] = []
    with (
        one_process_trainer(tmp_path, schedule) as made,
        pytest.raises(CheckpointError, match=r"learning rate scheduler.*owner.*object"),
    ):
        made.fit(max_steps=3, callbacks=[lambda end: seen.append(1)])
    assert not seen, "no step is trained that could not be saved"


def test_save_and_evaluate_during_fit_are_rejected(tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [lambda: made.save(), lambda: made.evaluate([])]
    with trainer(plan_of(1, 1), run_dir=tmp_path) as made:
        for name in ("save", "evaluate"):
            with pytest.raises(LaunchError, match=rf"{name}\(\) during fit\(\)"):
                made.fit(max_steps=3, callbacks=[lambda end: calls[0]()])
            calls.pop(0)
    with trainer(plan_of(1, 1), run_dir=tmp_path) as again:  # the folder is free
        assert again.restore() == 0


def test_several_trainers_in_one_job(tmp_path: Path) -> None:
    def work(ctx: DistContext | None) -> Any:
        found = []
        for name, steps in (("a", 2), ("b", 4), ("a", 2)):
            with trainer(plan_of(1, 2), run_dir=tmp_path / name) as made:
                before = made.restore()
                made.fit(max_steps=steps)
                made.save()
                found.append((before, made.global_step))
        return found

    assert run_job(2, work, tmp_path) == [[(0, 2), (0, 4), (2, 2)]] * 2


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("sync", long_except(["all_reduce", "balanced"], 0))
def test_dead_pipeline_stops_training_in_gradient_modes(
    tmp_path: Path, sync: str, in_backward: bool
) -> None:
    """The other pipeline must not continue as if the lost samples had been used."""

    def work(ctx: DistContext) -> None:
        published, publish = [], GradientAveraging._publish

        def record_publish(averaging: GradientAveraging) -> None:
            published.append(averaging._is_streaming)
            publish(averaging)

        GradientAveraging._publish = record_publish

        def callback(end: Any) -> None:
            assert published, "no gradient is averaged"
            assert all(published), "gradients are averaged after backward"
            if ctx.rank == 1 and end.step >= 3:
                if not in_backward:
                    raise SystemExit(0)
                # Its gradient comes last: those of later layers are on their way.
                next(made.model.parameters()).register_hook(lambda _: os._exit(0))

        made = trainer(plan_of(1, 2), sync=sync)
        try:
            made.fit(max_steps=10_000, callbacks=[callback])
        except PeerError as error:
            (tmp_path / f"error{ctx.rank}").write_text(str(error))
            made.__exit__(PeerError, error, None)

    with LocalJob(work, 2, output_folder=tmp_path / "logs") as job:
        assert job.wait(60)
    assert "its share of the batch" in (tmp_path / "error0").read_text()


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 3), pytest.param((2, 3), marks=pytest.mark.long)])
def test_switch_after_a_loss_waits_for_living_pipelines_only(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    """A pipeline dies in groups; the others switch to lockstep, to groups, and back."""
    plan = plan_of(*shape)
    lost = range(shape[0], 2 * shape[0])  # the ranks of the second pipeline
    modes = ["adaptive", *["adaptive"] * 8, "decoupled", "age", "balanced"]

    def work(ctx: DistContext) -> None:
        sync_tuner.AutoSwitch = partial(ScriptedTuner, modes)
        seen: list[tuple[int, int, Tensor]] = []

        def callback(end: Any) -> None:
            if ctx.rank in lost and end.step >= 5:
                os._exit(0)
            weight = next(made.model.parameters()).detach().clone()
            seen.append((end.step, end.own.num_samples, weight))

        made = trainer(plan, sync="auto")
        made.fit(max_steps=NUM_STEPS, callbacks=[callback])
        made.fit(max_steps=NUM_STEPS + ScriptedTuner.NUM_STEPS, callbacks=[callback])  # in lockstep
        torch.save(seen, tmp_path / f"seen{ctx.rank}.pt")
        (tmp_path / f"done{ctx.rank}").touch()
        while len(list(tmp_path.glob("done*"))) < plan.num_workers - len(lost):
            time.sleep(0.01)  # the others may need the job's store, or the last messages
        os._exit(0)  # leaving the job's process group would wait for the dead

    with LocalJob(work, plan.num_workers, output_folder=tmp_path / "logs") as job:
        assert job.wait(90)
    for stage in range(shape[0]):
        replicas = [torch.load(tmp_path / f"seen{stage + 2 * p * shape[0]}.pt") for p in range(2)]
        last = [{step: (count, weight) for step, count, weight in seen} for seen in replicas]
        for step in range(NUM_STEPS, NUM_STEPS + ScriptedTuner.NUM_STEPS):
            assert sum(seen[step][0] for seen in last) == BATCH
        weights = [seen[NUM_STEPS - 1][1] for seen in last]
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)
