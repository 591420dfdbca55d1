"""SIGTERM to any process of a job: all processes stop after the same step, save and exit."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from polyrhythm.cli import main
from polyrhythm.errors import WorkerError
from polyrhythm.preemption_notice import NOTICE_VARIABLE
from polyrhythm.processes import TERMINATED, Child
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.preemption import PreemptionHandler
from polyrhythm.worker_registry import RunningWorker, running_workers
from tests.gloo.trainer_jobs import NUM_STEPS, fit, plan_of, run_job, trainer
from tests.grids import long_except

STEP_SLEEP = 0.02  # seconds per step, so that the notice arrives within few steps


def run_until_preempted(
    folder: Path, shape: tuple[int, int], sync: str, preempted_rank: int, at: int, **more: Any
) -> list[int]:
    """Send the signal to `preempted_rank` at step `at` or later; return each rank's last step."""
    plan = plan_of(*shape)

    def work(ctx: DistContext) -> None:
        last = folder / f"last{ctx.rank}"
        is_sent = ctx.rank != preempted_rank

        def callback(end: Any) -> None:
            nonlocal is_sent
            last.write_text(str(end.step))
            time.sleep(STEP_SLEEP)
            if not is_sent and end.step >= at:  # in groups another pipeline may take step `at`
                os.kill(os.getpid(), signal.SIGTERM)
                is_sent = True

        options = {"run_dir": folder / "run", "sync": sync, **more}
        with trainer(plan, **options) as made:
            made.restore()
            made.fit(max_steps=10_000, callbacks=[callback])

    with LocalJob(work, plan.num_workers, output_folder=folder / "logs") as job:
        with pytest.raises(WorkerError) as raised:
            assert not job.wait(60), "it runs to the end"
        assert raised.value.status == TERMINATED
        _assert_all_preempted(job)
    return [int((folder / f"last{rank}").read_text()) for rank in range(plan.num_workers)]


def _assert_all_preempted(job: LocalJob) -> None:
    deadline = time.monotonic() + 20
    while None in (statuses := [worker.status for worker in job._workers]):
        assert time.monotonic() < deadline, statuses
        time.sleep(0.05)
    assert set(statuses) == {TERMINATED}


@pytest.mark.parametrize(
    ("shape", "sync", "preempted_rank"),
    long_except(
        [
            ((1, 1), "auto", 0),
            ((2, 2), "decoupled", 3),
            ((1, 3), "all_reduce", 2),
            ((2, 2), "adaptive", 3),
            ((1, 2), "auto", 1),
        ],
        *(1, 4),
    ),
)
def test_sigterm_stops_all_after_a_checkpoint(
    tmp_path: Path, shape: tuple[int, int], sync: str, preempted_rank: int
) -> None:
    last_steps = run_until_preempted(tmp_path, shape, sync, preempted_rank, at=5)
    [checkpoint] = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
    step = json.loads((checkpoint / "manifest.json").read_text())["step"]
    assert step >= 6
    assert step <= max(last_steps) + 1
    if sync != "adaptive":
        assert set(last_steps) == {step - 1}


def test_a_notice_that_comes_while_the_store_is_read_reaches_the_others(tmp_path: Path) -> None:
    """They would not take part in the agreement on the last step, for which this one waits."""

    def work(ctx: DistContext) -> None:
        peek, is_armed = JobStore.peek, False

        def peek_late(*args: Any) -> Any:
            nonlocal is_armed
            found = peek(*args)
            if is_armed:
                is_armed = False
                made._preemption._request_stop("a test", TERMINATED)
            return found

        def callback(end: Any) -> None:
            nonlocal is_armed
            time.sleep(STEP_SLEEP)
            is_armed = is_armed or (end.step == 5 and ctx.rank == 1)

        JobStore.peek = peek_late  # type: ignore[method-assign]
        with trainer(plan_of(1, 2), run_dir=tmp_path / "run") as made:
            made.fit(max_steps=10_000, callbacks=[callback])

    with LocalJob(work, 2, output_folder=tmp_path / "logs") as job:
        with pytest.raises(WorkerError) as raised:
            assert not job.wait(60), "it runs to the end"
        assert raised.value.status == TERMINATED
        _assert_all_preempted(job)


def handler_of_test() -> PreemptionHandler:
    store, alone = JobStore(dist.HashStore(), 0, timeout=5.0), Members((0,))
    return PreemptionHandler(store, alone, alone, grace_period=5.0)


