"""A closed pipeline frees all batches in flight, and refuses further calls."""

import contextlib
import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss

from polyrhythm.errors import PeerError, ScheduleError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.pipelines import random_batch, run_single_process, run_stages, step
from tests.gloo.transport_peers import num_alive, track_buffers, wait_until

INPUTS, TARGET = random_batch(4, 8)


class UserCodeError(Exception):
    """An error in the user's code."""


class RecordingModule(nn.Module):
    """A stage that records the memory its backward needs; it may fail at one of its calls."""

    def __init__(self, recorded: list[StorageWeakRef], fails_at: int | None = None) -> None:
        super().__init__()
        self.linear, self.recorded, self.fails_at, self.num_calls = (
            nn.Linear(8, 8),
            recorded,
            fails_at,
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        y = torch.tanh(self.linear(x))
        record(self.recorded, x, y)
        if not isinstance(self.linear.weight, nn.Parameter):  # a stashed copy
            record(self.recorded, self.linear.weight)
        if self.num_calls == self.fails_at:
            raise UserCodeError
        return y


def record(recorded: list[StorageWeakRef], *tensors: Tensor) -> None:
    recorded += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def pipeline_of(module: nn.Module, *, flush: bool, window: int | None = None) -> Pipeline:
    return Pipeline(
        module,
        loss_fn=mse_loss,
        n_microbatches=4 if flush else 1,
        schedule="gpipe" if flush else "bounded:6,3",
        flush=flush,
        window=window,
        timeout=20,
    )


def run_ahead(pipeline: Pipeline, recorded: list[StorageWeakRef], num_steps: int) -> None:
    """Run batches that nothing else references, too few for a backward."""
    for seed in range(num_steps):
        inputs, target = random_batch(4, 8, seed=seed)
        if pipeline.is_last:
            record(recorded, target)
        step(pipeline, inputs, target)


def stop_in_the_middle(pipeline: Pipeline, recorded: list[StorageWeakRef]) -> None:
    """Stop while the last stage has unused messages and the first waits for some.

    With a window of one, the first stage also has unsent messages.
    """
    run_ahead(pipeline, recorded, 5 if pipeline.is_first else 2)
    if pipeline.is_last:
        inbox = pipeline._connections.activations_in[0]
        wait_until(lambda: len(inbox._arrived) == min(3, inbox.window), "the next messages")


def fail_between_steps(pipeline: Pipeline, recorded: list[StorageWeakRef]) -> None:
    stop_in_the_middle(pipeline, recorded)
    raise UserCodeError


def fail_in_the_last_stage(pipeline: Pipeline, recorded: list[StorageWeakRef]) -> None:
    run_ahead(pipeline, recorded, 3)
    raise UserCodeError  # in the first stage, which may not have noticed


def wait_for_count() -> None:
    """Wait until the first stage has counted its messages."""
    _get_default_store().wait(["first stage has counted"], timedelta(seconds=20))


def fail_to_receive(pipeline: Pipeline, recorded: list[StorageWeakRef]) -> None:
    def fail(*args: object) -> None:
        wait_for_count()  # a failed step ends the other's messages
        raise UserCodeError

    if pipeline.is_last:
        pipeline._connections.activations_in[0]._receive = fail
    dist.barrier()  # the first message comes afterwards
    run_ahead(pipeline, recorded, 3)
    raise UserCodeError


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("run", "flush", "window"),
    [
        (stop_in_the_middle, False, None),
        (stop_in_the_middle, False, 1),
        (fail_between_steps, False, None),
        (fail_in_the_last_stage, False, None),
        (fail_in_the_last_stage, True, None),
        (fail_to_receive, False, None),
    ],
)
def test_close_frees_everything_in_flight(
    tmp_path: Path,
    run: Callable[[Pipeline, list[StorageWeakRef]], None],
    flush: bool,
    window: int | None,
) -> None:
    def work(ctx: DistContext) -> dict[str, int]:
        buffers, recorded = track_buffers(), []
        fails = run is fail_in_the_last_stage and ctx.rank == 1
        module = RecordingModule(recorded, fails_at=3 if fails else None)
        pipeline = pipeline_of(module, flush=flush, window=window)
        try:
            with pipeline:
                try:
                    run(pipeline, recorded)
                finally:
                    before = num_alive(recorded), num_alive(buffers)
                    if pipeline.is_first:
                        _get_default_store().set("first stage has counted", "")
                    if not flush:  # with a flush the first stage waits for the last one to close
                        dist.barrier()  # a stage that closes early would end the other's messages
        except (UserCodeError, PeerError):
            pass
        num_threads = threading.active_count()
        gc.collect()
        return {
            "in flight": before[0],
            "messages": before[1],
            "in flight after": num_alive(recorded),
            "messages after": num_alive(buffers),
            "threads": num_threads,
            "steps": pipeline.num_steps,  # last: keeps the pipeline alive until here
        }

    for counts in run_stages(2, work, tmp_path):
        assert counts["in flight"] > 0
        if run is not fail_in_the_last_stage:  # a failed step frees them
            assert counts["messages"] > 0, "used, unused or expected"
        assert (counts["in flight after"], counts["messages after"]) == (0, 0)
        assert counts["threads"] == 1


def calls_of(pipeline: Pipeline) -> dict[str, Callable[[], Any]]:
    inputs = (INPUTS,) if pipeline.is_first else ()
    return {
        "step": lambda: step(pipeline, INPUTS, TARGET),
        "eval": lambda: pipeline.eval(*inputs),
        "drain": lambda: list(pipeline.drain()),
        "clip_grad_norm_": lambda: pipeline.clip_grad_norm_(1.0),
    }


def check_refusals(pipeline: Pipeline) -> None:
    for name, call in calls_of(pipeline).items():
        with pytest.raises(ScheduleError, match=f"^{name} of a closed pipeline\n"):
            call()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("flush", "drains"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("fails", [False, True])
def test_calls_after_close_are_refused(
    tmp_path: Path, flush: bool, drains: bool, fails: bool
) -> None:
    def work(ctx: DistContext) -> None:
        pipeline = pipeline_of(nn.Linear(8, 8), flush=flush)
        with contextlib.suppress(UserCodeError), pipeline:
            step(pipeline, INPUTS, TARGET)
            if drains:
                assert len(list(pipeline.drain())) == 1
            dist.barrier()
            if fails:
                raise UserCodeError
        check_refusals(pipeline)

    run_stages(2, work, tmp_path)


@pytest.mark.timeout(60)
def test_close_of_single_stage_pipeline(tmp_path: Path) -> None:
    def single_process() -> int:
        recorded: list[StorageWeakRef] = []
        pipeline = Pipeline(
            RecordingModule(recorded),
            loss_fn=mse_loss,
            n_microbatches=1,
            schedule="bounded:3",
            flush=False,
        )
        run_ahead(pipeline, recorded, 2)
        pipeline.close()
        check_refusals(pipeline)
        gc.collect()
        return num_alive(recorded)

    assert run_single_process(single_process, tmp_path) == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_left", [0, 1])
def test_close_during_drain_reports_remaining_batches(tmp_path: Path, num_left: int) -> None:
    def work(ctx: DistContext) -> None:
        pipeline = pipeline_of(nn.Linear(8, 8), flush=False)
        for _ in range(1 + num_left):
            step(pipeline, INPUTS, TARGET)
        draining = pipeline.drain()
        next(draining)
        dist.barrier()
        pipeline.close()
        if num_left == 0:
            assert list(draining) == []
            return
        with pytest.raises(ScheduleError, match="drain of a closed pipeline"):
            next(draining)

    run_stages(2, work, tmp_path)
