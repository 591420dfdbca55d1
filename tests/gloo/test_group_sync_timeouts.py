"""Whoever waits is told for whom; whoever waits in vain is told soon, and why."""

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import PeerError, PolicyError
from polyrhythm.events import read_run
from polyrhythm.run.averaging import group_client, rendezvous
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.parameter_server import ParameterServer
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.replicas import Point, run_replicas, run_with_failures, train

LONG_TIMEOUT = 300.0  # nobody is to wait for that long
SOON = 40.0  # a test that fails here would wait for LONG


def sgd(model: Point) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class CapturedWarnings(logging.Handler):
    """What was logged in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("polyrhythm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("policy", ["age", "static"])
def test_start_failure_is_reported_to_all_at_once(policy: str, tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, bool]:
        model, began = Point(size=7 if ctx.rank == 3 else 6), time.monotonic()
        with pytest.raises((PolicyError, PeerError)) as caught:
            GroupSync(model, sgd(model), policy, timeout=LONG_TIMEOUT)
        return str(caught.value), time.monotonic() - began < SOON

    found = run_replicas(6, work, tmp_path)
    assert all(soon for _, soon in found)
    assert "s0p3 averages other tensors than s0p0" in found[3][0]
    for rank in (0, 1, 2, 4, 5):
        said, _ = found[rank]
        assert said.startswith("lost s0p3 during "), said
        assert "it could not begin: s0p3 averages other tensors than s0p0" in said


def test_missing_worker_is_named_in_warning_and_error(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, list[str]]:
        said, model = CapturedWarnings(), Point()
        rendezvous.WARN_AFTER = 0.3
        if ctx.rank == 2:
            return "", []
        with pytest.raises(PeerError) as caught:
            GroupSync(model, sgd(model), "age", timeout=1.5)
        return str(caught.value), said.lines

    for said, warned in run_replicas(3, work, tmp_path)[:2]:
        assert "lost s0p2 during beginning after 1." in said
        assert "no GroupSync was made there" in said
        assert len(warned) == 1
        assert "for s0p2, and gives up after 1.5 s" in warned[0]


def test_worker_missing_from_average_all_is_named(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, list[str]]:
        said = CapturedWarnings()
        group_client.WARN_AFTER = 0.3
        model = Point()
        with GroupSync(model, sgd(model), "age", timeout=2.0) as sync:
            if ctx.rank == 1:
                dist.barrier()  # it trains on, or evaluates, or does whatever takes time
                return "", []
            with pytest.raises(PeerError) as caught:
                sync.average_all()
            dist.barrier()
        return str(caught.value), said.lines

    said, warned = run_replicas(2, work, tmp_path)[0]
    assert "during averaging all workers" in said
    assert "s0p1 did not call consolidate() within 1.8 s" in said
    assert warned == [
        "s0p0 has waited 0.3 s for others while averaging all workers, and gives up after 2 s"
    ]


def test_lost_worker_is_logged_on_coordinator_rank(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        said = CapturedWarnings()
        with train(ctx, 5, "age") as sync:
            if ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(40):
                time.sleep(0.05)
                sync.step()
        return said.lines

    found = run_with_failures(3, work, tmp_path, lost={1})
    assert found == {0: ["s0p1 is dead: its connection has closed; 2 are here"], 2: []}


def test_killed_rank_0_is_reported_soon(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[str, bool]:
        model, began = Point(), time.monotonic()
        try:
            with GroupSync(model, sgd(model), "age", timeout=LONG_TIMEOUT) as sync:
                for number in range(100_000):
                    if ctx.rank == 0 and number == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    sync.step()
        except PeerError as error:
            return str(error), time.monotonic() - began < 12  # less than the 15 s of silence
        return "nothing happened", False

    found = run_with_failures(3, work, tmp_path, lost={0})
    for said, is_soon in found.values():
        assert "(in the process of rank 0)" in said
        assert "its connection has closed" in said
        assert is_soon, said


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
    assert all("lost s0p5 during" in said for said in found.values()), found


def test_missing_or_misplaced_parameter_server_is_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        model, said = Point(), []
        with pytest.raises(PolicyError) as caught:  # all three train: nobody serves
            GroupSync(model, sgd(model), "ssp", num_pipelines=3, timeout=LONG_TIMEOUT)
        said.append(str(caught.value))
        with pytest.raises((PolicyError, PeerError)) as caught_too:  # rank 0 serves
            if ctx.rank == 0:
                ParameterServer(num_pipelines=2, timeout=2.0).serve()
            else:
                GroupSync(model, sgd(model), "ssp", timeout=2.0)
        said.append(str(caught_too.value))
        return said

    found = run_replicas(3, work, tmp_path)
    for said, _ in found:
        assert "ssp with 3 workers in a job of 3 processes" in said
        assert "start 4 processes; on rank 3 call ParameterServer(num_pipelines=3)" in said
    assert "a parameter server on rank 0 of 3, for 2 workers" in found[0][1]
    assert "s0p2 in a job of 1 stages x 2 pipelines" in found[2][1]


def test_missing_parameter_server_is_named(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        model = Point()
        if ctx.rank == 2:
            return ""
        with pytest.raises(PeerError) as caught:
            GroupSync(model, sgd(model), "ssp", timeout=1.0)
        return str(caught.value)

    for said in run_replicas(3, work, tmp_path)[:2]:
        assert "lost s0p2 (the parameter server) during beginning" in said


def test_inconsistent_arguments_are_refused(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        model, said = Point(), []
        for arguments, options in (
            ((model, sgd(Point())), {}),
            ((sgd(model), model), {}),
            ((model, sgd(model)), {"policy": "static", "coordinator": "tcp://127.0.0.1:1"}),
            ((model, sgd(model)), {"keys": "job.keys"}),
            ((model, sgd(model)), {"num_pipelines": 9}),
        ):
            with pytest.raises(PolicyError) as caught:
                GroupSync(*arguments, **options)
            said.append(caught.value.wrong)
        return said

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

    assert run_replicas(2, work, tmp_path) == [
        f"s0p{rank} goes on after its GroupSync was closed" for rank in range(2)
    ]


def test_rank_0_close_waits_for_training_workers(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> int:
        model = Point()
        sync = GroupSync(model, sgd(model), "age", timeout=1.0)
        for _ in range(2 if ctx.rank == 0 else 20):
            time.sleep(0.1 if ctx.rank else 0.0)
            sync.step()
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
