"""A first step that takes longer than the timeout, as a compilation may, is no lost peer."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from polyrhythm.errors import PeerError
from polyrhythm.processes import PEER_LOST
from polyrhythm.run.comm import process_groups
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.comm.process_groups import NUM_FIRST_STEPS, new_gloo_group
from polyrhythm.run.pipeline import transport
from polyrhythm.run.pipeline.partition import linear_wiring
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.pipelines import run_stages
from tests.gloo.trainer_jobs import plan_of, run_job, samples
from tests.grids import long_except

TIMEOUT = 2.0
COMPILES = 5.0


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", gradient: Tensor) -> Tensor:
        time.sleep(COMPILES)
        return gradient


class Compiling(nn.Module):
    """Its call number `slow` takes longer than the timeout, in the forward or the backward."""

    def __init__(self, where: str, slow: int) -> None:
        super().__init__()
        self._where, self._slow, self._num_calls = where, slow, 0

    def forward(self, x: Tensor) -> Tensor:
        self._num_calls += 1
        if self._num_calls != self._slow:
            return x
        if self._where == "backward":
            return SlowBackward.apply(x)
        time.sleep(COMPILES)
        return x


def trainer_of(num_stages: int, sync: str, where: str, slow: int) -> Trainer:
    layer = Compiling(where, slow)

    def model() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(8, 16),
            nn.Sequential(nn.Tanh(), layer),
            nn.Linear(16, 16),
            nn.Sequential(nn.Tanh(), layer),
            nn.Linear(16, 4),
        )

    return Trainer(
        model,
        mse_loss,
        partial(torch.optim.AdamW, lr=1e-2),
        samples(),
        batch_size=12,
        microbatch_size=6 if num_stages == 2 else 3,
        plan=plan_of(num_stages, 2 // num_stages),
        clip_grad_norm=1.0,
        sync=sync,
        timeout=TIMEOUT,
    )


CASES = [(2, "decoupled"), (1, "decoupled"), (1, "all_reduce")]
FIRST_STEPS = [
    (*case, where, slow_rank)
    for case in CASES
    for where in ("forward", "backward")
    for slow_rank in (0, 1)
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("num_stages", "sync", "where", "slow_rank"), long_except(FIRST_STEPS, 8))
def test_long_first_step_is_waited_for(
    num_stages: int, sync: str, where: str, slow_rank: int, tmp_path: Path
) -> None:
    def work(ctx: DistContext | None) -> tuple[int, float]:
        assert ctx is not None
        slow = 1 if ctx.rank == slow_rank else 0
        start = time.monotonic()
        with trainer_of(num_stages, sync, where, slow) as trainer:
            trainer.fit(max_steps=5, progress=False)
            return trainer.global_step, time.monotonic() - start

    for num_steps, seconds in run_job(2, work, tmp_path):
        assert num_steps == 5
        assert seconds > COMPILES


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("num_stages", "sync"), CASES)
def test_long_later_step_is_a_lost_peer(num_stages: int, sync: str, tmp_path: Path) -> None:
    num_calls = 2 * (2 // num_stages)  # in a step: two micro-batches, and layers on a stage

    def work(ctx: DistContext) -> None:
        slow = 3 * num_calls + 1 if ctx.rank else 0
        with trainer_of(num_stages, sync, "forward", slow) as trainer:
            trainer.fit(max_steps=6, progress=False)

    with LocalJob(work, 2, output_folder=tmp_path) as job:
        assert job._workers[0].wait(60) == PEER_LOST, job._workers[0].reason


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("num_stages", "sync"), CASES)
def test_process_that_dies_in_its_first_step_is_noticed_at_once(
    num_stages: int, sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process_groups.FIRST_STEP_TIMEOUT > 600
    monkeypatch.setattr(process_groups, "FIRST_STEP_TIMEOUT", 1e4)

    def work(ctx: DistContext) -> None:
        if ctx.rank == 1:
            trainer = trainer_of(num_stages, sync, "forward", 0)

            def kill(*_: object) -> None:
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

            trainer.model.register_forward_pre_hook(kill)
            trainer.fit(max_steps=5, progress=False)
        with pytest.raises(PeerError), trainer_of(num_stages, sync, "forward", 0) as trainer:
            trainer.fit(max_steps=5, progress=False)

    with LocalJob(work, 2, output_folder=tmp_path) as job:
        survivor, victim = job._workers
        assert victim.wait(40) == -signal.SIGKILL
        killed = time.monotonic()
        assert survivor.wait(30) == 0, survivor.reason
        assert time.monotonic() - killed < 25


def test_nccl_between_stages_has_the_timeouts_of_gloo(tmp_path: Path) -> None:
    """NCCL's own watchdog aborts a group after the group's timeout, also while a peer compiles."""

    def work(ctx: DistContext) -> list[list[float]]:
        timeouts = dict[dist.ProcessGroup, float]()

        def new_group(ranks: range, what: str, *, timeout: float, is_used: bool) -> object:
            return new_gloo_group(ranks, what, timeout=timeout) if is_used else None

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(transport, "new_nccl_group", new_group)
            monkeypatch.setattr(transport, "connect_pairs", lambda *_, **__: None)
            monkeypatch.setattr(transport, "set_timeout", timeouts.__setitem__)
            connections = transport.Connections(
                range(ctx.world_size),
                ctx.rank,
                linear_wiring(ctx.rank, ctx.world_size),
                device=torch.device("cpu"),
                pipeline=0,
                timeout=TIMEOUT,
                site="here",
            )
            groups = [connections.control, *connections._nccl_groups]
            assert len(groups) == 3
            found = []
            for num_done in range(NUM_FIRST_STEPS + 1):
                connections.set_step_timeout(num_done)
                found.append([timeouts.get(group, 0.0) for group in groups])
            connections.close()
        return found

    for found in run_stages(2, work, tmp_path):
        *first, later = found
        assert first == NUM_FIRST_STEPS * [3 * [process_groups.FIRST_STEP_TIMEOUT]]
        assert later == 3 * [TIMEOUT]
