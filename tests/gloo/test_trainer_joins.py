"""Processes join a running job of the Trainer, in the place of workers that are lost."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyrhythm.run.comm.launch import RESTART_DELAY, DistContext, LocalJob
from polyrhythm.run.coordinator.epoch_client import EpochClient
from polyrhythm.run.coordinator.epoch_server import LossTimeouts
from polyrhythm.run.trainer import trainer as trainer_module
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.job_record import JobRecords
from tests.gloo import trainer_jobs
from tests.gloo.faults import Fault, after_own_steps, after_step, at_call, both
from tests.gloo.surviving_jobs import Found, membership, stopped_until_lost, train
from tests.gloo.trainer_jobs import fit, plan_of, trainer
from tests.grids import long_except

NUM_STEPS = 40  # of 0.15 s: a process is started again after one second
_STEP = 0.15


def slow_steps(fault: Fault, newcomer_fault: Fault = lambda ctx: None) -> Fault:
    """Let steps take a while; `newcomer_fault` is that of processes that were started again once.

    Later ones have no fault.
    """

    def slow(ctx: DistContext) -> Any:
        faults_of = {0: fault, 1: newcomer_fault}
        callback = faults_of.get(ctx.incarnation, lambda _: None)(ctx)

        def on_step(info: Any) -> None:
            time.sleep(_STEP)
            if callback is not None:
                callback(info)

        return on_step

    return slow


def check(
    found: dict[int, Found], folder: Path, joined: set[int], *, num_steps: int = NUM_STEPS
) -> None:
    """Check that all have made all steps from some one on, with the weights of one process."""
    _, expected = fit(folder / "alone", 1, 1, steps=num_steps)
    weights = dict[str, Tensor]()
    for rank, process in found.items():
        first = process.steps[0]
        assert (first > 0) == (rank in joined)
        assert process.steps == list(range(first, num_steps))
        for name, value in process.weights.items():
            torch.testing.assert_close(value, weights.setdefault(name, value), rtol=0, atol=0)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def run(
    folder: Path,
    shape: tuple[int, int],
    fault: Fault,
    newcomer_fault: Fault = lambda ctx: None,
    **more: Any,
) -> dict[int, Found]:
    slow = slow_steps(fault, newcomer_fault)
    return train(folder, shape, slow, num_steps=NUM_STEPS, restart_delay=RESTART_DELAY, **more)


def joins(folder: Path) -> list[tuple[int, ...]]:
    """Return who has joined in each epoch but the first."""
    begins = [each for each in membership(folder) if each["event"] == "Begin"]
    return [tuple(each["joined"]) for each in begins[1:]]


@pytest.mark.parametrize("sync", long_except(["decoupled", "all_reduce", "balanced"], 0))
def test_a_killed_replica_joins_again(tmp_path: Path, sync: str) -> None:
    found = run(tmp_path, (1, 3), after_step(4, 1), sync=sync)
    assert found.keys() == {0, 1, 2}
    check(found, tmp_path, {1})
    assert joins(tmp_path) == [(), (1,)]


@pytest.mark.long
@pytest.mark.parametrize("sync", ["decoupled", "all_reduce"])
def test_a_killed_stage_joins_again(tmp_path: Path, sync: str) -> None:
    """The other one of its pipeline was a spare meanwhile."""
    found = run(tmp_path, (2, 2), after_step(4, 3), sync=sync)
    assert found.keys() == {0, 1, 2, 3}
    assert found[2].steps[-1] == NUM_STEPS - 1
    found[2] = found[2]._replace(steps=list(range(NUM_STEPS)))
    check(found, tmp_path, {3})


@pytest.mark.long
def test_the_first_process_joins_again(tmp_path: Path) -> None:
    found = run(tmp_path, (1, 2), after_step(4, 0))
    assert found.keys() == {0, 1}
    check(found, tmp_path, {0})


@pytest.mark.long
def test_two_join_at_once(tmp_path: Path) -> None:
    found = run(tmp_path, (1, 4), after_step(4, 1, 3), sync="all_reduce")
    assert found.keys() == {0, 1, 2, 3}
    check(found, tmp_path, {1, 3})


@pytest.mark.parametrize("sync", long_except(["age", "local", "adaptive", "auto"], 0))
def test_groups_go_on_with_a_process_that_joins(tmp_path: Path, sync: str) -> None:
    found = run(tmp_path, (1, 3), after_own_steps(3, 1), sync=sync)
    assert found.keys() == {0, 1, 2}
    assert (1,) in joins(tmp_path)
    for process in found.values():
        for name, value in process.weights.items():
            torch.testing.assert_close(value, found[0].weights[name], rtol=0, atol=0)


NEWCOMER_FAULTS: dict[str, Fault] = {
    "while it starts": at_call(JobRecords, "read_job", 0, 1),
    "when it has enrolled": at_call(JobRecords, "find_fit", 0, 1),
    "while all connect": at_call(trainer_module, "join_epoch", 0, 1),
    "while it gets the state": at_call(trainer_module, "reshard", 0, 1),
    "before its first vote": at_call(EpochClient, "commit", 0, 1),
    "after some steps": after_own_steps(3, 1),
}


@pytest.mark.long
@pytest.mark.parametrize("point", list(NEWCOMER_FAULTS))
def test_a_newcomer_is_killed(tmp_path: Path, point: str) -> None:
    """It comes once more."""
    found = run(tmp_path, (1, 3), after_step(4, 1), NEWCOMER_FAULTS[point])
    assert found.keys() == {0, 1, 2}
    check(found, tmp_path, {1})


@pytest.mark.long
@pytest.mark.parametrize("point", ["connect", "give"])
def test_another_is_killed_while_one_joins(tmp_path: Path, point: str) -> None:
    """Of four; the first one tells a newcomer where training is."""
    name, number = {"connect": ("join_epoch", 2), "give": ("reshard", 1)}[point]
    killed = both(after_step(4, 1), at_call(trainer_module, name, number, 0))
    found = run(tmp_path, (1, 4), killed)
    assert found.keys() == {0, 1, 2, 3}
    check(found, tmp_path, {0, 1})


@pytest.mark.long
def test_a_stopped_process_joins_when_it_wakes(tmp_path: Path) -> None:
    """It learns that it was lost, and ends: its successor joins."""
    timeouts = LossTimeouts(min_heartbeat=1.0, max_heartbeat=1.5)
    with stopped_until_lost(tmp_path, step=4, rank=1) as fault:
        found = run(tmp_path, (1, 3), fault, timeouts=timeouts)
    assert found.keys() == {0, 1, 2}
    check(found, tmp_path, {1})


@pytest.mark.long
def test_a_newcomer_with_another_model_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def other(ctx: DistContext) -> None:
        trainer_jobs.BATCH = 48

    found = run(tmp_path, (1, 3), after_step(4, 1), other, sync="all_reduce")
    assert found.keys() == {0, 2}
    check(found, tmp_path, set())
    assert "this process has batch_size=48, and the job that it joins has" in capfd.readouterr().err


@pytest.mark.long
def test_a_newcomer_that_comes_too_late_exits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, (1, 2), after_step(NUM_STEPS - 8, 1))
    assert found.keys() == {0}
    check(found, tmp_path, set())


@pytest.mark.long
def test_all_are_replaced_one_after_the_other(tmp_path: Path) -> None:
    """Until none of the first is left; the weights are those of one process."""
    fault = slow_steps(both(after_step(3, 0), after_step(40, 1), after_step(80, 2)))
    found = train(tmp_path, (1, 3), fault, num_steps=120, restart_delay=RESTART_DELAY)
    assert found.keys() == {0, 1, 2}
    check(found, tmp_path, {0, 1, 2}, num_steps=120)


@pytest.mark.long
def test_a_process_joins_with_checkpoints_and_evaluations(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    found = run(
        tmp_path,
        (1, 3),
        after_step(4, 1),
        run_dir=run_dir,
        checkpoint=CheckpointConfig(every=3),
        eval_every=4,
    )
    assert found.keys() == {0, 1, 2}
    check(found, tmp_path, {1})
    assert found[0].evals == list(range(4, NUM_STEPS + 1, 4))
    assert (run_dir / "checkpoints" / f"step-{NUM_STEPS:08}").is_dir()


@pytest.mark.long
@pytest.mark.parametrize("first_steps", [8, 16, 24])
def test_a_process_joins_in_a_later_fit(tmp_path: Path, first_steps: int) -> None:
    """It skips those that are over, also one that ends while it waits for the next step."""

    def work(ctx: DistContext) -> None:
        callback = slow_steps(after_step(4, 1))(ctx)
        with trainer(plan_of(1, 3)) as made:
            for max_steps in (first_steps, first_steps + NUM_STEPS):
                made.fit(max_steps=max_steps, callbacks=[callback], progress=False)
            torch.save(made.model.state_dict(), tmp_path / f"found{ctx.rank}.pt")

    with LocalJob(
        work,
        3,
        output_folder=tmp_path / "logs",
        keeps_survivors=True,
        restart_delay=RESTART_DELAY,
    ) as job:
        assert job.wait(60)
    _, expected = fit(tmp_path / "alone", 1, 1, steps=first_steps + NUM_STEPS)
    for rank in range(3):
        found = torch.load(tmp_path / f"found{rank}.pt")
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
