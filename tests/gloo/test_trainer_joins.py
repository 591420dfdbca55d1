"""Processes join a running job of the Trainer, in the place of workers that are lost."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyrhythm.run.comm.launch import DistContext
from tests.gloo.faults import Fault, after_step
from tests.gloo.surviving_jobs import Found, membership, train
from tests.gloo.trainer_jobs import fit

NUM_STEPS = 40  # of 0.15 s: a process is started again after one second
_STEP = 0.15


def slow_steps(fault: Fault) -> Fault:
    """Let steps take a while, and processes that join have no fault."""

    def slow(ctx: DistContext) -> Any:
        callback = None if ctx.incarnation else fault(ctx)

        def on_step(info: Any) -> None:
            time.sleep(_STEP)
            if callback is not None:
                callback(info)

        return on_step

    return slow


def check(found: dict[int, Found], folder: Path, joined: set[int]) -> None:
    """Check that all have made all steps from some one on, with the weights of one process."""
    _, expected = fit(folder / "alone", 1, 1, steps=NUM_STEPS)
    weights = dict[str, Tensor]()
    for rank, process in found.items():
        first = process.steps[0]
        assert (first > 0) == (rank in joined)
        assert process.steps == list(range(first, NUM_STEPS))
        for name, value in process.weights.items():
            torch.testing.assert_close(value, weights.setdefault(name, value), rtol=0, atol=0)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sync", ["decoupled", "all_reduce", "balanced"])
def test_a_killed_replica_joins_again(tmp_path: Path, sync: str) -> None:
    found = train(
        tmp_path,
        (1, 3),
        slow_steps(after_step(4, 1)),
        sync=sync,
        num_steps=NUM_STEPS,
        restarts=True,
    )
    assert found.keys() == {0, 1, 2}
    check(found, tmp_path, {1})
    joined = [each["joined"] for each in membership(tmp_path) if each["event"] == "Begin"]
    assert joined == [[], [], [1]]
