"""The demo's training loop: several workers have the losses of one process."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

from polyrhythm.errors import LaunchError, WorkerError
from polyrhythm.events import read_run
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.comm.process_groups import NUM_FIRST_STEPS
from polyrhythm.run.data.reader import make_order
from polyrhythm.run.demo import train as training
from polyrhythm.run.demo.job import DemoConfig, DemoJob
from polyrhythm.run.demo.train import ByteText, build_layers, next_byte_loss
from polyrhythm.sinks.jsonl import merge
from tests.grids import long_except


def demo_config(**changes: int | float) -> DemoConfig:
    defaults = {"steps": 4, "width": 16, "context": 16, "blocks": 2, "microbatches": 3}
    return DemoConfig(**{**defaults, "microbatch_size": 2, "lr": 0.02, "device": "cpu", **changes})


TEXT = ByteText(bytes(range(256)) * 8, context=16)


def distributed_losses(folder: Path, job: DemoJob) -> list[list[float]]:
    """Return the loss of each step, per pipeline."""
    with LocalJob(
        lambda ctx: training.train(ctx, job, TEXT, folder),
        job.plan.num_workers,
        output_folder=folder / "output",
    ) as workers:
        assert workers.wait(60)
    merge(folder)
    steps = [event for event in read_run(folder) if event.kind == "step" and "loss" in event.values]
    return [
        [float(e.values["loss"]) for e in steps if e.worker and e.worker.pipeline == pipeline]
        for pipeline in range(job.plan.num_pipelines)
    ]


def single_process_losses(folder: Path, config: DemoConfig) -> list[list[float]]:
    """Train with a plain loop over the whole model and the whole batch."""
    path = folder / "plain.json"

    def work(ctx: DistContext) -> None:
        model = build_layers(config.shape, range(config.shape.num_layers), seed=config.seed)
        optimizer = AdamW(model.parameters(), lr=config.lr)
        warmup = LambdaLR(optimizer, lambda step: min(1.0, step + 1))
        curve = []
        order = make_order(TEXT, seed=config.seed, shuffle=True)
        assert order is not None
        size = config.microbatches * config.microbatch_size
        for step in range(config.steps):
            by_pipeline = []
            for pipeline in range(config.num_pipelines):
                start = (step * config.num_pipelines + pipeline) * size
                batch = [TEXT[int(number)] for number in order.ids(start, start + size)]
                inputs, targets = default_collate(batch)
                by_pipeline.append(next_byte_loss(model(inputs), targets))
            curve.append([loss.item() for loss in by_pipeline])
            torch.stack(by_pipeline).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
        path.write_text(json.dumps(list(zip(*curve, strict=True))))

    with LocalJob(work, 1, output_folder=folder) as job:
        assert job.wait(60)
    loaded: list[list[float]] = json.loads(path.read_text())
    return loaded


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("stages", "pipelines"), long_except([(1, 2), (2, 2), (3, 1)], 1))
def test_losses_match_single_process_loop(tmp_path: Path, stages: int, pipelines: int) -> None:
    config = demo_config(num_stages=stages, num_pipelines=pipelines)
    losses = distributed_losses(tmp_path, DemoJob.of(config))
    reference = single_process_losses(tmp_path, config)
    assert len(losses[0]) == config.steps
    assert abs(losses[0][-1] - losses[0][0]) > 1e-2, "the loss changes"
    for pipeline in range(pipelines):
        assert losses[pipeline] == pytest.approx(reference[pipeline], abs=1e-5)


def block_rank_1(ctx: DistContext) -> None:
    with ctx.process_group(20):
        module = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        sync = GroupSync(module, optimizer, "all_reduce", timeout=2)
        for step in range(NUM_FIRST_STEPS + 1):  # in the first ones it may compile
            if ctx.rank == 1 and step == NUM_FIRST_STEPS:
                time.sleep(1000)
            module(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.close()


@pytest.mark.long
@pytest.mark.timeout(60)
def test_unresponsive_replica_times_out(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match="lost another worker during averaging gradients"),
        LocalJob(block_rank_1, 2, output_folder=tmp_path) as job,
    ):
        job.wait(40)


@pytest.mark.timeout(60)
def test_workers_with_different_text_are_rejected(tmp_path: Path) -> None:
    job = DemoJob.of(demo_config(num_stages=1, num_pipelines=2))

    def work(ctx: DistContext) -> None:
        other = ByteText(bytes(1000), context=16)
        run = tmp_path if ctx.rank == 0 else None
        training.train(ctx, job, other if ctx.rank == 1 else TEXT, run)

    with (
        pytest.raises(WorkerError, match=r"rank [01] .*s0p1 has text digest=.* and s0p0 has"),
        LocalJob(work, 2, output_folder=tmp_path) as workers,
    ):
        workers.wait(40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 5}, "5 stages for 4 layers"),
        ({"width": 30}, "width 30 for 4 heads"),
        ({"timeout": 1e300}, "--timeout 1e"),
        ({"lr": 0.0}, "--lr 0"),
        ({"blocks": -1}, "-1 blocks"),
        ({"microbatches": 0}, "--microbatches 0"),
    ],
)
def test_impossible_settings_are_rejected(changes: dict[str, float], message: str) -> None:
    with pytest.raises((LaunchError, ValueError), match=message):
        DemoJob.of(demo_config(**changes))
