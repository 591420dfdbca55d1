"""A pool of worker processes: answers in rank order, and failures which name the rank and cause."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

import pytest

from benchmarks.harness.pool import LocalHosts, PoolWorker, ProgressMessage, WorkerPool
from polyrhythm.errors import LabError, PeerError, PlanError


class Squares:
    def __init__(self, worker: PoolWorker) -> None:
        self._worker = worker

    def square(self, number: int) -> tuple[int, int]:
        time.sleep(0.05 * (self._worker.world_size - self._worker.rank))  # the last rank first
        return self._worker.rank, number**2


def serve_squares(worker: PoolWorker) -> None:
    worker.serve(Squares(worker))


def test_answers_come_in_rank_order_and_the_workers_end() -> None:
    with WorkerPool(LocalHosts(3), serve_squares, serves_orders=True) as pool:
        assert pool.call("square", 3) == [(0, 9), (1, 9), (2, 9)]
        assert pool.call("square", 4) == [(0, 16), (1, 16), (2, 16)]
        processes = [child.pid for child in pool._children]
    assert [child.status for child in pool._children] == [0, 0, 0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert not pool.folder.exists()


def only_rank_1_answers(worker: PoolWorker) -> None:
    if worker.rank == 1:
        worker.send("here")
    worker.recv("waiting for the end")


def test_ranks_without_an_answer_are_named() -> None:
    with WorkerPool(LocalHosts(3), only_rank_1_answers) as pool:
        with pytest.raises(LabError, match=r"joining: .*\[0, 1, 2\] in 0 s"):
            pool.gather("joining", 0.0)
        with pytest.raises(LabError, match=r"joining: .*\[0, 2\] in 3 s"):
            pool.gather("joining", 3.0)


def refuse(worker: PoolWorker) -> None:
    error = PlanError("no such layout", expected="one of three", fix="choose another")
    if worker.rank == 2:
        worker.send(error)
    worker.recv("waiting for the end")


def divide_by_zero(worker: PoolWorker) -> None:
    if worker.rank == 2:
        raise ZeroDivisionError("no such layout")
    worker.recv("waiting for the end")


@pytest.mark.parametrize(
    ("work", "error", "reason"),
    [
        (refuse, PlanError, "rank 2, a step: no such layout\n  expected: one of three"),
        (divide_by_zero, LabError, "rank 2, a step: failed: ZeroDivisionError: no such layout"),
    ],
)
def test_a_worker_that_fails_is_named_with_its_reason(
    work: Callable[[PoolWorker], None], error: type[Exception], reason: str
) -> None:
    start = time.monotonic()
    with WorkerPool(LocalHosts(3), work) as pool, pytest.raises(error) as raised:
        pool.gather("a step")
    assert str(raised.value).startswith(reason)
    assert time.monotonic() - start < pool.timeout, "nobody waits for a worker that has failed"


@dataclass(frozen=True)
class StepMessage(ProgressMessage):
    step: int


def report_steps(worker: PoolWorker) -> None:
    for step in range(6):
        time.sleep(0.7)  # all of them last longer than the timeout
        worker.send(StepMessage(step))
    worker.send("done")


@pytest.mark.long
def test_progress_restarts_the_timeout_and_is_no_answer() -> None:
    steps = []
    with WorkerPool(LocalHosts(2), report_steps) as pool:
        answers = pool.gather("training", 3.0, on_progress=steps.append)
    assert answers == ["done", "done"]
    assert sorted(message.step for message in steps) == sorted([*range(6), *range(6)])


def test_a_worker_does_not_wait_for_ever_for_its_driver() -> None:
    driver, pipe = Pipe()
    worker = PoolWorker(
        rank=0,
        world_size=1,
        host="local0",
        master="127.0.0.1",
        port=0,
        in_lab=False,
        timeout=10.0,
        driver=pipe,
        folder=Path(),
    )
    driver.send(3.0)
    assert worker.recv("preparing") == 3.0
    with pytest.raises(PeerError, match=r"preparing .* 0\.01 s"):
        worker.recv("preparing", 0.01)
    driver.close()
    with pytest.raises(PeerError, match="the driver has ended"):
        worker.recv("preparing")
    pipe.close()


def send_process_group(worker: PoolWorker) -> None:
    worker.send(os.getpgid(0))
    worker.recv("waiting for the end")


def test_an_error_in_the_block_ends_all_workers() -> None:
    with pytest.raises(KeyError), WorkerPool(LocalHosts(2), send_process_group) as pool:
        pool.gather("joining")
        raise KeyError("driver")
    assert all(child.status is not None for child in pool._children)
