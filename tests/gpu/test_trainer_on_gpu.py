"""The Trainer with stages and replicas that share one GPU has the losses of one process."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.trainer import Trainer

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)

WIDTH, NUM_STEPS = 64, 8
LAYERS = {1: (7,), 2: (4, 3)}


def model() -> nn.Sequential:
    pairs = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*pairs, nn.Linear(WIDTH, 4))


def losses(folder: Path, num_stages: int, num_pipelines: int, sync: str) -> list[float]:
    """Return the loss of each global batch; the test's own process does not touch the GPU."""
    plan = Plan(layers_per_stage=LAYERS[num_stages], pipelines=(PipelinePlan(),) * num_pipelines)
    inputs = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(0))

    def work(ctx: DistContext) -> None:
        with Trainer(
            model,
            mse_loss,
            partial(torch.optim.AdamW, lr=1e-3),
            TensorDataset(inputs, inputs[:, :4].tanh()),
            plan=plan,
            sync=sync,
            batch_size=32,
            microbatch_size=4,
            device="cuda",
            run_dir=folder / "run",
            checkpoint=CheckpointConfig(every=3),
        ) as trainer:
            steps = trainer.fit(max_steps=NUM_STEPS).steps
            assert next(trainer.model.parameters()).is_cuda
        own = [end.own for end in steps]
        found = [(each.loss, each.num_samples) for each in own if each.loss is not None]
        (folder / f"{ctx.rank}.pkl").write_bytes(pickle.dumps(found))

    folder.mkdir()
    with LocalJob(work, plan.num_workers, output_folder=folder / "logs") as job:
        assert job.wait(120), "not done in time"
    assert list((folder / "run" / "checkpoints").glob("step-*"))
    paths = sorted(folder.glob("*.pkl"))
    found: list[Any] = [each for p in paths if (each := pickle.loads(p.read_bytes()))]
    return [
        sum(loss * number for loss, number in step) / sum(number for _, number in step)
        for step in zip(*found, strict=True)
    ]


@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "sync"),
    [(2, 1, "auto"), (1, 2, "decoupled"), (2, 2, "all_reduce"), (1, 2, "balanced")],
)
def test_stages_and_replicas_on_one_gpu_match_single_process(
    tmp_path: Path, num_stages: int, num_pipelines: int, sync: str
) -> None:
    expected = losses(tmp_path / "alone", 1, 1, "auto")
    assert len(expected) == NUM_STEPS
    actual = losses(tmp_path / "found", num_stages, num_pipelines, sync)
    assert actual == pytest.approx(expected, rel=1e-5)
