"""`async_state_dict` gathers a snapshot of the optimizer state while training continues."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from polyrhythm.errors import PeerError
from polyrhythm.run.checkpoint.checkpointer import Checkpointer
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.checkpoint.state import StagedCopies, Staging
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


class LateCopies:
    """Copies of a GPU that reads the tensors when its next work waits for them, or in the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_end = threading.Event()
        self.memory: list[Staging] = []  # of each save
        self.waiting_threads: list[threading.Thread] = []
        stream = SimpleNamespace(wait_event=lambda event: event.run())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
        monkeypatch.setattr(Staging, "_start_copies", lambda *args: self._start(*args))

    def _start(self, staging: Staging, tensors: dict[str, torch.Tensor]) -> StagedCopies:
        if not tensors:
            return StagedCopies(staging._copies, {})
        self.memory.append(staging)
        waiting = dict(tensors)

        def run() -> None:
            while waiting:
                name, value = waiting.popitem()
                staging._copies[name].copy_(value)

        def synchronize() -> None:
            self.waiting_threads.append(threading.current_thread())
            assert self.may_end.wait(20)
            run()

        event: Any = SimpleNamespace(run=run, synchronize=synchronize)
        return StagedCopies(staging._copies, {torch.device("cpu"): event})


def test_async_state_dict_is_a_snapshot_though_a_gpu_copies_it_late(tmp_path: Path) -> None:
    """The next update waits for the copies on the GPU, and only the background on the host."""

    def work(ctx: DistContext) -> tuple[list[Any], list[Any], int]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            net = stack()
            optimizer = wrap_optimizer(net)
            train_steps(ctx, net, optimizer, range(3))
            copies, expected, futures = LateCopies(monkeypatch), list[Any](), list[Any]()
            for save in range(3):  # the second one follows before an update
                if save != 1:
                    train_steps(ctx, net, optimizer, range(3 + save, 4 + save))
                expected.append(optimizer.state_dict()["state"])
                futures.append(optimizer.async_state_dict())
            train_steps(ctx, net, optimizer, range(6, 9))
            copies.may_end.set()
            found = [future.result()["state"] for future in futures]
            assert threading.main_thread() not in copies.waiting_threads
            assert len(copies.waiting_threads) == 3
            for _ in range(3):  # one after the other
                optimizer.async_state_dict().result()
            optimizer.close()
        assert len({id(staging) for staging in copies.memory[:3]}) == 3, "all were in use"
        return expected, found, len({id(staging) for staging in copies.memory[3:]})

    for expected, found, num_memories in run_stages(2, work, tmp_path):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert num_memories == 1, "kept between saves"


def test_state_that_is_read_between_steps_may_be_changed(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[Any, Any]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            net = stack()
            optimizer = wrap_optimizer(net)
            train_steps(ctx, net, optimizer, range(3))
            copies, expected = LateCopies(monkeypatch), optimizer.state_dict()["state"]
            future = optimizer.async_state_dict()
            for entry in optimizer.state.values():
                entry["exp_avg"].zero_()
            copies.may_end.set()
            found = future.result()["state"]
            optimizer.close()
        return expected, found

    for expected, found in run_stages(2, work, tmp_path):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


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
