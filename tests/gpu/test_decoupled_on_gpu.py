"""DistributedOptimizer on a GPU averages buckets exactly as it does in main memory.

Gradients are written late, behind a kernel that keeps the GPU busy: a collective that does not wait
for them sends the old contents.
"""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from polyrhythm.run.comm.comm_thread import CommThread
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.comm.reduce_scatter import (
    Collectives,
    GlooCollectives,
    NcclCollectives,
    Pending,
    PinnedCollectives,
    select_backend,
)
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer, StepClock
from polyrhythm.sync.fusion.tuner import BucketCandidate, BucketMode
from tests.gloo.pipelines import run_single_process, run_stages

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)

NUM_BUCKETS, NUM_STEPS, SIZE, TIMEOUT = 3, 3, 2**21, 30.0
BUSY = 100_000_000  # clock cycles: some 50 ms
WIDTH = 64


class Staged:
    """PinnedCollectives over gloo with their CommThread; both workers use the first GPU."""

    def __init__(self, ctx: DistContext) -> None:
        self.device = torch.device("cuda", 0)
        group = new_gloo_group(range(ctx.world_size), "a test", timeout=TIMEOUT)
        self.comm_thread = CommThread([group], timeout=TIMEOUT)
        host = GlooCollectives(group, timeout=TIMEOUT)
        assert dist.group.WORLD is not None
        found = select_backend(self.device, None, host, start=self.comm_thread.start)
        assert isinstance(found, PinnedCollectives)
        self.collectives = found

    def start(self, pending: Pending) -> Callable[[], None]:
        """Wait for a collective in the thread; return a wait of the current stream for it."""
        work = self.comm_thread.start(pending.wait)

        def wait() -> None:
            work.wait()
            pending.join()

        return wait

    def __enter__(self) -> "Staged":
        return self

    def __exit__(self, *error: object) -> None:
        self.comm_thread.close()


def numbers(device: torch.device) -> Tensor:
    """Return small integers: their sums and halves are exact in every dtype."""
    return torch.arange(SIZE, device=device) % 32


def write_late(flat: Tensor, values: Tensor) -> None:
    """Write `values`, which must be on the GPU already: a copy from the host would wait."""
    torch.cuda._sleep(BUSY)
    flat.copy_(values)


