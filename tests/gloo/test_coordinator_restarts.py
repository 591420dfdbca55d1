"""The coordinator of a Trainer's job is killed: it is started again, and training goes on."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from polyrhythm.run.comm.launch import DistContext, LocalJob
from tests.gloo.faults import Fault, after_step
from tests.gloo.surviving_jobs import Found, check, membership, train
from tests.gloo.trainer_jobs import fit
from tests.gloo.transport_peers import wait_until
from tests.grids import long_except

NUM_STEPS, _STEP = 40, 0.1


def slow_steps(folder: Path, fault: Fault = lambda ctx: None) -> Fault:
    """Let steps take a while, and write down those of the first process."""

    def slow(ctx: DistContext) -> Any:
        callback = fault(ctx)

        def on_step(info: Any) -> None:
            time.sleep(_STEP)
            if ctx.rank == 0:
                (folder / "step").write_text(str(info.step))
            if callback is not None:
                callback(info)

        return on_step

    return slow


def kill_coordinator(folder: Path, *steps: int) -> Callable[[LocalJob], None]:
    """Kill it after each of these steps."""

    def is_done(step: int) -> bool:
        path = folder / "step"
        return path.exists() and int(path.read_text() or 0) >= step

    def kill(job: LocalJob) -> None:
        for step in steps:
            wait_until(partial(is_done, step), "it trains")
            assert job._coordinator is not None
            os.kill(job._coordinator.process.pid, signal.SIGKILL)

    return kill


def run(
    folder: Path, shape: tuple[int, int], *kills: int, fault: Fault = lambda ctx: None, **more: Any
) -> dict[int, Found]:
    """Train slowly; kill the coordinator after each of these steps."""
    slow, during = slow_steps(folder, fault), kill_coordinator(folder, *kills)
    return train(folder, shape, slow, during=during, **{"num_steps": NUM_STEPS, **more})


def check_exact(found: dict[int, Found], folder: Path) -> None:
    check(found, fit(folder / "alone", 1, 1, steps=NUM_STEPS)[1], num_steps=NUM_STEPS)


@pytest.mark.parametrize("sync", long_except(["decoupled", "all_reduce"], 0))
def test_training_goes_on(tmp_path: Path, sync: str) -> None:
    found = run(tmp_path, (1, 3), 5, sync=sync)
    assert found.keys() == {0, 1, 2}
    check_exact(found, tmp_path)
    begins = [event for event in membership(tmp_path) if event["event"] == "Begin"]
    assert len(begins) >= 2


@pytest.mark.long
def test_it_may_end_again_and_again(tmp_path: Path) -> None:
    found = run(tmp_path, (2, 2), 4, 12, 13, 25)
    assert found.keys() == {0, 1, 2, 3}
    check_exact(found, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_a_worker_is_lost_at_the_same_time(tmp_path: Path, gap: int) -> None:
    """Or a few steps before."""
    found = run(tmp_path, (1, 3), 8 + gap, fault=after_step(8, 1))
    assert found.keys() == {0, 2}
    check_exact(found, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("step", [8, 16, 18, 20])
def test_a_process_joins_at_about_the_same_time(tmp_path: Path, step: int) -> None:
    def fault(ctx: DistContext) -> Any:
        return None if ctx.incarnation else after_step(4, 1)(ctx)

    found = run(tmp_path, (1, 3), step, fault=fault, num_steps=60, restart_delay=0.5)
    assert found.keys() == {0, 1, 2}
    _, expected = fit(tmp_path / "alone", 1, 1, steps=60)
    for process in found.values():
        for name, value in expected.items():
            torch.testing.assert_close(process.weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("sync", ["age", "auto"])
def test_groups_go_on(tmp_path: Path, sync: str) -> None:
    """The scheduler of groups ends with it: what was not averaged may be trained again."""
    found = run(tmp_path, (1, 3), 5, sync=sync)
    assert found.keys() == {0, 1, 2}
    for process in found.values():
        for name, value in process.weights.items():
            torch.testing.assert_close(value, found[0].weights[name], rtol=0, atol=0)
