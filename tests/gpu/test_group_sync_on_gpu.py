"""GroupSync averages models and gradients on a GPU through host memory, with exact results.

Gradients are written late, behind a kernel that keeps the GPU busy: an average that does not wait
for them would send the old contents of the buffer.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyrhythm.run.averaging import buffers
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import run_single_process
from tests.gloo.replicas import TIMEOUT, run_replicas

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)

WIDTH, MICROBATCHES, STEPS, LR = 32, 2, 4, 0.05
BUSY = 10_000_000  # clock cycles: some 5 ms


@pytest.mark.timeout(120)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_models_are_equal_after_average_all(
    dtype: torch.dtype, overlap: bool, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(ctx.rank)
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to("cuda", dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with GroupSync(
            model, optimizer, "age", overlap=overlap, state="average", timeout=TIMEOUT
        ) as sync:
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.randn(8, 64, device="cuda", dtype=dtype)).square().mean().backward()
                optimizer.step()
                sync.step()
            sync.average_all()
        assert all(p.is_cuda for p in model.parameters())
        assert all(m["exp_avg"].is_cuda for m in optimizer.state.values())
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return weights.cpu(), model[1].running_mean.cpu()

    found = run_replicas(3, work, tmp_path)
    for weights, mean in found:
        assert torch.equal(weights, found[0][0])
        assert torch.equal(mean, found[0][1])
        assert weights.isfinite().all()


@pytest.mark.timeout(120)
def test_gradients_on_gpu_are_averaged_before_step(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[float]:
        model = nn.Linear(1, 1, bias=False).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with GroupSync(model, optimizer, "all_reduce", timeout=TIMEOUT):
            model(torch.tensor([1.0 + 2 * ctx.rank], device="cuda")).sum().backward()
            optimizer.step()
        return model.weight.grad.flatten().tolist()

    assert run_replicas(2, work, tmp_path) == [[2.0], [2.0]]


class Late(torch.autograd.Function):
    """The identity, whose gradient is written late: the GPU is busy first."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if gradient.is_cuda:
            torch.cuda._sleep(BUSY)
        return gradient.clone()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.norm(Late.apply(self.linear(inputs))))


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Layer() for _ in range(3))).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    shape = MICROBATCHES * 8, WIDTH
    inputs, target = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    return inputs, target


def loss_sum(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over some of the targets, without waiting for the GPU."""
    is_label = target > -0.5
    return ((output - target).square() * is_label).sum(), is_label.sum()


def backward(model: nn.Module, rank: int, step: int, device: str) -> float:
    """Run all micro-batches; return the number of labels."""
    total = 0.0
    for inputs, target in zip(*(t.chunk(MICROBATCHES) for t in batch(rank, step)), strict=True):
        loss, num = loss_sum(model(inputs.to(device)), target.to(device))
        loss.backward()
        total += float(num)
    return total


def single_process() -> Tensor:
    """Train one model on the CPU, on the micro-batches of both replicas."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        total = sum(backward(model, rank, step, "cpu") for rank in range(2))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= total
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


@contextlib.contextmanager
def open_pipeline(ctx: DistContext, model: nn.Sequential) -> Iterator[Pipeline]:
    groups = [dist.new_group([rank]) for rank in range(ctx.world_size)]
    with Pipeline.from_sequential(
        model.to("cuda"),
        loss_fn=loss_sum,
        process_group=groups[ctx.rank],
        pipeline=ctx.rank,
        n_microbatches=MICROBATCHES,
        timeout=TIMEOUT,
    ) as pipeline:
        yield pipeline


def use_small_buckets() -> None:
    buffers._FIRST_BUCKET, buffers._BUCKET = 256, 4096


@pytest.mark.timeout(240)
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("policy", ["all_reduce", "balanced"])
def test_gradients_of_a_pipeline_on_gpu_equal_single_process(
    policy: str, own_stream: bool, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> dict[str, Any]:
        use_small_buckets()
        streamed, pinned = [], []
        if own_stream:
            torch.cuda.set_stream(torch.cuda.Stream())
        with open_pipeline(ctx, layers()) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=LR)
            with GroupSync(pipeline, optimizer, policy, timeout=TIMEOUT) as sync:
                for step in range(STEPS):
                    if policy == "balanced":
                        sync.share(2 * MICROBATCHES)
                    inputs, target = (tensor.to("cuda") for tensor in batch(ctx.rank, step))
                    pipeline.step(inputs, target=target)
                    streamed.append(sync._strategy._filling is not None)
                    optimizer.step()
                    sync.step()
                    optimizer.zero_grad()
                    pinned.append(sync.pinned_bytes)
            weights = weights_of(pipeline.module)
            norms = (m for m in pipeline.module.modules() if isinstance(m, nn.BatchNorm1d))
            statistics = torch.cat([norm.running_mean.cpu() for norm in norms])
        return {"streamed": streamed, "pinned": pinned, "weights": weights, "means": statistics}

    first, second = run_replicas(2, work, tmp_path)
    expected = run_single_process(single_process, tmp_path)
    assert first["streamed"] == second["streamed"] == [True] * STEPS
    nbytes = expected.nbytes
    for size in first["pinned"]:
        assert 2 * nbytes < size < 5 * nbytes + 2**15  # rounded up to powers of two
    torch.testing.assert_close(first["weights"], expected, rtol=0, atol=1e-6)
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["means"], second["means"])


