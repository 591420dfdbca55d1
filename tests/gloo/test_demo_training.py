"""The training loop itself: several workers follow the course of one process on the whole batch."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from polyrhythm.errors import LaunchError, WorkerError
from polyrhythm.events import merge, read_run
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.demo import train as training
from polyrhythm.run.demo.gpt import build_layers, next_byte_loss
from polyrhythm.run.demo.job import DemoConfig, DemoJob
from polyrhythm.run.demo.text import ByteText


def settings(**changed: int | float) -> DemoConfig:
    small = {"steps": 4, "width": 16, "context": 16, "blocks": 2, "microbatches": 3}
    return DemoConfig(**{**small, "microbatch_size": 2, "lr": 0.02, "device": "cpu", **changed})


TEXT = ByteText.of(bytes(range(256)) * 8, context=16, microbatch_size=2, seed=0)


def losses_of_workers(folder: Path, job: DemoJob) -> list[list[float]]:
    """Per pipeline, the loss of each step."""
    with LocalJob(
        lambda ctx: training.train(ctx, job, TEXT, folder),
        job.plan.num_workers,
        output_folder=folder / "workers",
    ) as workers:
        assert workers.wait(60)
    merge(folder)
    steps = [event for event in read_run(folder) if event.kind == "step" and event.values]
    return [
        [float(e.values["loss"]) for e in steps if e.worker and e.worker.pipeline == pipeline]
        for pipeline in range(job.plan.num_pipelines)
    ]


def losses_of_one_process(folder: Path, chosen: DemoConfig) -> list[list[float]]:
    """The same training as a plain loop over the whole model and the whole batch."""
    path = folder / "plain.json"

    def work(ctx: DistContext) -> None:
        model = build_layers(chosen.shape, range(chosen.shape.num_layers), seed=chosen.seed)
        optimizer = AdamW(model.parameters(), lr=chosen.lr)
        warmup = LambdaLR(optimizer, lambda step: min(1.0, step + 1))
        course = []
        for step in range(chosen.steps):
            by_pipeline = []
            for pipeline in range(chosen.pipelines):
                batch = [
                    TEXT.microbatch(step=step, pipeline=pipeline, microbatch=m)
                    for m in range(chosen.microbatches)
                ]
                inputs, targets = (torch.cat(part) for part in zip(*batch, strict=True))
                by_pipeline.append(next_byte_loss(model(inputs), targets))
            course.append([loss.item() for loss in by_pipeline])
            torch.stack(by_pipeline).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
        path.write_text(json.dumps(list(zip(*course, strict=True))))

    with LocalJob(work, 1, output_folder=folder) as job:
        assert job.wait(60)
    loaded: list[list[float]] = json.loads(path.read_text())
    return loaded


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("stages", "pipelines"), [(1, 2), (2, 2), (3, 1)])
def test_losses_match_single_process_loop(tmp_path: Path, stages: int, pipelines: int) -> None:
    chosen = settings(stages=stages, pipelines=pipelines)
    ours = losses_of_workers(tmp_path, DemoJob.of(chosen))
    plain = losses_of_one_process(tmp_path, chosen)
    assert len(ours[0]) == chosen.steps
    assert abs(ours[0][-1] - ours[0][0]) > 1e-2, "it learns something"
    for pipeline in range(pipelines):
        assert ours[pipeline] == pytest.approx(plain[pipeline], abs=1e-5)


def fall_silent(ctx: DistContext) -> None:
    with ctx.process_group(20):
        module = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        sync = GroupSync(module, optimizer, "all_reduce", timeout=2)
        if ctx.rank == 1:
            time.sleep(1000)
        module(torch.ones(2)).sum().backward()
        optimizer.step()
        sync.close()


@pytest.mark.timeout(60)
def test_unresponsive_replica_times_out(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match="lost another worker during averaging gradients"),
        LocalJob(fall_silent, 2, output_folder=tmp_path) as job,
    ):
        job.wait(40)


@pytest.mark.timeout(60)
def test_workers_with_different_text_are_refused(tmp_path: Path) -> None:
    job = DemoJob.of(settings(stages=1, pipelines=2))

    def work(ctx: DistContext) -> None:
        other = ByteText.of(bytes(1000), context=16, microbatch_size=2, seed=0)
        run = tmp_path if ctx.rank == 0 else None
        training.train(ctx, job, other if ctx.rank == 1 else TEXT, run)

    with (
        pytest.raises(WorkerError, match="rank 1 refused: this worker's text has digest"),
        LocalJob(work, 2, output_folder=tmp_path) as workers,
    ):
        workers.wait(40)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"stages": 5}, "5 stages for 4 layers"),
        ({"width": 30}, "width 30 for 4 heads"),
        ({"timeout": 1e300}, "--timeout 1e"),
        ({"lr": 0.0}, "--lr 0"),
        ({"blocks": -1}, "-1 blocks"),
        ({"microbatches": 0}, "--microbatches 0"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, float], says: str) -> None:
    with pytest.raises((LaunchError, ValueError), match=says):
        DemoJob.of(settings(**changed))
