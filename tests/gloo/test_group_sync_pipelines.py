"""Pipelines whose stages synchronise separately, each with its replicas in other pipelines."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import PolicyError
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.parameter_server import ParameterServer
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync import modes
from polyrhythm.types import Worker
from tests.gloo.pipelines import STAGE_TIMEOUT, random_batch, run_stages, stack_of, step
from tests.gloo.replicas import TIMEOUT, Point, run_replicas, target_of

STAGES, PIPELINES, STEPS = 2, 2, 10


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def pipeline_of(ctx: DistContext, **options: object) -> Pipeline:
    groups = [dist.new_group([STAGES * p + s for s in range(STAGES)]) for p in range(PIPELINES)]
    return Pipeline.from_sequential(
        stack_of(STAGES, seed=3 + ctx.rank // STAGES),
        loss_fn=loss,
        process_group=groups[ctx.rank // STAGES],
        pipeline=ctx.rank // STAGES,
        timeout=STAGE_TIMEOUT,
        **options,
    )


@pytest.mark.parametrize("policy", ["all_reduce", "adaptive", "age", "smart"])
def test_pipedream_stages_average_independently(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stages that wait for each other's groups must end that wait before their pipeline times out.
    monkeypatch.setattr(modes, "MAX_GROUP_WAIT", STAGE_TIMEOUT / 10)

    def work(ctx: DistContext) -> tuple[str, int, torch.Tensor]:
        options = {"schedule": "1f1b", "flush": False, "n_microbatches": 1}
        with pipeline_of(ctx, **options) as pipeline:
            optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.05)
            with GroupSync(pipeline, optimizer, policy, timeout=TIMEOUT) as sync:
                for number in range(STEPS):
                    inputs, target = random_batch(4, 8, seed=100 * ctx.rank // STAGES + number)
                    step(pipeline, inputs, target)
                    if pipeline.has_gradients:
                        optimizer.step()
                        sync.step()
                        optimizer.zero_grad()
                for _ in pipeline.drain():
                    optimizer.step()
                    sync.step()
                    optimizer.zero_grad()
                sync.average_all()
                weights = torch.cat([p.detach().flatten() for p in pipeline.module.parameters()])
                return str(sync.worker), sync.num_steps, weights

    found = run_stages(STAGES * PIPELINES, work, tmp_path)
    assert [worker for worker, _, _ in found] == ["s0p0", "s1p0", "s0p1", "s1p1"]
    assert [num for _, num, _ in found] == [STEPS] * 4
    for stage in range(STAGES):
        assert torch.equal(found[stage][2], found[STAGES + stage][2])
    assert not torch.equal(found[0][2], found[1][2])


def test_overlap_does_not_change_where_stages_may_wait_for_one_another(tmp_path: Path) -> None:
    """The scheduler would take workers that run ahead for a deadlock."""

    def work(ctx: DistContext) -> bool:
        with pipeline_of(ctx, schedule="1f1b", n_microbatches=2) as pipeline:
            optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.05)
            with GroupSync(
                pipeline, optimizer, "random", options={"group_size": 2}, timeout=TIMEOUT
            ) as sync:
                with pytest.raises(PolicyError, match="overlap=True after the start"):
                    sync.overlap = True
                sync.overlap = False
                return sync.overlap

    assert run_stages(STAGES * PIPELINES, work, tmp_path) == [False] * 4


def test_pipelines_with_parameter_server_match_hetpipe(tmp_path: Path) -> None:
    """The server is a fifth process; staleness is the number of stages."""

    def work(ctx: DistContext) -> torch.Tensor:
        groups = [dist.new_group([STAGES * p + s for s in range(STAGES)]) for p in range(PIPELINES)]
        if ctx.rank == STAGES * PIPELINES:
            server = ParameterServer(num_stages=STAGES, num_pipelines=PIPELINES, timeout=TIMEOUT)
            server.serve()
            assert server.lost == []
            return torch.empty(0)
        number = ctx.rank // STAGES
        pipeline = Pipeline.from_sequential(
            stack_of(STAGES, seed=3),
            loss_fn=loss,
            n_microbatches=2,
            schedule="1f1b",
            process_group=groups[number],
            pipeline=number,
            timeout=STAGE_TIMEOUT,
        )
        optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.05)
        with (
            pipeline,
            GroupSync(pipeline, optimizer, "ssp", num_pipelines=PIPELINES, timeout=TIMEOUT) as sync,
        ):
            for i in range(STEPS):
                inputs, target = random_batch(4, 8, seed=100 * number + i)
                step(pipeline, inputs, target)
                optimizer.step()
                sync.step()
                optimizer.zero_grad()
            sync.average_all()
            return torch.cat([p.detach().flatten() for p in pipeline.module.parameters()])

    found = run_stages(STAGES * PIPELINES + 1, work, tmp_path)
    for stage in range(STAGES):
        assert torch.equal(found[stage], found[STAGES + stage])


def test_synchronous_parameter_server_averages_updates(tmp_path: Path) -> None:
    """With staleness 0, a step changes the server's weights by the mean of the workers' updates."""

    def work(ctx: DistContext) -> list[torch.Tensor]:
        workers = dist.new_group([0, 1, 2])
        if ctx.rank == 3:
            ParameterServer(num_pipelines=3, timeout=TIMEOUT).serve()
            return []
        model, seen = Point(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        with GroupSync(
            model,
            optimizer,
            "ssp",
            options={"staleness": 0},
            num_pipelines=3,
            timeout=TIMEOUT,
        ) as sync:
            for _ in range(4):
                optimizer.zero_grad()
                model(target_of(ctx.rank)).backward()
                optimizer.step()
                sync.step()
                seen.append(model.weight.detach().clone())
                dist.barrier(workers)  # else a worker could pull another's next push
        return seen

    found = run_replicas(4, work, tmp_path)
    mean = torch.stack([target_of(rank) for rank in range(3)]).mean(0)
    for number in range(4):
        for seen in found[:3]:
            torch.testing.assert_close(seen[number], mean * (1 - 0.8 ** (number + 1)))


def test_stages_may_have_different_optimizers(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        with pipeline_of(ctx, schedule="1f1b", n_microbatches=1) as pipeline:
            kind = torch.optim.Adam if pipeline.is_first else torch.optim.SGD
            optimizer = kind(pipeline.module.parameters(), lr=0.05)
            with GroupSync(pipeline, optimizer, "age", timeout=TIMEOUT) as sync:
                sync.average_all()
                return str(sync.worker)

    assert run_stages(4, work, tmp_path) == ["s0p0", "s1p0", "s0p1", "s1p1"]


def test_process_group_of_one_stage_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        replicas = [dist.new_group([s + STAGES * p for p in range(PIPELINES)]) for s in range(2)]
        with pipeline_of(ctx, schedule="1f1b", n_microbatches=1) as pipeline:
            optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.05)
            group, found = replicas[ctx.rank % STAGES], set()
            for worker in (None, Worker(ctx.rank % STAGES, ctx.rank // STAGES)):
                with pytest.raises(PolicyError) as caught:
                    GroupSync(pipeline, optimizer, "age", process_group=group, worker=worker)
                found.add(caught.value.wrong)
        (wrong,) = found
        return wrong

    for rank, wrong in enumerate(run_stages(4, work, tmp_path)):
        first, stage = rank // STAGES * STAGES, rank % STAGES
        ranks = f"the ranks [{first}, {first + 1}] in a process group of [{stage}, {stage + 2}]"
        assert wrong == f"a Pipeline on {ranks}"
