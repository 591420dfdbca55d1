"""Gradients that are averaged while backward computes them equal those of one process."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.run.averaging import split_all_reduce, strategies
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import run_single_process, run_stages, step
from tests.gloo.replicas import TIMEOUT, run_replicas, run_with_failures
from tests.gloo.streamed_gradients import (
    LR,
    MICROBATCHES,
    WIDTH,
    Before,
    expected_quadratic,
    make_pipeline,
    train_quadratic,
    use_small_buckets,
)
from tests.grids import long_except

PIPELINES, SAMPLES, STEPS = 2, 4, 4


class Layer(nn.Module):
    """A layer with running statistics, and parameters that are frozen, or used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused, self.gate = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.norm(self.linear(inputs)) * self.frozen
        return outputs * self.gate if inputs[0, 0] > 0 else torch.tanh(outputs)


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Layer() for _ in range(4))).double()


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out some of the targets, another number of them in each micro-batch."""
    is_label = target > -0.5
    return (output - target)[is_label].square().sum(), is_label.sum()


def batch(pipeline: int, number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * pipeline + number)
    shape = MICROBATCHES * SAMPLES, WIDTH
    return tuple(torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return weights and statistics; only the number of batches differs by replica."""
    state = module.state_dict()
    return {k: v.clone() for k, v in state.items() if v.is_floating_point()}


