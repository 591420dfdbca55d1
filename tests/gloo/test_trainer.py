"""The Trainer: the same training in one process and in many, in every synchronous mode."""

import inspect
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from polyrhythm.errors import LaunchError, PlanError, PolicyError, UserError, WorkerError
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer import fit_loop
from polyrhythm.run.trainer.config import CheckpointConfig, DataConfig, DeviceConfig
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.modes import SyncConfig
from tests.gloo.trainer_jobs import BATCH, LAYERS, fit, model, plan_of, run_job, samples, trainer
from tests.grids import long_except


@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "sync"),
    long_except(
        [
            (3, 1, "auto"),
            (1, 4, "decoupled"),
            (2, 2, "decoupled"),
            (1, 3, "all_reduce"),
            (2, 2, "all_reduce"),
            (2, 2, "balanced"),
            (3, 2, "balanced"),
        ],
        *(0, 1, 4, 6),
    ),
)
def test_synchronous_modes_match_one_process(
    tmp_path: Path, num_stages: int, num_pipelines: int, sync: str
) -> None:
    single, weights = fit(tmp_path, 1, 1)
    losses, found = fit(tmp_path, num_stages, num_pipelines, sync=sync)
    assert losses == pytest.approx(single, abs=1e-5)
    assert single[-1] < single[0]
    for name, expected in weights.items():
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sync", long_except(["all_reduce", "decoupled"], 1))
def test_unequal_shares_match_the_gradient_of_the_global_batch(tmp_path: Path, sync: str) -> None:
    single, weights = fit(tmp_path, 1, 1)
    pipelines = tuple(PipelinePlan(num_microbatches=n, schedule="1f1b") for n in (9, 3))
    plan = Plan(layers_per_stage=LAYERS[2], pipelines=pipelines, microbatch_size=2)
    losses, found = fit(tmp_path, 2, 2, plan=plan, sync=sync)
    assert losses == pytest.approx(single, abs=1e-5)
    for name, expected in weights.items():
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("schedule", long_except(["gpipe", "kfkb:2", "bounded:4,2", "auto"], 1, 3))
def test_all_schedules_give_the_same_losses(tmp_path: Path, schedule: str) -> None:
    single, _ = fit(tmp_path, 1, 1)
    losses, _ = fit(tmp_path, 2, 1, plan=plan_of(2, 1, schedule))
    assert losses == pytest.approx(single, abs=1e-5)


def test_second_fit_continues_the_first(tmp_path: Path) -> None:
    whole, weights = fit(tmp_path, 1, 1)
    with trainer(plan_of(1, 1)) as made:
        first = made.fit(max_steps=4).losses
        second = made.fit(max_steps=len(whole)).losses
        assert made.fit(max_steps=len(whole)).losses == ()
        assert (*first, *second) == pytest.approx(whole, abs=1e-6)
        for name, value in made.model.state_dict().items():
            torch.testing.assert_close(value, weights[name])


def test_smaller_last_micro_batch_is_weighted_by_its_samples(tmp_path: Path) -> None:
    single, _ = fit(tmp_path, 1, 1, microbatch_size=BATCH)
    losses, _ = fit(tmp_path, 2, 1, microbatch_size=5)
    assert losses == pytest.approx(single, abs=1e-5)
    losses, _ = fit(tmp_path, 1, 2, microbatch_size=5, sync="balanced")
    assert losses == pytest.approx(single, abs=1e-5)


def test_autocast_trains_in_lower_precision(tmp_path: Path) -> None:
    single, _ = fit(tmp_path, 1, 1)
    losses, _ = fit(tmp_path, 2, 1, device=DeviceConfig(autocast=torch.bfloat16))
    assert losses == pytest.approx(single, rel=0.02)
    assert losses != pytest.approx(single, rel=1e-6)