def test_a_worker_is_registered_once_it_handles_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """`polyrhythm leave` would kill it before."""
    found = list[Any]()

    @contextmanager
    def registered(_: RunningWorker) -> Iterator[None]:
        found.append(signal.getsignal(signal.SIGTERM))
        yield
        found.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(RunningWorker, "registered", registered)
    handler_of_test().close()
    assert len(found) == 2
    assert signal.SIG_DFL not in found
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_worker_that_does_not_handle_sigterm_is_not_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A Trainer in a thread, where Python can set no handler; a script's own handler counts."""
    monkeypatch.setenv(NOTICE_VARIABLE, "gcp@127.0.0.1:9")
    num_registered = list[int]()

    def work() -> None:
        handler = handler_of_test()
        num_registered.append(len(running_workers()))
        handler.close()

    in_thread = threading.Thread(target=work)
    in_thread.start()
    in_thread.join()
    assert [record.getMessage() for record in caplog.records] == [
        f"{NOTICE_VARIABLE} has no effect: nothing handles SIGTERM, as this is not the main thread"
    ]
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        work()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert num_registered == [0, 1]


@pytest.mark.long
def test_preempted_job_resumes_with_the_same_losses(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole", 1, 1, steps=60)
    run_until_preempted(tmp_path, (2, 2), "all_reduce", preempted_rank=1, at=4)
    plan = plan_of(1, 3)

    def work(ctx: DistContext | None) -> Any:
        with trainer(plan, run_dir=tmp_path / "run", sync="all_reduce") as made:
            first = made.restore()
            ends = made.fit(max_steps=60).steps
            return first, [(end.step, end.own.loss, end.own.num_samples) for end in ends]

    found = run_job(3, work, tmp_path / "again")
    first = found[0][0]
    assert 5 <= first < 60
    for number in range(60 - first):
        ends = [steps[number] for _, steps in found]
        loss = sum(loss * count for _, loss, count in ends) / sum(count for *_, count in ends)
        assert ends[0][0] == first + number
        assert loss == pytest.approx(whole[first + number], rel=1e-5)


def test_process_exits_after_grace_period(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        def callback(end: Any) -> None:
            if end.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)

        with trainer(plan_of(1, 1), checkpoint=CheckpointConfig(grace_period=0.5)) as made:
            made.fit(max_steps=NUM_STEPS, callbacks=[callback])

    with LocalJob(work, 1, output_folder=tmp_path) as job:
        with pytest.raises(WorkerError) as raised:
            job.wait(30)
        assert raised.value.status == TERMINATED
    assert "after 0.5 s" in (tmp_path / "rank0.log").read_text()


@pytest.mark.long
def test_grace_period_holds_when_store_does_not_answer(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        def callback(end: Any) -> None:
            (tmp_path / f"trains{ctx.rank}").touch()
            time.sleep(STEP_SLEEP)

        with trainer(plan_of(1, 2), checkpoint=CheckpointConfig(grace_period=1.0)) as made:
            made.fit(max_steps=10_000, callbacks=[callback])

    with LocalJob(work, 2, output_folder=tmp_path / "logs") as job:
        deadline = time.monotonic() + 30
        while not all((tmp_path / f"trains{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, "it does not start"
            time.sleep(0.05)
        first, second = (worker.pid for worker in job._workers)
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGTERM)
        assert job._workers[1].wait(10) == TERMINATED  # far below the timeout of 30 s


@pytest.mark.long
def test_forked_child_of_the_script_can_be_terminated(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        def callback(end: Any) -> None:
            if end.step == 2 and (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            elif end.step == 2:
                os.kill(child, signal.SIGTERM)
                _, status = os.waitpid(child, 0)
                assert os.WTERMSIG(status) == signal.SIGTERM
            time.sleep(STEP_SLEEP)

        with trainer(plan_of(1, 1), checkpoint=CheckpointConfig(grace_period=5)) as made:
            assert len(made.fit(max_steps=30, callbacks=[callback]).steps) == 30

    with LocalJob(work, 1, output_folder=tmp_path) as job:
        assert job.wait(30)


SCRIPT = """
import time, torch, polyrhythm as pr
from torch.utils.data import TensorDataset

inputs = torch.randn(64, 8)
trainer = pr.Trainer(
    lambda: torch.nn.Sequential(torch.nn.Linear(8, 4)),
    torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1),
    TensorDataset(inputs, inputs[:, :4]), batch_size=16, run_dir="run", timeout=30,
)
def show(info):
    print("trains", flush=True)
    time.sleep(0.02)

trainer.fit(max_steps=10**6, callbacks=[show])
print("fit has returned")
"""


def test_train_command_forwards_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    shown = Path("shown.txt")
    child = Child(lambda: main(["train", "script.py", "--local", "2"]), output=shown)
    try:
        deadline = time.monotonic() + 60
        while "trains" not in shown.read_text():
            assert child.status is None, shown.read_text()
            assert time.monotonic() < deadline, "it does not start"
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(40) == TERMINATED, shown.read_text()
    finally:
        child.end()
    assert list(Path("run/checkpoints").glob("step-*"))
    assert "fit has returned" not in shown.read_text()
