"""Real processes give the gradients of one process, whatever the shape and the schedule."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.events import EventLog
from polyrhythm.plan.plan import Plan, even_plan
from polyrhythm.run.gpt import GPTShape, build_layers, next_byte_loss
from polyrhythm.run.launch import LocalJob, Place
from polyrhythm.run.pipeline import PipelineStage
from polyrhythm.run.replicas import Replicas
from polyrhythm.run.text import ByteText
from polyrhythm.schedule.builders import Schedule, build

SHAPE = GPTShape(num_blocks=2, width=16, context=12)
TEXT = ByteText.of(bytes(range(256)) * 4, context=12, microbatch_size=3, seed=5)
SEED = 7


def microbatches(pipeline: int, num_microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    drawn = [
        TEXT.microbatch(step=0, pipeline=pipeline, microbatch=m) for m in range(num_microbatches)
    ]
    return [inputs for inputs, _ in drawn], [targets for _, targets in drawn]


def single_process_gradients(
    folder: Path, *, num_pipelines: int, num_microbatches: int = 5
) -> list[Tensor]:
    """The whole model on the whole batch at once, in a process of its own.

    Here it would start autograd's threads, and a parent that has those must not fork workers.
    """
    path = folder / "single.pt"

    def work(place: Place) -> None:
        torch.save(whole_batch_gradients(num_pipelines, num_microbatches), path)

    with LocalJob(work, 1, output_folder=folder) as job:
        assert job.wait(40), "not done in time"
    return torch.load(path)


def whole_batch_gradients(num_pipelines: int, num_microbatches: int) -> list[Tensor]:
    model = build_layers(SHAPE, range(SHAPE.num_layers), seed=SEED)
    batches = [microbatches(p, num_microbatches) for p in range(num_pipelines)]
    inputs = torch.cat([x for inputs, _ in batches for x in inputs])
    targets = torch.cat([y for _, targets in batches for y in targets])
    next_byte_loss(model(inputs), targets).backward()
    return gradients(model)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def one_step(
    place: Place,
    plan: Plan,
    order: Schedule,
    num_microbatches: int,
    folder: Path,
    device: torch.device,
) -> None:
    worker = plan.worker(place.rank)
    with place.joined(deadline=30), EventLog(folder / f"{worker}.jsonl", worker) as log:
        stage = PipelineStage(
            module=build_layers(SHAPE, plan.layers(worker.stage), seed=SEED).to(device),
            loss_fn=next_byte_loss,
            plan=plan,
            worker=worker,
            boundary=torch.Size((3, SHAPE.context, SHAPE.width)),
            log=log,
            device=device,
        )
        inputs, targets = microbatches(worker.pipeline, num_microbatches)
        stage.run_step(order[worker.stage], inputs, targets, step=0)
        Replicas(plan, worker, deadline=30).sum_gradients(stage.module)
    torch.save([gradient.cpu() for gradient in gradients(stage.module)], folder / f"{worker}.pt")


def distributed_gradients(
    folder: Path,
    *,
    num_stages: int,
    num_pipelines: int,
    num_microbatches: int = 5,
    schedule: str = "1f1b",
    k: int | None = None,
    device: str = "cpu",
) -> list[list[Tensor]]:
    """Per pipeline, the gradients of all stages in the order of the whole model."""
    plan = even_plan(
        num_layers=SHAPE.num_layers, num_stages=num_stages, num_pipelines=num_pipelines
    )
    order = build(schedule, num_stages=num_stages, num_microbatches=num_microbatches, k=k)
    with LocalJob(
        lambda place: one_step(place, plan, order, num_microbatches, folder, torch.device(device)),
        plan.num_workers,
        output_folder=folder,
    ) as job:
        assert job.wait(40), "not done in time"
    ranks = range(plan.num_workers)
    parts = {plan.worker(r): torch.load(folder / f"{plan.worker(r)}.pt") for r in ranks}
    return [
        [g for stage in range(num_stages) for g in parts[plan.replicas(stage)[pipeline]]]
        for pipeline in range(num_pipelines)
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "num_microbatches"),
    [(1, 1, 1), (2, 1, 5), (1, 2, 3), (2, 2, 5), (4, 1, 2), (4, 2, 6)],
)
def test_gradients_equal_those_of_one_process(
    tmp_path: Path, num_stages: int, num_pipelines: int, num_microbatches: int
) -> None:
    expected = single_process_gradients(
        tmp_path, num_pipelines=num_pipelines, num_microbatches=num_microbatches
    )
    for pipeline in distributed_gradients(
        tmp_path,
        num_stages=num_stages,
        num_pipelines=num_pipelines,
        num_microbatches=num_microbatches,
    ):
        for ours, theirs in zip(pipeline, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.timeout(90)
def test_every_schedule_gives_the_same_gradients_to_the_bit(tmp_path: Path) -> None:
    def under(schedule: str, k: int | None = None) -> list[Tensor]:
        folder = tmp_path / f"{schedule}{k}"
        (gradients,) = distributed_gradients(
            folder, num_stages=2, num_pipelines=1, schedule=schedule, k=k
        )
        return gradients

    reference = under("1f1b")
    for other in (under("gpipe"), under("kfkb", 2), under("kfkb", 3)):
        assert all(torch.equal(a, b) for a, b in zip(other, reference, strict=True))
