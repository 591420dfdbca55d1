"""The Trainer in float8, by torchao: emulated on a CPU, on any number of stages and replicas."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import polyrhythm as pr
from polyrhythm.errors import LaunchError
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext, LocalJob

WIDTH, NUM_STEPS = 32, 6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3)
    )


def trainer(num_stages: int = 1, num_pipelines: int = 1, **options: Any) -> pr.Trainer:
    layers = {1: (5,), 2: (2, 3)}[num_stages]
    inputs = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1))
    return pr.Trainer(
        model,
        mse_loss,
        pr.adamw(lr=1e-3),
        TensorDataset(inputs, inputs[:, :3].tanh()),
        plan=Plan(layers_per_stage=layers, pipelines=(PipelinePlan(),) * num_pipelines),
        batch_size=16,
        microbatch_size=4,
        **options,
    )


def losses(num_stages: int, num_pipelines: int, folder: Path, *, float8: bool) -> list[float]:
    def work(ctx: DistContext) -> None:
        device = pr.DeviceConfig("cpu", float8=float8)
        with trainer(num_stages, num_pipelines, device=device) as made:
            kinds = [type(layer).__name__ for layer in made.model.modules()]
            assert ("Float8Linear" in kinds) == float8
            assert all(name.endswith(("weight", "bias")) for name in made.model.state_dict())
            found = made.fit(max_steps=NUM_STEPS, progress=False).losses
        (folder / f"{ctx.rank}.txt").write_text(" ".join(map(str, found)))

    folder.mkdir()
    with LocalJob(work, num_stages * num_pipelines, output_folder=folder) as job:
        assert job.wait(120), "not done in time"
    return [float(number) for number in (folder / "0.txt").read_text().split()]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_stages_and_replicas_train_alike_in_float8(tmp_path: Path) -> None:
    """The layer with 3 outputs stays as it is; the others round their inputs to 3 bits."""
    pytest.importorskip("torchao", reason="float8 needs torchao, which is optional")
    alone = losses(1, 1, tmp_path / "alone", float8=True)
    exact = losses(1, 1, tmp_path / "exact", float8=False)
    assert alone == pytest.approx(exact, rel=0.05)
    assert alone != exact
    assert losses(2, 2, tmp_path / "job", float8=True) == pytest.approx(alone, rel=1e-3)


def test_float8_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(LaunchError, match="pip install torchao"):
        trainer(device=pr.DeviceConfig("cpu", float8=True))


def test_float8_on_an_old_gpu_is_refused() -> None:
    with pytest.raises(LaunchError, match="no float8"):
        pr.DeviceConfig(float8=True).check_capability((8, 0), "A100 of s0p0")
