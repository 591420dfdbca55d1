"""Edge cases of a pipeline: results could be silently wrong, or closing could hang."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from polyrhythm.errors import ScheduleError, WorkerError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.batch import kind_of
from polyrhythm.run.pipeline.microbatch import ArgumentTree
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.pipeline.transport import Connections
from tests.gloo.pipelines import (
    assert_close,
    random_batch,
    run_single_process,
    run_stages,
    stack_of,
)

INPUTS, TARGET = random_batch(8, 8)


def pipeline_of(module: nn.Module, **options: Any) -> Pipeline:
    usual = {"loss_fn": mse_loss, "timeout": 10, "n_microbatches": 4, "schedule": "1f1b"}
    return Pipeline(module, **{**usual, **options})


def step(pipeline: Pipeline, inputs: Tensor = INPUTS, target: Tensor = TARGET) -> None:
    pipeline.step(*([inputs] if pipeline.is_first else []), target=target, return_outputs=False)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.timeout(60)
def test_activation_checkpointing_uses_stashed_weights(
    tmp_path: Path,
) -> None:
    def train(module: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        with pipeline_of(module, flush=False, n_microbatches=1) as pipeline:
            for _ in range(6):
                step(pipeline)
                if pipeline.has_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
            for _ in pipeline.drain():
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in module.parameters()]

    def work(ctx: DistContext) -> tuple[list[Tensor], list[Tensor]]:
        plain = train(stack_of(3)[ctx.rank])
        return plain, train(Checkpointed(stack_of(3)[ctx.rank]))

    for plain, checkpointed in run_stages(3, work, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


@pytest.mark.timeout(60)
def test_frozen_weights_are_not_stashed(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> int:
        module = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
        pipeline = pipeline_of(module, flush=False, n_microbatches=1)
        with pipeline:
            step(pipeline)
            (stashed,) = pipeline._runner._stashed_weights.values() if ctx.rank == 0 else [{}]
            for _ in pipeline.drain():
                pass
        return len(stashed)

    assert run_stages(2, work, tmp_path) == [2, 0]  # the trained weight and its bias


class Counting(nn.Module):
    """Returns numbers with its activations, and increments them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, numbers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        numbers = torch.zeros(len(x), dtype=torch.long) if numbers is None else numbers.add_(1)
        return y, numbers


@pytest.mark.timeout(60)
def test_received_tensor_may_be_modified_in_place(tmp_path: Path) -> None:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        assert output[1].tolist() == [2, 2]
        return mse_loss(output[0], target)

    def work(ctx: DistContext) -> None:
        with pipeline_of(Counting(), loss_fn=loss) as pipeline:
            step(pipeline)

    run_stages(3, work, tmp_path)


