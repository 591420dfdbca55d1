"""Replicated pipeline stages with a DistributedOptimizer train as one process does."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyrhythm.errors import PeerError, ScheduleError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.decoupled import error_of
from tests.gloo.pipelines import STAGE_TIMEOUT, merged, random_batch, run_stages, step
from tests.gloo.replicas import run_with_failures
from tests.gloo.transport_peers import wait_until

STAGES, PIPELINES, STEPS, WIDTH, CLIP = 2, 2, 6, 8, 0.05


def model_of(*, tied: bool) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    if tied:
        layers[-1].weight = layers[0].weight
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch_of(pipeline: int, number: int) -> tuple[Tensor, Tensor]:
    return random_batch(6, WIDTH, seed=100 * pipeline + number)


def pipeline_of(
    ctx: DistContext, *, tied: bool, double: bool = False, **options: object
) -> Pipeline:
    groups = [dist.new_group([STAGES * p + s for s in range(STAGES)]) for p in range(PIPELINES)]
    return Pipeline.from_sequential(
        model_of(tied=tied).double() if double else model_of(tied=tied),
        loss_fn=loss_of,
        process_group=groups[ctx.rank // STAGES],
        pipeline=ctx.rank // STAGES,
        timeout=STAGE_TIMEOUT,
        **options,
    )


def single_process(*, tied: bool, clip: bool) -> dict[str, Tensor]:
    """Train on the batches of all pipelines in one process."""
    model = model_of(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(STEPS):
        for pipeline in range(PIPELINES):
            inputs, target = batch_of(pipeline, number)
            (loss_of(model(inputs), target) / PIPELINES).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "tied", "clip", "mode"),
    [
        ("1f1b", False, False, "decoupled"),
        ("gpipe", True, True, "decoupled"),
        ("kfkb:2", True, True, "all_reduce"),
        ("auto", False, True, "decoupled"),
    ],
)
def test_replicated_stages_match_single_process(
    schedule: str, tied: bool, clip: bool, mode: str, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> dict[str, Tensor]:
        with pipeline_of(ctx, tied=tied, schedule=schedule, n_microbatches=3) as pipeline:
            optimizer = DistributedOptimizer(
                torch.optim.AdamW(pipeline.module.parameters(), lr=0.01),
                pipeline,
                200,
                mode=mode,
                timeout=STAGE_TIMEOUT,
            )
            for number in range(STEPS):
                step(pipeline, *batch_of(ctx.rank // STAGES, number))
                if clip:
                    optimizer.clip_grad_norm_(CLIP)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.close()
            return {n: p.detach().clone() for n, p in pipeline.module.named_parameters()}

    found = run_stages(STAGES * PIPELINES, work, tmp_path)
    expected = single_process(tied=tied, clip=clip)
    for pipeline in range(PIPELINES):
        weights = merged(found[STAGES * pipeline : STAGES * (pipeline + 1)])
        assert weights.keys() >= expected.keys()
        for name, value in expected.items():
            assert (weights[name] - value).abs().max() <= 1e-6, name


def test_pipeline_without_flush_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        options = {"schedule": "1f1b", "flush": False, "n_microbatches": 1}
        with pipeline_of(ctx, tied=False, **options) as pipeline:
            optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.05)
            with pytest.raises(ScheduleError) as caught:
                DistributedOptimizer(optimizer, pipeline, timeout=STAGE_TIMEOUT)
            return str(caught.value)

    for message in run_stages(STAGES * PIPELINES, work, tmp_path):
        assert "use flush=True" in message


@pytest.mark.long
def test_all_stages_and_replicas_try_the_same_candidates(tmp_path: Path) -> None:
    """A smaller batch and evaluations between steps do not end the trials, or change weights."""
    most = 400  # steps; how many the trials take depends on how steady the times of steps are

    def batch(pipeline: int, number: int) -> tuple[Tensor, Tensor]:
        inputs, target = batch_of(pipeline, number)
        num_samples = 3 if number % 7 == 6 else 6
        return inputs[:num_samples].double(), target[:num_samples].double()

    def work(ctx: DistContext) -> tuple[list[str], bool, dict[str, Tensor]]:
        options = {"schedule": "1f1b", "microbatch_sizes": [1]}
        with pipeline_of(ctx, tied=False, double=True, **options) as pipeline:
            optimizer = DistributedOptimizer(
                torch.optim.AdamW(pipeline.module.parameters(), lr=0.01),
                pipeline,
                timeout=STAGE_TIMEOUT,
            )
            seen = list[str]()
            while len(seen) < most and not (optimizer.is_tuned and len(seen) >= 60):
                number = len(seen)
                step(pipeline, *batch(ctx.rank // STAGES, number))
                optimizer.step()
                optimizer.zero_grad()
                seen.append(str(optimizer.candidate))
                if number % 5 == 4:
                    pipeline.eval(*([batch(0, 0)[0]] if pipeline.is_first else []))
            optimizer.close()
            weights = {n: p.detach().clone() for n, p in pipeline.module.named_parameters()}
            return seen, optimizer.is_tuned, weights

    found = run_stages(STAGES * PIPELINES, work, tmp_path)
    model = model_of(tied=False).double()
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(len(found[0][0])):
        for pipeline in range(PIPELINES):
            inputs, target = batch(pipeline, number)
            (loss_of(model(inputs), target) / PIPELINES).backward()
        reference.step()
        reference.zero_grad()
    seen, is_tuned, _ = found[0]
    assert is_tuned
    assert set(seen) == {"25 MB, decoupled", "25 MB, all_reduce"}
    assert all(other[:2] == (seen, is_tuned) for other in found)
    for pipeline in range(PIPELINES):
        weights = merged([each[2] for each in found[STAGES * pipeline : STAGES * (pipeline + 1)]])
        for name, value in model.named_parameters():
            assert (weights[name] - value).abs().max() <= 1e-12, name


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_of_a_gradient_that_is_not_finite_lets_all_stages_skip_the_step(
    norm_type: float, tmp_path: Path
) -> None:
    bad_step = 2

    def work(ctx: DistContext) -> dict[str, list[Any]]:
        with pipeline_of(ctx, tied=False, n_microbatches=3) as pipeline:
            weights = list(pipeline.module.parameters())
            if ctx.rank == 1:  # the last stage of the first pipeline
                weights[0].register_hook(lambda g: g * (math.inf if number == bad_step else 1.0))
            optimizer = DistributedOptimizer(
                torch.optim.AdamW(weights, lr=0.01), pipeline, timeout=STAGE_TIMEOUT
            )
            norms, moved = list[float](), list[bool]()
            for number in range(4):
                optimizer.synchronize()
                before = [weight.detach().clone() for weight in weights]
                step(pipeline, *batch_of(ctx.rank // STAGES, number))
                norms.append(optimizer.clip_grad_norm_(CLIP, norm_type).item())
                optimizer.step()
                optimizer.zero_grad()
                optimizer.synchronize()
                moved.append(not all(map(torch.equal, before, weights)))
            optimizer.close()
            return {"norms": norms, "moved": moved}

    for found in run_stages(STAGES * PIPELINES, work, tmp_path):
        assert [math.isfinite(norm) for norm in found["norms"]] == [True, True, False, True]
        assert found["moved"] == [True, True, False, True]


def test_a_lost_replica_is_named_by_its_worker_and_its_rank_in_the_job(tmp_path: Path) -> None:
    """Not by its rank among the replicas of the stage: that is another worker's in the job."""

    noticed = tmp_path / "noticed"

    def work(ctx: DistContext) -> str:
        with pipeline_of(ctx, tied=False, n_microbatches=3) as pipeline:
            weights = pipeline.module.parameters()
            optimizer = DistributedOptimizer(
                torch.optim.AdamW(weights, lr=0.01), pipeline, timeout=STAGE_TIMEOUT
            )

            def lose_rank_2() -> None:
                for number in range(3):
                    step(pipeline, *batch_of(ctx.rank // STAGES, number))
                    if number == 2 and ctx.rank > 0:  # the last stages later: they would fail, too
                        wait_until(lambda: ctx.rank == 2 or noticed.exists(), "not noticed")
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.step()
                    optimizer.zero_grad()

            error = error_of(lose_rank_2, kind=PeerError)
            noticed.touch()
            return error

    found = run_with_failures(STAGES * PIPELINES, work, tmp_path, lost={1, 2, 3})
    assert "lost s0p1 (rank 2) during averaging" in found[0]
