"""Waits name the missing worker in a warning, and fail soon, with the cause, when it is lost."""

import logging
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.events import read_run
from polyrhythm.run.averaging import group_sync, rounds
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.parameter_server import ParameterServer
from polyrhythm.run.comm import store
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.replicas import TIMEOUT, Point, run_replicas, run_with_failures, train

EXPIRED = 0.0004  # less than torch's unit of a millisecond
LONG_TIMEOUT = 300.0  # no test may reach it
SHORT_TIMEOUT = 40.0  # a failing test would wait for LONG_TIMEOUT instead


def sgd(model: Point) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class CapturedWarnings(logging.Handler):
    """The warnings logged in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("polyrhythm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("policy", ["age", "static"])
def test_start_failure_is_reported_to_all_at_once(policy: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, bool]:
        model, start = Point(size=7 if ctx.rank == 3 else 6), time.monotonic()
        with pytest.raises((PolicyError, PeerError)) as caught:
            GroupSync(model, sgd(model), policy, timeout=LONG_TIMEOUT)
        return str(caught.value), time.monotonic() - start < SHORT_TIMEOUT

    found = run_replicas(6, work, tmp_path)
    assert all(soon for _, soon in found)
    assert "s0p3 averages other tensors than s0p0" in found[3][0]
    for rank in (0, 1, 2, 4, 5):
        message, _ = found[rank]
        assert message.startswith("lost s0p3 during "), message
        assert "it could not start: s0p3 averages other tensors than s0p0" in message


def test_missing_worker_is_named_in_warning_and_error(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, list[str]]:
        captured, model = CapturedWarnings(), Point()
        store.WARN_AFTER = 1.0
        dist.barrier()  # then only the third is missing
        if ctx.rank == 2:
            return "", []
        with pytest.raises(PeerError) as caught:
            GroupSync(model, sgd(model), "age", timeout=3.0)
        return str(caught.value), captured.lines

    for message, warnings in run_replicas(3, work, tmp_path)[:2]:
        assert re.search(
            r"lost s0p2 during agreeing on the settings of name=.sync. after \d.*no answer", message
        )
        assert len(warnings) == 1
        assert "for s0p2: agreeing on the settings" in warnings[0]


def test_worker_missing_from_average_all_is_named(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, list[str]]:
        captured = CapturedWarnings()
        rounds.WARN_AFTER = 0.3
        group_sync._AVERAGE_ALL_SHARE = 0.3  # the scheduler gives up long before the worker
        model = Point()
        with GroupSync(model, sgd(model), "age", timeout=6.0) as sync:
            if ctx.rank == 1:
                dist.barrier()  # alive, but busy with something else
                return "", []
            with pytest.raises(PeerError) as caught:
                sync.average_all()
            dist.barrier()
        return str(caught.value), captured.lines

    message, warnings = run_replicas(2, work, tmp_path)[0]
    assert "during averaging all workers" in message
    assert re.search(r"s0p1 did not .* within 1\.8 s", message)
    assert len(warnings) == 1
    assert re.search(r"s0p0 .* 0\.3 s .* averaging all workers.* 6 s", warnings[0])


def test_lost_worker_is_logged_on_coordinator_rank(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        captured = CapturedWarnings()
        with train(ctx, 5, "age") as sync:
            if ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(40):
                time.sleep(0.05)
                sync.step()
        return captured.lines

    found = run_with_failures(3, work, tmp_path, lost={1})
    assert found == {0: ["s0p1 is dead: its connection has closed; 2 are active"], 2: []}


def test_killed_rank_0_is_reported_soon(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = Point()
        try:
            with GroupSync(model, sgd(model), "age", timeout=LONG_TIMEOUT) as sync:
                for number in range(100_000):
                    if ctx.rank == 0 and number == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    sync.step()
        except PeerError as error:
            return str(error)
        return "nothing happened"

    found = run_with_failures(3, work, tmp_path, lost={0})
    for message in found.values():
        assert "(in s0p0)" in message
        assert "its connection has closed" in message, "without waiting for the heartbeat timeout"


def test_static_policy_names_first_lost_worker(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        with (
            pytest.raises(PeerError) as caught,
            train(ctx, 3, "static", node=f"n{ctx.rank // 2}") as sync,
        ):
            if ctx.rank == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(8):
                sync.step()
        return str(caught.value)

    found = run_with_failures(6, work, tmp_path, lost={5})
    assert all("lost s0p5 during" in message for message in found.values()), found


def test_missing_or_misplaced_parameter_server_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        model, messages = Point(), []
        with pytest.raises(PolicyError) as caught:  # all three train: none is the server
            GroupSync(model, sgd(model), "ssp", num_pipelines=3, timeout=LONG_TIMEOUT)
        messages.append(str(caught.value))
        with pytest.raises((PolicyError, PeerError)) as caught_too:  # rank 0 is the server
            if ctx.rank == 0:
                ParameterServer(num_pipelines=2, timeout=2.0).serve()
            else:
                GroupSync(model, sgd(model), "ssp", timeout=2.0)
        messages.append(str(caught_too.value))
        return messages

    found = run_replicas(3, work, tmp_path)
    for message, _ in found:
        assert "ssp with 3 workers in a job of 3 processes" in message
        assert "start 4 processes; on rank 3 call ParameterServer(num_pipelines=3)" in message
    assert "a parameter server on rank 0 of 3, for 2 workers" in found[0][1]
    assert "s0p2 in a job of 1 stages x 2 pipelines" in found[2][1]


@pytest.mark.long
def test_missing_parameter_server_is_named(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = Point()
        dist.barrier()  # then only the server is missing
        if ctx.rank == 2:
            return ""
        with pytest.raises(PeerError) as caught:
            GroupSync(model, sgd(model), "ssp", timeout=2.0)
        return str(caught.value)

    for message in run_replicas(3, work, tmp_path)[:2]:
        assert "lost s0p2 (the parameter server) during agreeing on the workers" in message


def test_timeout_does_not_bound_connecting_to_store(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, str]:
        model, job_store, found = Point(), dist.distributed_c10d._get_default_store(), []
        if ctx.rank == 1:
            return "", ""
        for job_timeout, timeout in ((TIMEOUT, EXPIRED), (EXPIRED, TIMEOUT)):
            job_store.set_timeout(timedelta(seconds=job_timeout))
            with pytest.raises(PeerError) as caught:
                GroupSync(model, sgd(model), "ssp", timeout=timeout, name=f"{timeout}")
            job_store.set_timeout(timedelta(seconds=TIMEOUT))
            found.append(str(caught.value))
        return found[0], found[1]

    missing_server, no_store = run_replicas(2, work, tmp_path)[0]
    assert "lost s0p1 (the parameter server) during agreeing on the workers" in missing_server
    assert "lost the process that serves the job's store during connecting" in no_store


def test_inconsistent_arguments_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        model, messages = Point(), []
        for arguments, options in (
            ((model, sgd(Point())), {}),
            ((sgd(model), model), {}),
            ((model, sgd(model)), {"policy": "static", "coordinator": "tcp://127.0.0.1:1"}),
            ((model, sgd(model)), {"keys": "job.keys"}),
            ((model, sgd(model)), {"num_pipelines": 9}),
        ):
            with pytest.raises(PolicyError) as caught:
                GroupSync(*arguments, **options)
            messages.append(caught.value.wrong)
        return messages

    assert run_replicas(1, work, tmp_path)[0] == [
        "an optimizer that updates no parameter of this Point",
        "GroupSync(SGD, Point)",
        "coordinator='tcp://127.0.0.1:1' under static",
        "keys='job.keys' without a coordinator",
        "9 workers in a job of 1 processes",
    ]


def test_step_after_close_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        sync = train(ctx, 2, "age")
        sync.close()
        sync.close()
        with pytest.raises(PolicyError) as caught:
            sync.step()
        return caught.value.wrong

    for rank, wrong in enumerate(run_replicas(2, work, tmp_path)):
        assert re.search(rf"s0p{rank} .*closed", wrong)


@pytest.mark.long
def test_rank_0_close_waits_for_training_workers(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> int:
        model = Point()
        sync = GroupSync(model, sgd(model), "age", timeout=TIMEOUT)
        for _ in range(2 if ctx.rank == 0 else 20):
            time.sleep(0.1 if ctx.rank else 0.0)
            sync.step()
        sync._client._timeout = 1.0  # the others train for longer
        sync.close()
        return sync.num_steps

    assert run_replicas(3, work, tmp_path) == [2, 20, 20]


def test_log_accepts_run_directory(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        train(ctx, 4, "age", log=str(tmp_path / "run")).close()

    run_replicas(2, work, tmp_path)
    events = list(read_run(tmp_path / "run"))
    assert [e.step for e in events if e.kind == "step" and e.worker == (0, 1)] == [0, 1, 2, 3]
    assert {e.worker for e in events if e.kind == "average"} == {(0, 0), (0, 1)}
    assert (tmp_path / "run" / "scheduler.jsonl").exists()
