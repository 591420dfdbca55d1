"""Stages pass tensors over NCCL; a lost rank is noticed, and the survivors connect again.

Several ranks share the first GPU: each names another host to NCCL, which then uses sockets.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.errors import PeerError, WorkerError
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.comm.process_groups import abort, new_nccl_group, run_bounded
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.probe.link import PeerChannel, measure_nccl
from polyrhythm.run.probe.probe import ProbeEffort
from tests.gloo.pipelines import (
    gradients,
    merged,
    random_batch,
    run_single_process,
    run_stages,
    stack_of,
)
from tests.gloo.replicas import run_with_failures
from tests.gloo.survivors import KILLED, SURVIVORS, train_with_survivors

pytestmark = [
    pytest.mark.skipif(not torch.cuda.device_count(), reason="this machine has no CUDA device"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL"),
]

DEVICE = torch.device("cuda", 0)
TIMEOUT = 30.0


def name_host(ctx: DistContext) -> None:
    os.environ |= {
        "NCCL_HOSTID": f"host{ctx.rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def single_process_gradients(num_layers: int, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
    model = stack_of(num_layers)
    functional.mse_loss(model(inputs), target).backward()
    return gradients(model)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "bounded:4,2,2,1"])
def test_gradients_over_nccl_match_single_process(schedule: str, tmp_path: Path) -> None:
    inputs, target = random_batch(16, 8)

    def work(ctx: DistContext) -> Any:
        name_host(ctx)
        with Pipeline.from_sequential(
            stack_of(8).to(DEVICE),
            loss_fn=functional.mse_loss,
            n_microbatches=8,
            schedule=schedule,
            timeout=TIMEOUT,
            site="here",
        ) as pipeline:
            assert pipeline._connections is not None
            assert all(box.route.nccl for box in pipeline._connections.gradients_in.values())
            for _ in range(3):
                pipeline.module.zero_grad()
                arguments = (inputs.to(DEVICE),) if pipeline.is_first else ()
                pipeline.step(*arguments, target=target.to(DEVICE), return_outputs=False)
            return {name: g.cpu() for name, g in gradients(pipeline.module).items()}

    found = merged(run_stages(4, work, tmp_path))
    expected = run_single_process(lambda: single_process_gradients(8, inputs, target), tmp_path)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.timeout(120)
def test_sites_are_connected_by_gloo(tmp_path: Path) -> None:
    """Of four stages the first two are one site; the third, on the CPU, has none."""
    inputs, target = random_batch(16, 8)

    def work(ctx: DistContext) -> Any:
        name_host(ctx)
        device = torch.device("cpu") if ctx.rank == 2 else DEVICE
        site = {0: "west", 1: "west", 2: None, 3: "east"}[ctx.rank]
        with Pipeline.from_sequential(
            stack_of(8).to(device),
            loss_fn=functional.mse_loss,
            n_microbatches=4,
            timeout=TIMEOUT,
            site=site,
        ) as pipeline:
            assert pipeline._connections is not None
            inboxes = pipeline._connections.activations_in.values()
            over_nccl = [box.route.nccl is not None for box in inboxes]
            arguments = (inputs,) if pipeline.is_first else ()
            pipeline.step(*arguments, target=target, return_outputs=False)
            return over_nccl, {name: g.cpu() for name, g in gradients(pipeline.module).items()}

    results = run_stages(4, work, tmp_path)
    assert [over_nccl for over_nccl, _ in results] == [[], [True], [False], [False]]
    found = merged(g for _, g in results)
    expected = run_single_process(lambda: single_process_gradients(8, inputs, target), tmp_path)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6)


class WithAuxiliary(nn.Module):
    """Adds an auxiliary loss, whose number travels on the device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        from polyrhythm import add_auxiliary_loss

        hidden: Tensor = self.linear(x)
        return add_auxiliary_loss(hidden, hidden.square().mean())


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    is_counted = target > 0
    return ((output - target).square() * is_counted).sum(), is_counted.sum()


@pytest.mark.timeout(120)
def test_numbers_of_messages_travel_on_the_device(tmp_path: Path) -> None:
    """Auxiliary losses go forward and counts of labels back, without a wait of the host."""
    inputs, target = random_batch(16, 8)

    def run(device: torch.device, site: str | None) -> Any:
        with Pipeline.from_sequential(
            nn.Sequential(WithAuxiliary(), nn.Linear(8, 8), nn.Linear(8, 8)).to(device),
            loss_fn=counted_loss,
            n_microbatches=4,
            timeout=TIMEOUT,
            site=site,
        ) as pipeline:
            arguments, losses = (inputs.to(device),) if pipeline.is_first else (), list[Tensor]()
            pipeline.step(*arguments, target=target.to(device), losses=losses)
            found = {name: g.cpu() for name, g in gradients(pipeline.module).items()}
            return found, [loss.item() for loss in losses]

    def work(ctx: DistContext) -> Any:
        name_host(ctx)
        torch.manual_seed(0)
        over_nccl = run(DEVICE, "here")
        torch.manual_seed(0)
        return over_nccl, run(torch.device("cpu"), None)

    for over_nccl, over_gloo in run_stages(2, work, tmp_path):
        torch.testing.assert_close(over_nccl, over_gloo, rtol=0, atol=1e-5)