def single_process(loss_fn: Callable[..., Any], num_steps: int = STEPS) -> dict[str, Tensor]:
    """Train one model on the micro-batches of all pipelines; average their statistics."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for number in range(num_steps):
        replicas = [deepcopy(model) for _ in range(PIPELINES)]
        total = 0.0
        for pipeline, replica in enumerate(replicas):
            parts = (t.chunk(MICROBATCHES) for t in batch(pipeline, number))
            for inputs, target in zip(*parts, strict=True):
                loss = loss_fn(replica(inputs), target)
                loss, num = loss if isinstance(loss, tuple) else (loss, 1.0)
                loss.backward()
                total += float(num)
        for name, parameter in model.named_parameters():
            gradients = [r.get_parameter(name).grad for r in replicas]
            if any(g is not None for g in gradients):
                parameter.grad = sum(g for g in gradients if g is not None) / total
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.stack([r.get_buffer(name) for r in replicas]).mean(0))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize(
    ("policy", "stages", "loss_fn"),
    long_except(
        [
            ("all_reduce", 1, mean_loss),
            ("all_reduce", 2, mean_loss),
            ("all_reduce", 1, counted_loss),
            ("all_reduce", 2, counted_loss),
            ("balanced", 1, counted_loss),
            ("balanced", 2, counted_loss),
        ],
        *(1, 2, 5),
    ),
)
def test_averages_during_backward_equal_single_process(
    policy: str, stages: int, loss_fn: Callable[..., Any], tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> tuple[list[bool], dict[str, Tensor], list[object]]:
        use_small_buckets()
        strategies.time = SimpleNamespace(perf_counter=count().__next__)  # all are equally fast
        number_of, streamed = ctx.rank // stages, []
        with make_pipeline(ctx, layers(), loss_fn, stages) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=LR)
            with GroupSync(pipeline, optimizer, policy, timeout=TIMEOUT) as sync:
                for number in range(STEPS):
                    if policy == "balanced" and pipeline.is_first:
                        share = sync.share(PIPELINES * MICROBATCHES)
                        assert len(share) == MICROBATCHES
                    step(pipeline, *batch(number_of, number))
                    streamed.append(sync._strategy._filling is not None)
                    optimizer.step()
                    sync.step()
                    unused = [p.grad for n, p in pipeline.module.named_parameters() if "used" in n]
                    optimizer.zero_grad()
                assert len(sync._strategy._gradients._memory.buckets) > 8
                assert sync.pinned_bytes == 0
                return streamed, state_of(pipeline.module), unused

    found = run_stages(stages * PIPELINES, work, tmp_path)
    expected = run_single_process(partial(single_process, loss_fn), tmp_path)
    for streamed, state, unused in found:
        assert streamed == [True] * STEPS
        assert unused == [None] * len(unused)
        assert state
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def with_call(call: Callable[[], None]) -> nn.Sequential:
    return nn.Sequential(Before(call), *layers()[:2])


def test_first_buckets_are_averaged_before_backward_ends(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[int, int]:
        use_small_buckets()
        sums, weighted_sum = [], split_all_reduce.weighted_sum

        def record_sum(*args: Any) -> None:
            sums.append(time.monotonic())
            weighted_sum(*args)

        split_all_reduce.weighted_sum = record_sum
        model = with_call(lambda: time.sleep(0.5))
        with make_pipeline(ctx, model, mean_loss, 1, n_microbatches=1) as pipeline:
            optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=LR)
            with GroupSync(pipeline, optimizer, "all_reduce", timeout=TIMEOUT) as sync:
                for number in range(2):  # the first one shows which parameters are not used
                    sums.clear()
                    inputs, target = batch(ctx.rank, number)
                    pipeline.step(inputs, target=target)
                    num_before = len(sums)
                    optimizer.step()
                    optimizer.zero_grad()
                    waited = sync.pop_stats().waited
                    assert waited < 0.4, "the time of backward counts as waiting"
        return num_before, len(sums)

    for num_before, total in run_replicas(2, work, tmp_path):
        # Of the first layer, of unused parameters, of statistics, and the last one.
        assert 2 * num_before > total, f"{num_before} of {total}"


@pytest.mark.parametrize("has_pipeline", [False, True])
def test_grad_scaler_skips_the_same_step_on_all_replicas(
    has_pipeline: bool, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> tuple[list[float], dict[str, Tensor]]:
        use_small_buckets()
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0), []
        model = layers()

        def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
            is_bad = ctx.rank == 1 and len(scales) == 1
            return scaler.scale(mean_loss(output, target) * (torch.inf if is_bad else 1.0))

        with contextlib.ExitStack() as stack:
            replica: Any = model
            if has_pipeline:
                made = make_pipeline(ctx, model, scaled_loss, 1)
                replica = stack.enter_context(made)
            module = made.module if has_pipeline else model
            optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
            sync = stack.enter_context(GroupSync(replica, optimizer, "all_reduce", timeout=TIMEOUT))
            for number in range(3):
                inputs, target = batch(ctx.rank, number)
                if has_pipeline:
                    made.step(inputs, target=target)
                else:
                    for part, wanted in zip(inputs.chunk(3), target.chunk(3), strict=True):
                        (scaled_loss(model(part), wanted) / 3).backward()
                sync.average_gradients()
                scaler.step(optimizer)
                scaler.update()
                sync.step()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
            return scales, state_of(module)

    (scales, state), (others, other) = run_replicas(2, work, tmp_path)
    assert scales == others == [1024.0, 512.0, 512.0]
    for name, value in state.items():
        assert value.isfinite().all()
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)


@pytest.mark.timeout(90)
def test_survivors_average_their_own_gradients_when_a_worker_dies_in_backward(
    tmp_path: Path,
) -> None:
    def work(ctx: DistContext) -> tuple[Tensor, float]:
        def die() -> None:
            time.sleep(0.3)  # its first buckets are on their way
            os.kill(os.getpid(), signal.SIGKILL)

        return train_quadratic(ctx, {3: die} if ctx.rank == 2 else {}, num_steps=6)

    found = run_with_failures(3, work, tmp_path, lost={2})
    targets = [[1.0, 2.0, 3.0]] * 3 + [[1.0, 2.0]] * 3
    expected = run_single_process(partial(expected_quadratic, targets), tmp_path)
    for weights, elapsed in found.values():
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        assert elapsed < TIMEOUT / 2


@pytest.mark.timeout(90)
def test_a_batch_may_be_repeated_after_an_exception_in_backward(tmp_path: Path) -> None:
    """In its first step, and when buckets of the failed backward have been exchanged."""

    def work(ctx: DistContext) -> tuple[Tensor, float]:
        def fail() -> None:
            time.sleep(0.2)
            raise ArithmeticError("raised by the test")

        return train_quadratic(ctx, {0: fail, 3: fail} if ctx.rank == 1 else {}, num_steps=5)

    found = run_replicas(2, work, tmp_path)
    expected = run_single_process(partial(expected_quadratic, [[1.0, 2.0]] * 5), tmp_path)
    for weights, elapsed in found:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        assert elapsed < TIMEOUT / 2


@pytest.mark.timeout(90)
def test_others_continue_at_once_after_an_exception_in_backward(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[Tensor, float] | None:
        def fail() -> None:
            raise ValueError("raised by the test")

        calls = {2: fail} if ctx.rank == 1 else {}
        try:
            return train_quadratic(ctx, calls, num_steps=4)
        except ValueError:
            return None

    first, failed, third = run_replicas(3, work, tmp_path)
    assert failed is None
    targets = [[1.0, 2.0, 3.0]] * 2 + [[1.0, 3.0]] * 2
    expected = run_single_process(partial(expected_quadratic, targets), tmp_path)
    for weights, elapsed in (first, third):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        assert elapsed < TIMEOUT / 2


@contextlib.contextmanager
def open_sync(
    ctx: DistContext, model: nn.Sequential, name: str = "sync"
) -> Iterator[tuple[Pipeline, Any, GroupSync]]:
    use_small_buckets()
    with make_pipeline(ctx, model, mean_loss, 1) as pipeline:
        optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.0)
        with GroupSync(pipeline, optimizer, "all_reduce", timeout=TIMEOUT, name=name) as sync:
            yield pipeline, optimizer, sync


def test_gradients_are_averaged_as_they_are_before_the_update(tmp_path: Path) -> None:
    """Two steps may accumulate, and users may change gradients: the start in backward is undone."""

    def work(ctx: DistContext) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for case in ("accumulated", "changed", "removed", "plain"):
            with open_sync(ctx, layers(), name=case) as (pipeline, optimizer, _):
                for _ in range(2):
                    named = dict(pipeline.module.named_parameters())
                    parameters = [p for p in named.values() if p.requires_grad]
                    weight = next(p for name, p in named.items() if "linear.weight" in name)
                    for number in range(2 if case == "accumulated" else 1):
                        inputs, target = batch(ctx.rank, number)
                        pipeline.step(inputs, target=target)
                    if case == "changed":
                        weight.grad.mul_(2.0 + ctx.rank)
                    elif case == "removed":
                        weight.grad = None
                    own = [None if p.grad is None else p.grad.clone() for p in parameters]
                    optimizer.step()
                    found[f"own {case}"] = own
                    found[case] = [p.grad for p in parameters]
                    optimizer.zero_grad()
        return found

    first, second = run_replicas(2, work, tmp_path)
    for case in ("accumulated", "changed", "removed", "plain"):
        values = (first[f"own {case}"], second[f"own {case}"], first[case], second[case])
        for one, two, mean, same in zip(*values, strict=True):
            if mean is None:
                assert one is None
                assert two is None
                continue
            addends = [torch.zeros_like(mean) if g is None else g for g in (one, two)]
            torch.testing.assert_close(mean, sum(addends) / 2)
            assert torch.equal(mean, same)


class Recomputed(nn.Module):
    """One layer that is used twice, each time recomputed: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + 0 * self.layer.weight.sum()  # a reentrant checkpoint needs a gradient
        for _ in range(2):
            inputs = checkpoint(self.layer, inputs, use_reentrant=True)
        return inputs


