"""Concurrent runs: each in its process, none timed before all are prepared."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest

from benchmarks.harness.pool import run_concurrently
from polyrhythm.errors import LabError, PlanError, UserError

Times = tuple[float, int, float, float]
Barrier = Callable[[], object]


def run(duration: float, barrier: Barrier) -> Times:
    """Return the duration, the process, when it was prepared, and when it continued."""
    time.sleep(duration)
    prepared = time.monotonic()
    barrier()
    continued = time.monotonic()
    time.sleep(duration)
    return duration, os.getpid(), prepared, continued


def test_no_run_continues_before_all_are_prepared() -> None:
    durations = [0.3, 0.0, 0.1]
    times = run_concurrently([partial(run, duration) for duration in durations], timeout=30)
    assert [duration for duration, _, _, _ in times] == durations
    assert len({process for _, process, _, _ in times} | {os.getpid()}) == 4
    last = max(prepared for _, _, prepared, _ in times)
    assert all(continued >= last for _, _, _, continued in times)


def refuse(_: Barrier) -> Times:
    raise PlanError("no such layout", expected="one of three", fix="choose another")


def raise_key_error(_: Barrier) -> Times:
    raise KeyError("no such layout")


def kill_itself(_: Barrier) -> Times:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize(
    ("fail", "error", "reason"),
    [
        (refuse, PlanError, r"rank 1, .*no such layout\n  expected: one of three\n"),
        (raise_key_error, LabError, "rank 1, .*KeyError: 'no such layout'"),
        (kill_itself, LabError, "rank 1, .*SIGKILL"),
    ],
)
def test_a_run_that_fails_ends_all_with_its_reason(
    fail: Callable[[Barrier], Times], error: type[UserError], reason: str
) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=reason):
        run_concurrently([partial(run, 0.0), fail], timeout=60)
    assert time.monotonic() - start < 30, "nobody waits for a run that has failed"


def test_runs_that_exceed_the_timeout_are_ended() -> None:
    def sleep(_: Barrier) -> Times:
        time.sleep(60)
        raise AssertionError

    with pytest.raises(LabError, match="1 s"):
        run_concurrently([sleep, sleep], timeout=1)
