"""Runs at the same time: each in its process, none timed before all are prepared."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from polyrhythm.bench.endtoend.at_once import at_once
from polyrhythm.errors import LabError


def run(takes: float, prepared: Callable[[], Any]) -> tuple[int, float, float]:
    """Its process, when it was prepared, and when all were."""
    time.sleep(takes)
    mine = time.monotonic()
    prepared()
    return os.getpid(), mine, time.monotonic()


def test_none_goes_on_before_all_are_prepared() -> None:
    found = at_once([partial(run, takes) for takes in (0.3, 0.0, 0.1)], patience=30)
    assert len({process for process, _, _ in found} | {os.getpid()}) == 4
    last = max(mine for _, mine, _ in found)
    assert found[0][1] == last, "in the order in which they were given"
    assert all(went_on >= last for _, _, went_on in found)


def test_one_that_fails_ends_all_with_its_reason() -> None:
    def fail(_: Callable[[], Any]) -> tuple[int, float, float]:
        raise ValueError("no such layout")

    began = time.monotonic()
    with pytest.raises(LabError, match="rank 1, one of several runs"):
        at_once([partial(run, 0.0), fail], patience=60)
    assert time.monotonic() - began < 30, "nobody waits for a run that has failed"


def test_runs_that_are_not_over_in_time_are_ended() -> None:
    def never(_: Callable[[], Any]) -> tuple[int, float, float]:
        time.sleep(60)
        raise AssertionError

    with pytest.raises(LabError, match="took more than 1 s"):
        at_once([never, never], patience=1)
