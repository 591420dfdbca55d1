"""Shards of gradients on a GPU are summed there; here its copies and streams are emulated."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.cost.sync import SMALL
from polyrhythm.run.averaging import buffers, exchange, split_all_reduce, strategies
from polyrhythm.run.averaging.buffers import GradientBuckets, PinnedCopies
from polyrhythm.run.averaging.exchange import weighted_sum
from polyrhythm.run.averaging.split_all_reduce import BucketMemory
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.types import Bytes
from tests.gloo import streamed_gradients
from tests.gloo.emulated_cuda import without_cuda
from tests.gloo.pipelines import run_single_process
from tests.gloo.replicas import TIMEOUT, run_replicas, run_with_failures
from tests.gloo.streamed_gradients import expected_quadratic, train_quadratic

CPU = torch.device("cpu")
SHARD, SIZE = slice(3, 200_000), 200_005  # longer than a block of weighted_sum


def copies_of(numbers: Tensor) -> PinnedCopies:
    """Return emulated copies of one bucket of gradients, which is followed by that of flags."""
    flat = torch.zeros(SIZE + 2, dtype=numbers.dtype)
    memory = BucketMemory(flat, [slice(0, SIZE), slice(SIZE, SIZE + 2)])
    copies = PinnedCopies(memory, SIZE, CPU)
    copies.flat.copy_(numbers)
    return copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_equal_weights", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_sum_on_the_gpu_has_the_bits_of_that_on_the_cpu(
    num_rows: int, has_equal_weights: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cuda(monkeypatch)
    draw = torch.Generator().manual_seed(num_rows)
    flats = [torch.randn(SIZE, generator=draw).to(dtype) for _ in range(num_rows)]
    weights = [1 / 3 if has_equal_weights else 1 / (3 + i) for i in range(num_rows)]
    rows, expected = [flat[SHARD] for flat in flats], torch.empty_like(flats[0][SHARD])
    weighted_sum(rows, weights, expected)
    for own in range(num_rows):
        copies = copies_of(flats[own])
        addends = {member: row for member, row in enumerate(rows) if member != own}
        copies.memory.mean.fill_(torch.nan)
        copies.sum(0, SHARD, addends, weights)
        assert torch.equal(copies.memory.mean[SHARD], expected)
        assert copies.memory.mean[: SHARD.start].isnan().all()
        assert copies.memory.mean[SHARD.stop :].isnan().all()
        assert torch.equal(copies.flat, flats[own]), "only `receive` writes to the GPU's buffer"


def test_own_addend_is_the_published_one_after_a_failed_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which had already copied the mean of the bucket to the GPU; else that on the GPU is read."""
    without_cuda(monkeypatch)
    copies, addends = copies_of(torch.ones(SIZE)), {1: torch.full((SIZE,), 3.0)[SHARD]}
    mean, published = copies.memory.mean.zero_(), copies.memory.flat
    for number in (1.0, 5.0):  # of two steps
        copies.flat.fill_(number)
        copies.send(0)
        for is_repeated in (False, True):
            published.fill_(number if is_repeated else torch.nan)
            copies.sum(0, SHARD, addends, [0.5, 0.5])
            assert (mean[SHARD] == (number + 3.0) / 2).all()
            copies.receive(0)
            assert torch.equal(copies.flat, mean[:SIZE])


def test_empty_shards_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small bucket has one owner."""
    without_cuda(monkeypatch)
    for stop in (3, SIZE):
        copies = copies_of(torch.ones(SIZE))
        mean = copies.memory.mean.zero_()
        copies.sum(0, slice(stop, stop), {0: torch.empty(0)}, [0.5, 0.5])
        assert not mean.any()


@pytest.mark.parametrize("is_pinned", [False, True])
def test_received_addends_are_pinned_and_counted_like_the_other_buffers(
    is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch rounds them up; they are kept between steps."""
    empty, pinned = torch.empty, []

    def record(*args: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*args, **more)

    memory = BucketMemory(torch.zeros(250), [slice(0, 250)])
    monkeypatch.setattr(torch, "empty", record)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: is_pinned)
    assert memory.pinned_bytes == (2 * 1024 if is_pinned else 0)
    received = memory.received(2, 100)
    assert memory.received(2, 100) is received
    assert memory.pinned_bytes == (3 * 1024 if is_pinned else 0)
    assert pinned == [is_pinned]