class Island(nn.Module):
    """Computes in full precision under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float()).square()


@pytest.mark.timeout(60)
def test_backward_uses_dtypes_of_forward_under_autocast(tmp_path: Path) -> None:
    def island() -> Island:
        torch.manual_seed(0)
        return Island()

    def piped() -> dict[str, Tensor]:
        module = island()
        with pipeline_of(module) as pipeline, torch.autocast("cpu", dtype=torch.bfloat16):
            step(pipeline)
        return {name: p.grad for name, p in module.named_parameters()}

    def plain() -> dict[str, Tensor]:
        module = island()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse_loss(module(INPUTS), TARGET)
        loss.backward()
        return {name: p.grad for name, p in module.named_parameters()}

    assert_close(run_single_process(piped, tmp_path), run_single_process(plain, tmp_path), 1e-6)


@pytest.mark.timeout(60)
def test_autotuner_handles_varying_batch_sizes(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[int, str]:
        options = {"schedule": "auto", "tune_every": 1, "memory_limit": "1GiB"}
        with pipeline_of(stack_of(2)[ctx.rank], **options) as pipeline:
            for size in (4, 8, 8, 8, 5, 8):
                step(pipeline, INPUTS[:size], TARGET[:size])
            return pipeline.num_steps, str(pipeline.spec)

    first, last = run_stages(2, work, tmp_path)
    assert first == last
    assert first[0] == 6


@pytest.mark.timeout(60)
def test_memory_limit_of_one_stage_is_enforced(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        limit = 100 if ctx.rank == 1 else None
        pipeline = pipeline_of(stack_of(2)[ctx.rank], schedule="auto", memory_limit=limit)
        for _ in range(3):
            step(pipeline)

    with pytest.raises(WorkerError, match="stage 1 needs"):
        run_stages(2, work, tmp_path)


@pytest.mark.timeout(60)
def test_close_twice_or_undrained_does_not_block(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> int:
        module = stack_of(3)[ctx.rank]
        full = pipeline_of(module, flush=False, n_microbatches=1)
        for _ in range(4):
            step(full)
        dist.barrier()  # the first stage to close would end the steps of the others
        full.close()  # not drained
        full.close()
        empty = pipeline_of(module, flush=False, n_microbatches=1)
        step(empty)
        for _ in empty.drain():
            pass
        empty.close()
        empty.close()
        return threading.active_count()

    assert run_stages(3, work, tmp_path, timeout=30) == [1, 1, 1]


@pytest.mark.timeout(60)
def test_inconsistent_options_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        pipeline_of(stack_of(2)[ctx.rank], schedule=("1f1b", "gpipe")[ctx.rank])

    with pytest.raises(WorkerError, match=r"stage 0 .*1f1b.*stage 1 .*gpipe"):
        run_stages(2, work, tmp_path)


@pytest.mark.timeout(60)
def test_wrong_options_are_refused_before_threads_start(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> int:
        for wrong in ({"schedule": "2f2b"}, {"window": 0}, {"tune_every": 0}, {"timeout": -1}):
            with pytest.raises(ScheduleError):
                pipeline_of(stack_of(2)[ctx.rank], **wrong)
        if ctx.rank == 0:  # alone: if it created a group, it would wait for the other rank
            other_stage = PipelineStage(stack_of(2)[0], 1, 2, torch.device("cpu"))
            with pytest.raises(ScheduleError, match="a torch stage 1 of 2 on process 0 of 2"):
                Pipeline.from_torch_stage(
                    other_stage, loss_fn=mse_loss, n_microbatches=4, timeout=5
                )
        return threading.active_count()

    assert run_stages(2, work, tmp_path) == [1, 1]


def run_out_of_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("no memory for a message")


def break_receiving(connections: Connections) -> None:
    connections.activations_in[0]._receive = run_out_of_memory


def break_posting(connections: Connections) -> None:
    connections.activations_in[0].post_receives = run_out_of_memory


def break_header_thread(connections: Connections) -> None:
    connections._header_inbox._receive = run_out_of_memory


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("broken", "flush"),
    [(break_receiving, True), (break_posting, False), (break_header_thread, False)],
)
def test_local_error_is_not_reported_as_peer_error(
    tmp_path: Path, broken: Callable[[Connections], None], flush: bool
) -> None:
    """Without a flush a thread receives batch headers and posts receives for the batches."""

    def work(ctx: DistContext) -> None:
        module = stack_of(2)[ctx.rank]
        pipeline = pipeline_of(module, flush=flush, n_microbatches=4 if flush else 1)
        if ctx.rank == 1:
            broken(pipeline._connections)
        dist.barrier()  # the first message comes afterwards
        step(pipeline)

    with pytest.raises(WorkerError, match="no memory for a message") as caught:
        run_stages(2, work, tmp_path)
    assert caught.value.rank == 1


def windows_of(pipeline: Pipeline) -> tuple[int, ...]:
    boxes = pipeline._connections
    inboxes = [*boxes.activations_in.values(), *boxes.gradients_in.values()]
    return tuple(inbox.window for inbox in inboxes)


@pytest.mark.timeout(60)
def test_receive_windows_follow_the_schedule(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[int, ...]:
        with pipeline_of(stack_of(3)[ctx.rank], schedule="bounded:4,2,1") as pipeline:
            step(pipeline)
            return windows_of(pipeline)

    # Activations: in flight on the previous stage; gradients: in flight on this stage.
    assert run_stages(3, work, tmp_path) == [(4,), (4, 2), (2,)]


@pytest.mark.timeout(60)
def test_explicit_window_is_used_with_and_without_flush(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[tuple[int, ...]]:
        windows = []
        for flush in (True, False):
            options = {"flush": flush, "n_microbatches": 4 if flush else 1, "window": 5}
            with pipeline_of(stack_of(3)[ctx.rank], **options) as pipeline:
                step(pipeline)
                for _ in pipeline.drain():
                    pass
                windows.append(windows_of(pipeline))
        return windows

    assert run_stages(3, work, tmp_path) == [[(5,)] * 2, [(5, 5)] * 2, [(5,)] * 2]


@pytest.mark.timeout(60)
def test_event_log_is_closed_when_a_step_fails(tmp_path: Path) -> None:
    def single_process() -> bool:
        pipeline = pipeline_of(stack_of(1), log=tmp_path / "run")
        with pytest.raises(ScheduleError), pipeline:
            pipeline.step()
        return pipeline._own_log._file is None

    assert run_single_process(single_process, tmp_path)


def test_microbatch_kind_depends_on_shape_not_batch_size() -> None:
    def kind(*arguments: Tensor, size: int = 2) -> int:
        tree = ArgumentTree.of(arguments, None, "args_chunk_spec")
        tree.resolve(len(arguments[0]), 2, is_ambiguous=False, first=tree.leaves[0])
        return kind_of([tree], size, training=True)

    assert kind(torch.ones(4, 3)) == kind(torch.ones(8, 3))
    others = [
        kind(torch.ones(4, 3), size=4),
        kind(torch.ones(4, 5)),
        kind(torch.ones(4, 3, dtype=torch.float64)),
        kind(torch.ones(4, 3), torch.ones(4)),
        kind(torch.ones(4, 3), torch.tensor(1.0)),  # goes to every micro-batch unchanged
    ]
    assert len({kind(torch.ones(4, 3)), *others}) == 6
