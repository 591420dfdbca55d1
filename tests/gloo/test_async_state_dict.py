"""`async_state_dict` gathers a snapshot of the optimizer state while training continues."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from polyrhythm.errors import PeerError
from polyrhythm.run.checkpoint.checkpointer import Checkpointer
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.comm.comm_thread import CommThread
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.process_groups import abort
from polyrhythm.run.decoupled import optimizer as decoupled
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.decoupled import stack, train_steps, wrap_optimizer
from tests.gloo.pipelines import run_stages
from tests.gloo.trainer_jobs import model, plan_of, run_job, samples


def delay_gather(until: threading.Event) -> None:
    """Delay every background gather of this process until the event is set."""
    full_state = decoupled.full_state

    def delayed(*args: Any) -> Any:
        is_background = threading.current_thread() is not threading.main_thread()
        assert not is_background or until.wait(20)
        return full_state(*args)

    decoupled.full_state = delayed


@pytest.mark.parametrize("mode", ["hierarchical", "hierarchical_all_reduce", "decoupled"])
def test_async_state_dict_with_nodes_is_the_whole_state(mode: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[Any, Any]:
        net = stack()
        optimizer = wrap_optimizer(net, bucket_bytes=200, mode=mode, node=f"node{ctx.rank // 2}")
        train_steps(ctx, net, optimizer, range(3))
        found = optimizer.state_dict(), optimizer.async_state_dict().result()
        optimizer.close()
        return found

    for expected, found in run_stages(4, work, tmp_path):
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)


@pytest.mark.parametrize("bucket_bytes", [200, "auto"])  # auto: buckets change meanwhile
def test_async_state_dict_is_a_snapshot(bucket_bytes: int | str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[Any, Any, Any]:
        net = stack()
        optimizer = wrap_optimizer(net, bucket_bytes=bucket_bytes)
        train_steps(ctx, net, optimizer, range(3))
        expected, may_gather = optimizer.state_dict(), threading.Event()
        delay_gather(may_gather)
        future = optimizer.async_state_dict()
        optimizer.param_groups[0]["lr"] = 0.5
        train_steps(ctx, net, optimizer, range(3, 30))
        may_gather.set()
        found, now = future.result(), optimizer.state_dict()
        optimizer.close()
        return expected, found, now

    for expected, found, now in run_stages(3, work, tmp_path):
        assert found["param_groups"] == expected["param_groups"] != now["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for index, entry in expected["state"].items():
            for key, value in entry.items():
                assert torch.equal(found["state"][index][key], value)
                assert not torch.equal(now["state"][index][key], value)


def test_async_state_dict_raises_on_lost_worker(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        net = stack()
        optimizer = wrap_optimizer(net)
        train_steps(ctx, net, optimizer, range(2))
        may_gather = threading.Event()
        delay_gather(may_gather)
        future = optimizer.async_state_dict()
        if ctx.rank == 1:
            abort(optimizer._current.background.replicas.group)
        may_gather.set()
        with pytest.raises(PeerError) as lost:
            future.result()
        optimizer.close()
        return lost.value.action

    assert run_stages(2, work, tmp_path) == ["async_state_dict(), which all workers call"] * 2


def test_gather_started_after_close_raises() -> None:
    thread = CommThread([], timeout=5.0)
    thread.close()
    future = thread.start(dict).future
    with pytest.raises(PeerError, match="closed on this worker"):
        future.result()


def test_async_state_without_optimizer_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="without an optimizer"):
            checkpoints.save(1, stack(), optimizer_state_fn=dict)
        assert checkpoints.save(1, stack())  # the refused save has no effect


def test_training_continues_during_async_checkpoint(tmp_path: Path) -> None:
    """The first checkpoint is gathered after three more steps, and can be restored."""
    saved, num_steps = 6, 11

    def work(_: DistContext | None) -> tuple[list[float], list[float]]:
        may_gather = threading.Event()

        def release_gather(end: Any) -> None:
            if end.step == saved + 3:
                time.sleep(0.2)  # a step that waited for the gather would block here
                may_gather.set()

        def trainer(**more: Any) -> Trainer:
            return Trainer(
                model,
                mse_loss,
                lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
                samples(),
                plan=plan_of(1, 2),
                batch_size=24,
                microbatch_size=2,
                sync="decoupled",
                run_dir=tmp_path / "run",
                checkpoint=CheckpointConfig(every=saved, keep_last=9),
                timeout=20.0,
                **more,
            )

        with trainer() as first:
            delay_gather(may_gather)
            losses = list(first.fit(max_steps=num_steps, callbacks=[release_gather]).losses)
        path = tmp_path / "run" / "checkpoints" / f"step-{saved:08}"
        with trainer() as second:
            second.restore(path)
            again = list(second.fit(max_steps=num_steps).losses)
        return losses[saved:], again

    for losses, again in run_job(2, work, tmp_path / "job"):
        assert len(again) == num_steps - saved
        assert again == pytest.approx(losses, abs=1e-5)