def is_busy() -> bool:
    return not torch.cuda.current_stream().query()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_pinned_collectives_overlap_compute(
    dtype: torch.dtype, own_stream: bool, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> dict[str, Any]:
        same: list[bool] = []
        overlapped: list[bool] = []
        with Staged(ctx) as staged:
            if own_stream:
                torch.cuda.set_stream(torch.cuda.Stream(staged.device))
            collectives, start = staged.collectives, staged.start
            base, half = numbers(staged.device), SIZE // 2
            own = slice(ctx.rank * half, (ctx.rank + 1) * half)
            buckets = [torch.zeros(SIZE, dtype=dtype, device="cuda") for _ in range(NUM_BUCKETS)]
            for step in range(NUM_STEPS):
                works = []
                for number, flat in enumerate(buckets):
                    write_late(flat, base + 4 * ctx.rank + 2 * step + number)
                    works.append(start(collectives.reduce_scatter(flat, number)))
                    overlapped.append(is_busy())
                for number, (flat, wait) in enumerate(zip(buckets, works, strict=True)):
                    wait()
                    same.append(
                        torch.equal(flat[own], (base + 2 + 2 * step + number).to(dtype)[own])
                    )
                works = []
                for number, flat in enumerate(buckets):
                    write_late(flat[own], (base + step + number)[own])
                    works.append(start(collectives.all_gather(flat, number)))
                    overlapped.append(is_busy())
                for number, (flat, wait) in enumerate(zip(buckets, works, strict=True)):
                    wait()
                    same.append(torch.equal(flat, (base + step + number).to(dtype)))
        # The first step allocates the buffers, which may be slow.
        return {"same": all(same), "overlapped": all(overlapped[2 * NUM_BUCKETS :])}

    assert run_stages(2, work, tmp_path) == [{"same": True, "overlapped": True}] * 2


@pytest.mark.timeout(120)
def test_all_gather_from_comm_thread_has_the_means(tmp_path: Path) -> None:
    """A plain all-reduce runs while the default stream is busy with later work."""

    def work(ctx: DistContext) -> tuple[bool, bool]:
        with Staged(ctx) as staged:
            collectives, base = staged.collectives, numbers(staged.device)
            flat = torch.zeros(SIZE, device="cuda")
            for step in range(NUM_STEPS):
                write_late(flat, base + 2 * ctx.rank + step)
                scatter = collectives.reduce_scatter(flat, 0)
                torch.cuda._sleep(20 * BUSY)

                gathers: list[Pending] = []

                def both(scatter: Any = scatter, gathers: list[Pending] = gathers) -> None:
                    scatter.wait()
                    scatter.join()
                    gathers.append(collectives.all_gather(flat, 0))
                    gathers[0].wait()

                staged.comm_thread.start(both).wait()
                overlapped = is_busy()
                gathers[0].join()
                same = torch.equal(flat, (base + 1 + step).float())
        return same, overlapped

    assert run_stages(2, work, tmp_path) == [(True, True)] * 2


@pytest.mark.timeout(120)
def test_pinned_buffers_are_reused_only_when_free(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> dict[str, bool]:
        with Staged(ctx) as staged:
            collectives, base = staged.collectives, numbers(staged.device)
            half = SIZE // 2
            own = slice(ctx.rank * half, (ctx.rank + 1) * half)
            pinned = []
            for _ in range(3):
                staged.start(collectives.reduce_scatter(base.float(), 0))()
                pinned.append(collectives.pinned_bytes)
            flats = [torch.zeros(SIZE, device="cuda") for _ in range(3)]
            works = []
            for step, flat in enumerate(flats):  # with the same number, all in flight
                write_late(flat, base + 2 * ctx.rank + step)
                works.append(staged.start(collectives.reduce_scatter(flat, 0)))
            for wait in works:
                wait()
            right = [
                torch.equal(flat[own], (base + 1 + step).float()[own])
                for step, flat in enumerate(flats)
            ]
        return {
            "again": pinned == [4 * SIZE] * 3,  # half of a bucket to send, half to receive
            "not before": all(right),
        }

    assert run_stages(2, work, tmp_path) == [{"again": True, "not before": True}] * 2


def new_nccl_group(ctx: DistContext) -> dist.ProcessGroup:
    """Make a group that sends tensors on GPUs over NCCL; several workers may share a GPU."""
    os.environ |= {
        "NCCL_HOSTID": str(ctx.rank),  # NCCL refuses two workers of one machine on one GPU
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    torch.cuda.set_device(ctx.rank % torch.cuda.device_count())
    group = dist.new_group(list(range(ctx.world_size)), backend="cpu:gloo,cuda:nccl")
    assert isinstance(group, dist.ProcessGroup)
    return group


def nccl(ctx: DistContext) -> Collectives:
    group = new_nccl_group(ctx)
    host = GlooCollectives(
        new_gloo_group(range(ctx.world_size), "a test", timeout=TIMEOUT), timeout=TIMEOUT
    )
    device = torch.device("cuda", torch.cuda.current_device())
    found = select_backend(device, group, host, start=lambda work: None)
    assert isinstance(found, NcclCollectives)
    assert not found.waits_on_host
    return found


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_nccl_collectives_overlap_compute(
    num_workers: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> dict[str, Any]:
        collectives = nccl(ctx)
        device = torch.device("cuda", torch.cuda.current_device())
        base, part = numbers(device), SIZE // num_workers
        own = slice(ctx.rank * part, (ctx.rank + 1) * part)
        flat = torch.zeros(SIZE, dtype=dtype, device=device)
        same, overlapped = [], []
        for step in range(NUM_STEPS):
            write_late(flat, base + 2 * ctx.rank + step)
            collectives.reduce_scatter(flat, 0).wait()
            overlapped.append(is_busy())
            mean = (base + (num_workers - 1) + step).to(dtype)
            same.append(torch.equal(flat[own], mean[own]))
            write_late(flat[own], (base + step)[own])
            collectives.all_gather(flat, 0).wait()
            overlapped.append(is_busy())
            same.append(torch.equal(flat, (base + step).to(dtype)))
            write_late(flat, base + 2 * ctx.rank + step)
            pending = [
                collectives.reduce_scatter(flat, 0),
                collectives.all_gather(flat, 0),
            ]  # without a wait in between
            for half in pending:
                half.wait()
            same.append(torch.equal(flat, mean))
        # The first collective connects all workers.
        return {"same": all(same), "overlapped": all(overlapped[2:])}

    expected = {"same": True, "overlapped": True}
    assert run_stages(num_workers, work, tmp_path) == [expected] * num_workers


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_that_are_not_finite_change_no_weight_over_nccl(
    momentum: float, tmp_path: Path
) -> None:
    """Without momentum gradients of 0 change nothing; with it, a fused optimizer skips the step."""

    def work(ctx: DistContext) -> dict[str, Any]:
        group = new_nccl_group(ctx)
        model = nn.Linear(4, 4, bias=False, device="cuda")
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, fused=momentum > 0)
        optimizer = DistributedOptimizer(inner, model, 1000, group, mode="decoupled")
        weights = [model.weight.detach().clone()]
        for step in range(3):
            inputs = torch.ones(2, 4, device="cuda")
            if (step, ctx.rank) == (1, 1):
                inputs[0, 0] = torch.inf
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.synchronize()
            optimizer.zero_grad()
            weights.append(model.weight.detach().clone())
        optimizer.close()
        moved = [(b - a).abs().amax().item() for a, b in pairwise(weights)]
        return {"moved": moved, "weights": weights[-1].cpu()}

    first, second = run_stages(2, work, tmp_path)
    assert torch.equal(first["weights"], second["weights"])
    for found in (first, second):
        # lr x 2 samples; step 1 is skipped.
        assert found["moved"] == pytest.approx([0.2, 0.0, 0.2 * (1 + momentum)])


def stack() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).to("cuda:0")


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


def train(
    ctx: DistContext, name: str, bucket_bytes: int | None, mode: str = "decoupled"
) -> dict[str, Tensor]:
    """Run ten steps; with DDP if `bucket_bytes` is None."""
    torch.manual_seed(ctx.rank)  # all start with the weights of rank 0
    model = stack()
    module: nn.Module = model
    optimizer = OPTIMIZERS[name](model.parameters())
    if bucket_bytes is None:
        module = DistributedDataParallel(model)
    else:
        optimizer = DistributedOptimizer(optimizer, model, bucket_bytes, mode=mode)
    generator = torch.Generator().manual_seed(ctx.rank)
    for _ in range(10):
        inputs = torch.randn(8, WIDTH, generator=generator).to("cuda:0")
        torch.cuda._sleep(BUSY // 10)
        module(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.synchronize()
        optimizer.close()
    return {key: value.detach().cpu() for key, value in model.named_parameters()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_on_gpu_give_the_weights_of_ddp(name: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[dict[str, Tensor]]:
        return [
            train(ctx, name, None),
            train(ctx, name, 20_000),
            train(ctx, name, 10_000_000),
            train(ctx, name, 20_000, "all_reduce"),
        ]

    found = run_stages(2, work, tmp_path)
    expected = found[0][0]
    for _, *ours in found:
        for weights in ours:
            for key, value in expected.items():
                assert (weights[key] - value).abs().max() <= 1e-5, key


def train_layers(
    optimizer: DistributedOptimizer, model: nn.Module, num_steps: int, width: int
) -> list[int]:
    """Run steps; return the device peak of each."""
    peaks = []
    for _ in range(num_steps):
        torch.cuda.reset_peak_memory_stats()
        model(torch.ones(4, width, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    return peaks


BACKENDS = [
    "gloo",
    pytest.param(
        "nccl",
        marks=pytest.mark.skipif(
            not dist.is_nccl_available(), reason="this torch was built without NCCL"
        ),
    ),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("backend", BACKENDS)
def test_first_step_needs_no_more_device_memory_than_the_tenth(
    backend: str, tmp_path: Path
) -> None:
    width = 2048

    def work(ctx: DistContext) -> list[int]:
        group = new_nccl_group(ctx) if backend == "nccl" else None
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(16))).to("cuda:0")
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
        optimizer = DistributedOptimizer(inner, model, 25_000_000, group, timeout=TIMEOUT)
        peaks = train_layers(optimizer, model, 10, width)
        optimizer.close()
        return peaks

    for peaks in run_stages(2, work, tmp_path, timeout=150):
        assert peaks[0] <= 1.05 * peaks[9], [peak / 1e6 for peak in peaks]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("backend", BACKENDS)
def test_changes_of_buckets_on_gpu_keep_the_weights_of_ddp(backend: str, tmp_path: Path) -> None:
    """Weights and Adam's state move to other buckets and modes between steps, and back."""
    changes = {
        2: BucketCandidate(40_000, BucketMode.ALL_REDUCE),
        4: BucketCandidate(10_000, BucketMode.DECOUPLED),
        7: BucketCandidate(1_000_000, BucketMode.DECOUPLED),
    }

    def work(ctx: DistContext) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        group = new_nccl_group(ctx) if backend == "nccl" else None
        torch.manual_seed(0)
        model = stack()
        optimizer = DistributedOptimizer(
            OPTIMIZERS["adamw"](model.parameters()), model, 20_000, group, mode="decoupled"
        )
        generator = torch.Generator().manual_seed(ctx.rank)
        for step in range(10):
            inputs = torch.randn(8, WIDTH, generator=generator).to("cuda:0")
            torch.cuda._sleep(BUSY // 10)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in changes:
                optimizer._change_buckets(changes[step])
        optimizer.close()
        torch.manual_seed(0)
        ours = {key: value.detach().cpu() for key, value in model.named_parameters()}
        return ours, train(ctx, "adamw", None)

    for ours, expected in run_stages(2, work, tmp_path, timeout=150):
        for key, value in expected.items():
            assert (ours[key] - value).abs().max() <= 1e-5, key


def test_step_clock_times_the_gpu_without_waiting_for_it(tmp_path: Path) -> None:
    def time_steps() -> tuple[list[bool], list[float]]:
        clock, busy = StepClock(torch.device("cuda", 0)), []
        torch.cuda._sleep(BUSY)  # before the step
        for _ in range(2):
            clock.begin()
            torch.cuda._sleep(BUSY)
            clock.end()
            busy.append(is_busy())
            torch.cuda._sleep(4 * BUSY)  # between steps
        return busy, clock.pop()

    busy, (first, second) = run_single_process(time_steps, tmp_path)
    assert all(busy)
    assert 0.5 < first / second < 2