@pytest.mark.parametrize(
    ("record", "arguments", "wrong", "fix"),
    [
        (CheckpointConfig, {"every": 0}, "every=0", "every"),
        (CheckpointConfig, {"keep_last": 0}, "keep_last=0", "keep_last"),
        (CheckpointConfig, {"grace_period": 0}, "grace_period=0", "grace_period"),
        (DataConfig, {"seed": 1.5}, "seed=1.5", "seed"),
        (DeviceConfig, {"autocast": torch.float64}, "autocast=torch.float64", "bfloat16"),
        (SyncConfig, {"mode": "adaptve"}, "unknown sync mode: 'adaptve'", "adaptive"),
        (SyncConfig, {"overlap": True}, "overlap=True with sync='decoupled'", "adaptive"),
        (SyncConfig, {"buddy": "no"}, "buddy='no'", "buddy=False"),
        (SyncConfig, {"mode": "age", "buddy": False}, "buddy=False with sync='age'", "omit"),
        (SyncConfig, {"options": {"max_age": 3}}, "options={'max_age': 3}", "adaptive"),
    ],
)
def test_invalid_records_are_rejected(
    record: type, arguments: dict[str, Any], wrong: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        record(**arguments)
    assert wrong in caught.value.wrong
    assert fix in caught.value.fix


def test_device_mesh_has_pipelines_and_stages(tmp_path: Path) -> None:
    def work(ctx: DistContext | None) -> Any:
        with trainer(plan_of(2, 2)) as made:
            mesh = made.device_mesh
            ranks = dist.get_process_group_ranks(mesh.get_group("pp"))
            return mesh.mesh_dim_names, mesh.get_coordinate(), ranks

    found = run_job(4, work, tmp_path)
    assert [names for names, _, _ in found] == [("dp", "pp")] * 4
    assert [tuple(at) for _, at, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [ranks for _, _, ranks in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_trainer_has_few_arguments_and_old_ones_name_the_new() -> None:
    assert len(inspect.signature(Trainer).parameters) <= 20
    for old, new in {"run": "run_dir=", "checkpoint_every": "CheckpointConfig(every=...)"}.items():
        with pytest.raises(TypeError, match=re.escape(new)):
            trainer(plan_of(1, 1), **{old: 1})
    with trainer(plan_of(1, 1)) as made:
        with pytest.raises(TypeError, match="max_steps="):
            made.fit(steps=1)
        with pytest.raises(AttributeError, match="global_step"):
            _ = made.step


@pytest.mark.parametrize(
    ("options", "wrong", "fix"),
    [
        ({"plan": plan_of(2, 2)}, "1 processes for 2 stages x 2 pipelines", "start 4 processes"),
        ({"batch_size": None}, "no batch_size", "batch_size=64"),
        ({"batch_size": 0}, "batch_size=0", "batch_size"),
        ({"microbatch_size": 25}, "a batch of 24 samples in micro-batches of 25", "larger"),
        ({"sync": "adaptve"}, "unknown sync mode: 'adaptve'", "adaptive"),
        ({"collate_fn": 3}, "collate_fn=3", "collate_fn"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0", "clip_grad_norm"),
        ({"timeout": -1.0}, "timeout=-1.0", "timeout"),
        ({"timeout": "60"}, "timeout='60'", "timeout"),
        ({"device": "nonsense"}, "device='nonsense'", "device"),
        ({"checkpoint": CheckpointConfig(every=2)}, "every=2) without a run folder", "run_dir="),
        (
            {"checkpoint": {"every": 2}},
            "checkpoint={'every': 2}",
            "checkpoint=pr.CheckpointConfig(",
        ),
        ({"sync": {"mode": "age"}}, "sync={'mode': 'age'}", "SyncConfig("),
        ({"batch_size": "24"}, "batch_size='24'", "batch_size"),
        ({"microbatch_size": 2.5}, "microbatch_size=2.5", "microbatch_size"),
        ({"lr_schedule": 3}, "lr_schedule=3", "lr_schedule"),
    ],
)
def test_invalid_trainer_arguments_are_rejected(
    options: dict[str, object], wrong: str, fix: str
) -> None:
    with pytest.raises(UserError) as error:
        trainer(options.pop("plan", plan_of(1, 1)), **options)
    assert wrong in error.value.wrong
    assert fix in error.value.fix


def test_unsplittable_model_error_tells_how_to_name_its_layers() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(PlanError, match="Odd has no list of layers") as error:
        Trainer(Odd, mse_loss, torch.optim.SGD, samples(), batch_size=8, plan=plan_of(2, 1))
    assert "split=LayerSplit(" in error.value.fix


def test_stage_without_parameters_is_rejected() -> None:
    plan = Plan(layers_per_stage=(1, 1, 3), pipelines=(PipelinePlan(),))
    with pytest.raises(PlanError, match="stage 1 has no parameters: Tanh"):
        trainer(plan)


def test_run_folder_in_use_is_rejected(tmp_path: Path) -> None:
    with (
        trainer(plan_of(1, 1), run_dir=tmp_path / "run"),
        pytest.raises(LaunchError, match="another job is using it"),
    ):
        trainer(plan_of(1, 1), run_dir=tmp_path / "run")
    with trainer(plan_of(1, 1), run_dir=tmp_path / "run"):
        assert (tmp_path / "run" / "workers.1").is_dir()  # the logs of the first job


def test_unwritable_run_folder_is_rejected_by_all_processes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work(ctx: DistContext | None) -> str:
        with pytest.raises(LaunchError) as error:
            trainer(plan_of(1, 2), run_dir=tmp_path / "file" / "run")
        return error.value.wrong

    found = run_job(2, work, tmp_path / "job")
    assert all("Not a directory" in wrong for wrong in found)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"data": DataConfig(seed=1)}, "seed=1"), ({"batch_size": 12}, "batch_size=12")],
)
def test_inconsistent_arguments_between_processes_are_rejected(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    def work(ctx: DistContext) -> None:
        trainer(plan_of(1, 2), **(options if ctx.rank else {})).fit(max_steps=1)

    with (
        LocalJob(work, 2, output_folder=tmp_path) as job,
        pytest.raises(WorkerError) as raised,
    ):
        job.wait(60)
    name, _ = named.split("=")
    assert f"s0p1 has {named}, and s0p0 has {name}=" in str(raised.value)


def test_max_steps_and_policy_options_are_checked_before_training(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        sync = SyncConfig("adaptive", options={"max_age": 3})
        with pytest.raises(PolicyError) as options:
            trainer(plan_of(1, 2), sync=sync)
        with trainer(plan_of(1, 2)) as made:
            with pytest.raises(LaunchError) as steps:
                made.fit(max_steps=3 + ctx.rank)
            made.fit(max_steps=3)
        with pytest.raises(LaunchError) as closed:
            made.fit(max_steps=6)
        return [error.value.wrong for error in (options, steps, closed)]

    for options, steps, closed in run_job(2, work, tmp_path):
        assert options == "unknown option of adaptive: 'max_age'"
        assert steps == "s0p1 has max_steps=4, and s0p0 has max_steps=3"
        assert closed == "fit() after close()"


def test_optimizer_of_other_parameters_is_rejected() -> None:
    def make(optimizer_fn: object) -> None:
        Trainer(model, mse_loss, optimizer_fn, samples(), batch_size=BATCH)

    with pytest.raises(LaunchError, match="optimizer of other parameters"):
        make(lambda _: torch.optim.SGD(model().parameters(), lr=0.1))
    with pytest.raises(LaunchError, match=r"optimizer_fn .*NoneType"):
        make(lambda _: None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the process can still be ended


def test_fit_keeps_the_last_steps_and_all_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_loop, "NUM_STEPS_KEPT", 3)
    seen = []
    with trainer(plan_of(1, 1)) as made:
        fitted = made.fit(max_steps=7, callbacks=[seen.append])
    assert fitted.steps == tuple(seen[-3:])
    assert list(fitted.losses) == [info.loss for info in seen]
    assert len(seen) == 7