@pytest.mark.timeout(120)
def test_a_killed_stage_ends_the_others_in_time(tmp_path: Path) -> None:
    """The kernel that waits for it ends, and the host with it."""

    def work(ctx: DistContext) -> None:
        name_host(ctx)
        with ctx.process_group(TIMEOUT):
            inputs, target = (t.to(DEVICE) for t in random_batch(16, 8))
            pipeline = Pipeline.from_sequential(
                stack_of(3).to(DEVICE),
                loss_fn=functional.mse_loss,
                n_microbatches=4,
                timeout=TIMEOUT,
                site="here",
            )
            start = time.monotonic()
            try:
                for step in range(1000):
                    if ctx.rank == 1 and step == 5:
                        os.kill(os.getpid(), signal.SIGKILL)
                    arguments = (inputs,) if pipeline.is_first else ()
                    pipeline.step(*arguments, target=target, return_outputs=False)
                    torch.cuda.synchronize()
            except PeerError:
                (tmp_path / f"lost{ctx.rank}").write_text(f"{time.monotonic() - start}")
                raise

    with (
        pytest.raises(WorkerError, match="rank 1"),
        LocalJob(work, 3, output_folder=tmp_path) as job,
    ):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(list(tmp_path.glob("lost*"))) < 2:
            time.sleep(0.2)
        job.wait(20.0)
    assert {path.name for path in tmp_path.glob("lost*")} == {"lost0", "lost2"}
    assert all(float(path.read_text()) < TIMEOUT for path in tmp_path.glob("lost*"))


@pytest.mark.timeout(120)
def test_survivors_of_a_killed_rank_connect_again(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        name_host(ctx)
        with ctx.process_group(TIMEOUT):
            torch.cuda.set_device(DEVICE)
            group = new_nccl_group(range(3), "a test", timeout=TIMEOUT)
            assert group is not None
            numbers = torch.full((2**20,), float(ctx.rank + 1), device=DEVICE)
            group.allreduce([numbers]).wait()
            torch.cuda.synchronize()
            if ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1.0)
            with pytest.raises(PeerError):
                group.allreduce([numbers]).wait()
                run_bounded(torch.cuda.synchronize, timeout=3.0, action="a test")
            abort(group)
            torch.cuda.synchronize()
            group = new_nccl_group([0, 2], "survivors", timeout=TIMEOUT)
            assert group is not None
            numbers = torch.full((2**20,), float(ctx.rank + 1), device=DEVICE)
            group.allreduce([numbers]).wait()
            (tmp_path / f"sum{ctx.rank}").write_text(str(numbers.mean().item()))
            abort(group)
            time.sleep(1.0)

    with LocalJob(work, 3, output_folder=tmp_path) as job:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(list(tmp_path.glob("sum*"))) < 2:
            time.sleep(0.2)
            assert job is not None
    assert {path.name: path.read_text() for path in tmp_path.glob("sum*")} == {
        "sum0": "4.0",
        "sum2": "4.0",
    }


@pytest.mark.timeout(120)
def test_survivors_of_a_killed_replica_average_again_over_nccl(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[list[str], dict[str, Tensor]]:
        name_host(ctx)
        torch.cuda.set_device(DEVICE)
        return train_with_survivors(ctx, DEVICE, "here")

    found = run_with_failures(3, work, tmp_path, lost={KILLED}, timeout=90.0)
    (errors, weights), (_, others) = (found[rank] for rank in SURVIVORS)
    assert len(errors) == 1
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("mode", ["hierarchical", "hierarchical_all_reduce", "decoupled"])
def test_replicas_of_two_sites_match_single_process(mode: Any, tmp_path: Path) -> None:
    """NCCL inside each site of two, gloo between them."""
    num_ranks, num_steps = 4, 4

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        return random_batch(4, 8, seed=10 * step + rank)

    def work(ctx: DistContext) -> dict[str, Tensor]:
        name_host(ctx)
        torch.cuda.set_device(DEVICE)
        model = stack_of(4).to(DEVICE)
        optimizer = DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            model,
            bucket_bytes=600,
            mode=mode,
            site=f"site {ctx.rank // 2}",
            timeout=TIMEOUT,
        )
        for step in range(num_steps):
            inputs, target = (t.to(DEVICE) for t in batch(ctx.rank, step))
            functional.mse_loss(model(inputs), target).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return {name: p.detach().cpu() for name, p in model.named_parameters()}

    def train_alone() -> dict[str, Tensor]:
        model = stack_of(4)
        reference = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(num_steps):
            for rank in range(num_ranks):
                inputs, target = batch(rank, step)
                (functional.mse_loss(model(inputs), target) / num_ranks).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            reference.step()
            reference.zero_grad()
        return {name: p.detach() for name, p in model.named_parameters()}

    expected = run_single_process(train_alone, tmp_path)
    for found in run_stages(num_ranks, work, tmp_path, timeout=120):
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-5)


@pytest.mark.timeout(120)
def test_probe_measures_a_pair_over_nccl(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        name_host(ctx)
        with ctx.process_group(TIMEOUT):
            channel = PeerChannel(rank=ctx.rank, world_size=2, timeout=TIMEOUT)
            for source, target in ((0, 1), (1, 0)):
                found = measure_nccl(channel, source, target, DEVICE, ProbeEffort(repeat=3))
                assert found is not None
                if ctx.rank == source:
                    assert 1e-6 < found.median < 1.0, "seconds"
                else:
                    assert 1e7 < found.median < 1e13, "bytes per second"

    with LocalJob(work, 2, output_folder=tmp_path) as job:
        assert job.wait(100)
