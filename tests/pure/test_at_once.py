"""Runs at the same time: each in its process, none timed before all are prepared."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.endtoend.at_once import at_once
from polyrhythm.errors import LabError, PlanError

Found = tuple[float, int, float, float]


def run(takes: float, prepared: Callable[[], Any]) -> Found:
    """What it takes, before and after, its process, when it was prepared, and when all were."""
    time.sleep(takes)
    mine = time.monotonic()
    prepared()
    went_on = time.monotonic()
    time.sleep(takes)
    return takes, os.getpid(), mine, went_on


def test_no_run_starts_before_all_are_prepared() -> None:
    given = [0.3, 0.0, 0.1]
    found = at_once([partial(run, takes) for takes in given], patience=30)
    assert [takes for takes, _, _, _ in found] == given
    assert len({process for _, process, _, _ in found} | {os.getpid()}) == 4
    last = max(mine for _, _, mine, _ in found)
    assert all(went_on >= last for _, _, _, went_on in found)


def refuse(_: Callable[[], Any]) -> Found:
    raise PlanError("no such layout", expected="one of three", fix="choose another")


def break_down(_: Callable[[], Any]) -> Found:
    raise KeyError("no such layout")


def die(_: Callable[[], Any]) -> Found:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (refuse, "run 2 of 2: no such layout\n  expected: one of three\n  fix: choose another"),
        (break_down, "run 2 of 2: KeyError: 'no such layout'"),
        (die, "run 2 of 2: was ended by SIGKILL"),
    ],
    ids=["refuses", "breaks down", "dies"],
)
def test_failed_run_ends_all_with_its_reason(
    fail: Callable[[Callable[[], Any]], Found], reason: str
) -> None:
    began = time.monotonic()
    with pytest.raises(LabError, match=reason):
        at_once([partial(run, 0.0), fail], patience=60)
    assert time.monotonic() - began < 30, "nobody waits for a run that has failed"


def test_runs_are_killed_after_the_timeout() -> None:
    def never(_: Callable[[], Any]) -> Found:
        time.sleep(60)
        raise AssertionError

    with pytest.raises(LabError, match="took more than 1 s"):
        at_once([never, never], patience=1)