def test_gradients_in_several_parts_are_averaged_whole(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(1)
        model = nn.Sequential(Recomputed(), Recomputed())
        with open_sync(ctx, model) as (pipeline, optimizer, _):
            parameters = list(pipeline.module.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                inputs, target = batch(ctx.rank, 0)
                pipeline.step(inputs, target=target)
                own = [p.grad.clone() for p in parameters]
                optimizer.step()
            return own, [p.grad for p in parameters]

    (first, mean), (second, _) = run_replicas(2, work, tmp_path)
    for one, two, both in zip(first, second, mean, strict=True):
        torch.testing.assert_close((one + two) / 2, both)


def test_average_all_between_backward_and_update_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        with open_sync(ctx, layers()) as (pipeline, optimizer, sync):
            pipeline.step(batch(ctx.rank, 0)[0], target=batch(ctx.rank, 0)[1])
            with pytest.raises(PolicyError) as caught:
                sync.average_all()
            optimizer.step()
            sync.average_all()
        return caught.value.wrong

    assert run_replicas(2, work, tmp_path) == ["average_all() while gradients are averaged"] * 2


def test_waits_for_a_bucket_have_a_deadline() -> None:
    memory = split_all_reduce.BucketMemory(torch.zeros(4), [slice(0, 2), slice(2, 4)])
    buffer = split_all_reduce.FillingBuffer(memory, lambda _: None)
    with pytest.raises(PeerError, match="backward has not filled it"):
        buffer.wait(0, time.monotonic() + 0.05, lambda: False)
    with pytest.raises(PeerError, match="the group was aborted"):
        buffer.wait(0, time.monotonic() + 60.0, lambda: True)
    memory.flat[0] = torch.nan
    for bucket in range(2):
        buffer.mark_filled(bucket)
        buffer.wait(bucket, time.monotonic(), lambda: False)
    assert [buffer.is_bucket_finite(bucket) for bucket in range(2)] == [False, True]
    assert not buffer.is_finite
    buffer.fail(PeerError("s0p1", action="averaging", waited=0.0, cause="raised by the test"))
    with pytest.raises(PeerError, match="raised by the test"):
        buffer.wait(0, time.monotonic() + 60.0, lambda: False)