class EmulatedBuckets(GradientBuckets):
    """Gradients in main memory that are copied and summed as if they were on a GPU."""

    def _build(self, parameters: list[nn.Parameter], statistics: list[Tensor]) -> None:
        super()._build(parameters, statistics)
        assert self._memory is not None
        self._copies = PinnedCopies(self._memory, self._memory.buckets[-1].start, CPU)
        self._own_views = self._views(self._copies.flat)


def test_pinned_memory_of_gradients_is_reported_as_torch_rounds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_cuda(monkeypatch)
    gradients = EmulatedBuckets(nn.Linear(2, 2))
    gradients.prepare()
    memory = gradients.begin().memory  # 6 gradients, 2 flags, 3 numbers
    memory.received(1, 3)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    assert gradients.pinned_bytes == 2 * 64 + 16 + 8  # and the sums of 2 buckets


def train_emulated(
    ctx: DistContext, at_step: dict[int, Callable[[], None]], num_steps: int, *, small: Bytes = 0
) -> tuple[Tensor, list[int]]:
    """Train as `train_quadratic`; return the weights, and how much each device has summed.

    `small`: largest bucket that has one owner.
    """
    sizes, sum_on_gpu = [0, 0], PinnedCopies.sum

    def count_on_cpu(rows: list[Tensor], weights: list[float], into: Tensor) -> None:
        sizes[0] += into.numel()
        weighted_sum(rows, weights, into)

    def count_on_gpu(copies: PinnedCopies, bucket: int, shard: slice, *rest: Any) -> None:
        sizes[1] += shard.stop - shard.start
        sum_on_gpu(copies, bucket, shard, *rest)

    with pytest.MonkeyPatch.context() as monkeypatch:
        without_cuda(monkeypatch)
        monkeypatch.setattr(strategies, "GradientBuckets", EmulatedBuckets)
        monkeypatch.setattr(split_all_reduce, "weighted_sum", count_on_cpu)
        monkeypatch.setattr(PinnedCopies, "sum", count_on_gpu)
        monkeypatch.setattr(streamed_gradients, "use_small_buckets", lambda: None)
        monkeypatch.setattr(buffers, "_FIRST_BUCKET", 64)
        monkeypatch.setattr(buffers, "_BUCKET", 100)  # several per tensor
        monkeypatch.setattr(exchange, "SMALL", small)
        weights, elapsed = train_quadratic(ctx, at_step, num_steps)
    assert elapsed < TIMEOUT / 2
    return weights, sizes


@pytest.mark.parametrize("small", [0, SMALL])
def test_replicas_average_shards_that_the_gpu_sums(small: Bytes, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[Tensor, list[int]]:
        return train_emulated(ctx, {}, num_steps=5, small=small)

    found = run_replicas(2, work, tmp_path)
    expected = run_single_process(partial(expected_quadratic, [[1.0, 2.0]] * 5), tmp_path)
    for weights, _ in found:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    on_cpu, on_gpu = (sum(sizes) for sizes in zip(*(sizes for _, sizes in found), strict=True))
    assert on_gpu == 5 * expected.numel()
    assert on_cpu == 5 * (2 + 3), "a flag for each of two parameters, and three numbers"


@pytest.mark.timeout(90)
def test_survivors_sum_their_own_gradients_again_when_a_worker_dies_in_backward(
    tmp_path: Path,
) -> None:
    """The GPU's buffer already has the mean of the first buckets, with the lost worker's part."""

    def work(ctx: DistContext) -> tuple[Tensor, list[int]]:
        def die() -> None:
            time.sleep(0.3)  # its first buckets are averaged
            os.kill(os.getpid(), signal.SIGKILL)

        return train_emulated(ctx, {3: die} if ctx.rank == 2 else {}, num_steps=6)

    found = run_with_failures(3, work, tmp_path, lost={2})
    targets = [[1.0, 2.0, 3.0]] * 3 + [[1.0, 2.0]] * 3
    expected = run_single_process(partial(expected_quadratic, targets), tmp_path)
    for weights, _ in found.values():
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