@pytest.mark.timeout(240)
def test_gradients_of_a_plain_loop_on_gpu_equal_single_process(tmp_path: Path) -> None:
    """Two backwards accumulate before the average, which counts the micro-batches of both."""

    def work(ctx: DistContext) -> tuple[Tensor, Tensor]:
        use_small_buckets()
        model = layers().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with GroupSync(model, optimizer, "all_reduce", timeout=TIMEOUT) as sync:
            for step in range(STEPS):
                for number in range(2):
                    inputs, target = (t.to("cuda") for t in batch(ctx.rank, 2 * step + number))
                    (model(inputs) - target).square().mean().backward()
                own = torch.cat(
                    [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                )
                own = own.cpu() if step == STEPS - 1 else own
                optimizer.step()
                mean = torch.cat(
                    [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                )
                sync.step()
                optimizer.zero_grad()
            assert all(p.is_cuda for p in model.parameters())
        return own, mean.cpu()

    (first, mean), (second, same) = run_replicas(2, work, tmp_path)
    torch.testing.assert_close(mean, (first + second) / 2, rtol=0, atol=1e-12)
    assert torch.equal(mean, same)


@pytest.mark.timeout(120)
def test_backward_on_gpu_does_not_wait_for_the_exchange(tmp_path: Path) -> None:
    """The host returns from the step while the GPU still computes; then the mean is right."""

    def work(ctx: DistContext) -> tuple[list[bool], Tensor, Tensor]:
        use_small_buckets()
        is_busy = []
        with open_pipeline(ctx, layers()) as pipeline:
            parameters = [p for p in pipeline.module.parameters() if p.numel() > 3]
            optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.0)
            inputs, target = (tensor.to("cuda") for tensor in batch(ctx.rank, 0))
            with GroupSync(pipeline, optimizer, "all_reduce", timeout=TIMEOUT):
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    torch.cuda.synchronize()
                    torch.cuda._sleep(20 * BUSY)
                    pipeline.step(inputs, target=target)
                    is_busy.append(not torch.cuda.current_stream().query())
                    own = torch.cat([p.grad.flatten() for p in parameters]).clone()
                    optimizer.step()
                    mean = torch.cat([p.grad.flatten() for p in parameters])
        num = float(loss_sum(target, target)[1])
        return is_busy[1:], torch.cat([own.cpu(), own.new_tensor([num]).cpu()]), mean.cpu()

    (busy, first, mean), (_, second, same) = run_replicas(2, work, tmp_path)
    assert all(busy), "the host has waited for the GPU"  # the first step allocates
    total = first + second
    torch.testing.assert_close(mean, total[:-1] / total[-1], rtol=0, atol=1e-9)
    assert torch.equal(mean, same)


@pytest.mark.timeout(120)
def test_infinite_gradient_on_one_gpu_replica_skips_the_step_on_all(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[list[float], Tensor]:
        use_small_buckets()
        scaler, scales = torch.amp.GradScaler("cuda", init_scale=1024.0), []
        model = layers().float().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        with GroupSync(model, optimizer, "all_reduce", timeout=TIMEOUT) as sync:
            for step in range(3):
                inputs, target = (t.float().to("cuda") for t in batch(ctx.rank, step))
                loss = (model(inputs) - target).square().mean()
                scaler.scale(loss * (torch.inf if ctx.rank == 1 == step else 1.0)).backward()
                sync.average_gradients()
                scaler.step(optimizer)
                scaler.update()
                sync.step()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
        return scales, weights_of(model)

    (scales, weights), (others, same) = run_replicas(2, work, tmp_path)
    assert scales == others == [1024.0, 512.0, 512.0]
    assert torch.equal(weights, same)
    assert weights.isfinite().all()
