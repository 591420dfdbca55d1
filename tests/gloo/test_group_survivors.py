"""Workers of a job that averages in groups are lost or leave: the others go on with all samples.

A position is used once by the survivors, or by a lost pipeline whose update an average has. What a
lost pipeline has trained alone is trained again.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from torch import Tensor

from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.rounds import Averager
from polyrhythm.run.averaging.strategies import ModelAveraging
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.coordinator.epoch_client import EpochClient
from polyrhythm.run.coordinator.epoch_server import LossTimeouts
from polyrhythm.run.trainer import elastic, fit_loop, sync_tuner
from polyrhythm.run.trainer import trainer as trainer_module
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.run.trainer.fit_loop import FitLoop, Phase
from polyrhythm.run.trainer.sampler import (
    BalancedShareSampler,
    DispatchedSampler,
    FixedShareSampler,
)
from polyrhythm.run.trainer.sync_strategy import DecoupledStrategy
from polyrhythm.sync.dispatch import SamplerState
from tests.gloo import faults
from tests.gloo.faults import Fault, after_own_steps, at_call, both, end_this_process
from tests.gloo.trainer_jobs import BATCH, ScriptedTuner, plan_of, samples, trainer
from tests.gloo.transport_peers import wait_until
from tests.grids import long_except

NUM_STEPS, _TIMEOUT = 12, 60.0


class Found(NamedTuple):
    """What a survivor has trained."""

    weights: dict[str, Tensor]
    state: SamplerState
    evals: list[int]


def train(
    folder: Path,
    shape: tuple[int, int],
    fault: Fault,
    *,
    num_steps: int = NUM_STEPS,
    eval_every: int | None = None,
    timeouts: LossTimeouts | None = None,
    **more: Any,
) -> dict[int, Found]:
    """Train stages x pipelines; return what the processes that were left have found, by rank."""
    plan = plan_of(*shape)

    def work(ctx: DistContext) -> None:
        _record_positions(folder / f"used{ctx.rank}.jsonl")
        callback = fault(ctx)
        with trainer(plan, **more) as made:
            fitted = made.fit(
                max_steps=num_steps,
                callbacks=[] if callback is None else [callback],
                progress=False,
                eval_every=eval_every,
                eval_dataset=None if eval_every is None else samples(),
            )
            weights = {name: value.clone() for name, value in made.model.state_dict().items()}
            state = made._progress.sampler_state
        found = Found(weights, state, [step for step, _ in fitted.evals])
        torch.save(found, folder / f"found{ctx.rank}.pt")

    folder.mkdir(exist_ok=True)
    logs, num = folder / "logs", plan.num_workers
    with LocalJob(work, num, output_folder=logs, keeps_survivors=True, timeouts=timeouts) as job:
        assert job.wait(_TIMEOUT), "not done in time"
    paths = {rank: folder / f"found{rank}.pt" for rank in range(num)}
    return {
        rank: torch.load(path, weights_only=False) for rank, path in paths.items() if path.exists()
    }


def _record_positions(path: Path) -> None:
    """Write the positions of each step of this process when its update is made."""
    taken: list[tuple[tuple[int, int], ...]] = []

    def record(sampler: type[Any]) -> None:  # a single pipeline has a fixed share: everything
        get_next, acknowledge = sampler.next, sampler.acknowledge

        def recorded_next(self: Any) -> Any:
            if (found := get_next(self)) is not None:
                taken.append(found.ranges)
            return found

        def recorded_acknowledge(self: Any) -> None:
            if taken:  # on a first stage
                with path.open("a") as file:
                    file.write(json.dumps(taken[-1]) + "\n")
            acknowledge(self)

        sampler.next, sampler.acknowledge = recorded_next, recorded_acknowledge

    record(DispatchedSampler)
    record(FixedShareSampler)
    record(BalancedShareSampler)


def positions_of(folder: Path, rank: int) -> list[int]:
    """Return the positions that a first stage has used, in order."""
    path = folder / f"used{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    ranges = [tuple(each) for line in lines for each in json.loads(line)]
    return [position for low, high in ranges for position in range(low, high)]


def check(
    found: dict[int, Found], shape: tuple[int, int], folder: Path, num_steps: int = NUM_STEPS
) -> None:
    """Check that each position counts once, and that replicas have equal weights in the end."""
    num_stages, num_pipelines = shape
    total = num_steps * BATCH
    weights = dict[str, Tensor]()
    for survivor in found.values():
        state = survivor.state
        assert (state.num_used, state.pool, state.outstanding) == (total, (), ())
        for name, value in survivor.weights.items():
            assert value.isfinite().all()
            torch.testing.assert_close(value, weights.setdefault(name, value), rtol=0, atol=0)
    first_stages = [rank for rank in found if rank % num_stages == 0]
    own = [position for rank in first_stages for position in positions_of(folder, rank)]
    assert len(own) == len(set(own)), "the survivors have trained a position twice"
    ranks = [pipeline * num_stages for pipeline in range(num_pipelines)]
    others = {p for rank in ranks if rank not in found for p in positions_of(folder, rank)}
    assert {*own, *others} == set(range(total)), "nobody has trained a position"
    assert first_stages, "no first stage is left"


MODES = ["adaptive", "age", "local", "random", "smart", "partial_reduce", "pairwise"]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("sync", "victim"),
    long_except([(sync, victim) for sync in MODES for victim in (0, 1)], 0),
)
def test_a_killed_replica(tmp_path: Path, sync: str, victim: int) -> None:
    found = train(tmp_path, (1, 3), after_own_steps(3, victim), sync=sync)
    assert found.keys() == {0, 1, 2} - {victim}
    check(found, (1, 3), tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("sync", "victim"),
    long_except([(sync, victim) for sync in ("adaptive", "local") for victim in range(4)], 3),
)
def test_a_killed_stage(tmp_path: Path, sync: str, victim: int) -> None:
    found = train(tmp_path, (2, 2), after_own_steps(3, victim), sync=sync)
    pipeline = victim // 2
    assert found.keys() == {0, 1, 2, 3} - {2 * pipeline, 2 * pipeline + 1}  # one is a spare
    check(found, (2, 2), tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("shape", "victims"),
    [((2, 3), (0, 3)), ((1, 4), (0, 1)), ((2, 2), (0, 3)), ((1, 4), (0, 1, 2))],
)
@pytest.mark.long
def test_several_killed(tmp_path: Path, shape: tuple[int, int], victims: tuple[int, ...]) -> None:
    faults = [after_own_steps(3, victim) for victim in victims]
    found = train(tmp_path, shape, both(*faults), sync="age")
    assert not found.keys() & set(victims)
    check(found, shape, tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("shape", "victim"), [((1, 3), 0), ((1, 3), 2), ((2, 2), 0), ((2, 2), 3)])
@pytest.mark.long
def test_a_worker_leaves(tmp_path: Path, shape: tuple[int, int], victim: int) -> None:
    fault = after_own_steps(3, victim, how=signal.SIGTERM)
    found = train(tmp_path, shape, fault, sync="adaptive")
    assert victim not in found
    check(found, shape, tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.long
def test_each_loss_after_steps_is_the_first_one_again(tmp_path: Path) -> None:
    """Nobody votes in groups: samples that are used show that an epoch was of use."""

    def fault(ctx: DistContext) -> Any:
        elastic._MAX_FRUITLESS = 2
        return one_after_the_other(ctx)

    found = train(tmp_path, (1, 3), fault, sync="adaptive", num_steps=60)
    assert found.keys() == {0}
    check(found, (1, 3), tmp_path, 60)


def one_after_the_other(ctx: DistContext) -> Any:
    """Kill each process but the first, with time for steps of the others between."""
    numbers = count(1)

    def callback(info: Any) -> None:
        time.sleep(0.02)
        if next(numbers) == 12 * ctx.rank:
            end_this_process(signal.SIGKILL)

    return callback


@pytest.mark.timeout(150)
@pytest.mark.long
def test_six_losses_one_after_the_other(tmp_path: Path) -> None:
    found = train(tmp_path, (1, 7), one_after_the_other, sync="adaptive", num_steps=400)
    assert found.keys() == {0}
    check(found, (1, 7), tmp_path, 400)


@pytest.mark.timeout(90)
@pytest.mark.long
def test_a_block_of_steps_that_ends_when_the_epoch_does(tmp_path: Path) -> None:
    """The thread that ends the samples is slower than the last average."""

    def fault(ctx: DistContext) -> Any:
        end_samples = Phase.end_samples

        def slow(phase: Phase) -> None:
            time.sleep(2.0)
            end_samples(phase)

        Phase.end_samples = slow
        return after_own_steps(3, 1)(ctx)

    found = train(tmp_path, (1, 3), fault, sync="adaptive")
    assert found.keys() == {0, 2}
    check(found, (1, 3), tmp_path)


def asked_before_fit(folder: Path, sync: str, num_steps: Sequence[int]) -> list[int]:
    """Ask process 1 to leave before the last of several fits; return who has made all steps."""

    def work(ctx: DistContext) -> None:
        with trainer(plan_of(1, 3), sync=sync) as made:
            for number in num_steps:
                if number == num_steps[-1] and ctx.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1.2 * (number == num_steps[-1]))  # longer than an epoch would last
                made.fit(max_steps=number, progress=False)
        (folder / f"done{ctx.rank}").touch()

    with LocalJob(work, 3, output_folder=folder / "logs", keeps_survivors=True) as job:
        assert job.wait(_TIMEOUT), "not done in time"
    return [rank for rank in range(3) if (folder / f"done{rank}").exists()]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("sync", "num_steps"),
    long_except([("adaptive", (12,)), ("adaptive", (6, 12)), ("auto", (12,))], 0),
)
def test_sigterm_before_a_fit_takes_effect_in_it(
    tmp_path: Path, sync: str, num_steps: tuple[int, ...]
) -> None:
    assert asked_before_fit(tmp_path, sync, num_steps) == [0, 2]


@pytest.mark.timeout(90)
@pytest.mark.long
def test_sigterm_during_a_switch_to_groups_takes_effect_there(tmp_path: Path) -> None:
    def fault(ctx: DistContext) -> Any:
        sync_tuner.AutoSwitch = partial(ScriptedTuner, ("adaptive",))
        make_strategy = FitLoop._make_strategy

        def patched(fit: FitLoop, mode: Any) -> Any:
            if (ctx.rank, mode.name) == (1, "adaptive"):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)
            return make_strategy(fit, mode)

        FitLoop._make_strategy = patched
        return lambda info: time.sleep(0.1)

    found = train(tmp_path, (1, 3), fault, sync="auto", num_steps=60)
    assert found.keys() == {0, 2}
    check(found, (1, 3), tmp_path, 60)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("sync", long_except(MODES, 1))
def test_a_replica_with_weights_that_are_not_finite(
    tmp_path: Path, sync: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = train(tmp_path, (1, 3), faults.not_finite(1, 1), sync=sync)
    assert found.keys() == {0, 2}
    check(found, (1, 3), tmp_path)
    assert "the weights of s0p1 are not finite, and are not averaged" in capfd.readouterr().err


@pytest.mark.timeout(90)
@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_replica_that_runs_out_of_memory(tmp_path: Path, victim: int) -> None:
    found = train(tmp_path, (1, 3), faults.out_of_memory(1, victim), sync="adaptive")
    assert found.keys() == {0, 1, 2} - {victim}
    check(found, (1, 3), tmp_path)


@pytest.mark.timeout(90)
def test_a_leave_in_the_last_step_before_a_switch_to_groups(tmp_path: Path) -> None:
    """The step ends the epoch: nobody begins the other mode, in which votes are not answered."""

    def fault(ctx: DistContext) -> Any:
        sync_tuner.AutoSwitch = partial(ScriptedTuner, ("adaptive",))

        def callback(info: Any) -> None:
            if info.step == 0:  # metrics come a step late: step 2, the last one, ends the epoch
                if ctx.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.8)

        return callback

    start = time.monotonic()
    found = train(tmp_path, (1, 3), fault, sync="auto", num_steps=30, timeout=300.0)
    assert time.monotonic() - start < _TIMEOUT
    assert found.keys() == {0, 2}
    check(found, (1, 3), tmp_path, 30)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("sync", long_except(["adaptive", "auto"], 0))
def test_the_last_pipeline_goes_on_in_the_middle_of_a_step(tmp_path: Path, sync: str) -> None:
    """The others are lost when it has no samples left but theirs, which make no whole step."""

    def fault(ctx: DistContext) -> Any:
        settle = trainer_module.settle_groups

        def with_unused(start: Any, step_of: Any) -> Any:
            settled, state = settle(start, step_of)
            low = state.next - BATCH - BATCH // 3
            state = SamplerState(next=state.next, pool=((low, low + BATCH // 3),))
            own = structs.replace(settled.states[0], step=step_of(state))
            return replace(settled, states={0: own}), state

        trainer_module.settle_groups = with_unused
        return after_own_steps(3, 1)(ctx)

    found = train(tmp_path, (1, 2), fault, sync=sync)
    assert found.keys() == {0}
    state = found[0].state
    assert (state.num_used, state.pool) == (NUM_STEPS * BATCH, ())


POINTS = {
    "before Ready": (Averager, "publish", 3, "before"),
    "after Ready": (Averager, "publish", 3, "sent"),
    "after Assign": (Averager, "_average", 2, "before"),
    "during the exchange": (Averager, "_exchange", 2, "before"),
    "before Done": (Averager, "_exchange", 2, "after"),
    "after Done": (Averager, "_average", 2, "sent"),
    "at a Commit": (Averager, "_commit", 2, "before"),
    "before the acknowledgement": (DispatchedSampler, "acknowledge", 2, "before"),
    "after the acknowledgement": (DispatchedSampler, "acknowledge", 2, "sent"),
    "before the last average": (ModelAveraging, "average_all", 0, "before"),
    "after the last average": (ModelAveraging, "average_all", 0, "after"),
    "starting the scheduler": (EpochClient, "host_groups", 0, "before"),
    "before the end of fit": (EpochClient, "commit", 0, "before"),
    "after the end of fit": (EpochClient, "commit", 0, "after"),
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("point", long_except(list(POINTS), 4))
def test_a_loss_at_any_point(tmp_path: Path, point: str, victim: int) -> None:
    where, name, number, when = POINTS[point]
    if victim and point.startswith("starting"):
        victim = 0  # only the first worker asks for it
    if victim and point.endswith("acknowledgement"):
        victim = 2  # a first stage
    found = train(tmp_path, (2, 3), at_call(where, name, number, victim, when=when), sync="age")
    assert victim not in found
    check(found, (2, 3), tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_loss_during_an_evaluation(tmp_path: Path, victim: int) -> None:
    fault = faults.during_evaluation(victim)
    found = train(tmp_path, (1, 3), fault, sync="adaptive", eval_every=3)
    check(found, (1, 3), tmp_path)
    assert all(each.evals == [3, 6, 9, 12] for each in found.values())


@pytest.mark.timeout(90)
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:checkpoint of step 6 skipped")
@pytest.mark.parametrize("victim", [0, 2])
def test_a_loss_during_a_checkpoint(tmp_path: Path, victim: int) -> None:
    run = tmp_path / "run"
    saves = CheckpointConfig(every=3)
    fault = faults.during_checkpoint(0) if victim == 0 else after_own_steps(3, victim)
    found = train(tmp_path, (1, 3), fault, sync="adaptive", run_dir=run, checkpoint=saves)
    check(found, (1, 3), tmp_path)
    assert "12" in {path.name.lstrip("step-0") for path in (run / "checkpoints").iterdir()}


@pytest.mark.timeout(90)
@pytest.mark.long
@pytest.mark.parametrize("point", ["while_joining", "after_joining"])
def test_a_second_loss_while_the_survivors_connect(tmp_path: Path, point: str) -> None:
    fault = both(after_own_steps(3, 1), getattr(faults, point)(2))
    found = train(tmp_path, (1, 4), fault, sync="age")
    assert found.keys() == {0, 3}
    check(found, (1, 4), tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_lost_and_ends_when_it_wakes(tmp_path: Path, victim: int) -> None:
    fault, pid_file = after_own_steps(3, victim, how=signal.SIGSTOP), tmp_path / "pid"
    timeouts = LossTimeouts(min_heartbeat=5.0, max_heartbeat=5.0)

    def noting(ctx: DistContext) -> Any:
        if ctx.rank == victim:
            pid_file.write_text(str(os.getpid()))
        return fault(ctx)

    def wake() -> None:
        wait_until(lambda: (tmp_path / "logs/membership.jsonl").exists(), "the job starts")
        log = tmp_path / "logs" / "membership.jsonl"
        wait_until(lambda: '"Lost"' in log.read_text(), "it is lost")
        os.kill(int(pid_file.read_text()), signal.SIGCONT)

    waking = threading.Thread(target=wake)
    waking.start()
    found = train(tmp_path, (1, 3), noting, sync="adaptive", timeouts=timeouts)
    waking.join()
    assert found.keys() == {0, 1, 2} - {victim}
    check(found, (1, 3), tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_fixed_groups_without_a_scheduler(tmp_path: Path, victim: int) -> None:
    """`static` is in lockstep: a step counts when all have voted, although replicas differ."""
    found = train(tmp_path, (1, 4), after_own_steps(3, victim), sync="static")
    assert found.keys() == {0, 1, 2, 3} - {victim}
    check(found, (1, 4), tmp_path)


AUTO_MODES = ("adaptive", "balanced", "age", "decoupled", "balanced")


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("shape", "victim", "number"),
    long_except(
        [((1, 4), victim, number) for victim in (0, 1) for number in (2, 5, 7, 9, 11, 14, 17)]
        + [((2, 3), victim, number) for victim in (0, 3) for number in (2, 6, 10, 14)],
        8,
    ),
)
def test_a_loss_before_or_after_a_switch_of_modes(
    tmp_path: Path, shape: tuple[int, int], victim: int, number: int
) -> None:
    killed = after_own_steps(number, victim)

    def fault(ctx: DistContext) -> Any:
        sync_tuner.AutoSwitch = partial(ScriptedTuner, AUTO_MODES)
        return killed(ctx)

    found = train(tmp_path, shape, fault, sync="auto", num_steps=40)
    assert victim not in found
    check(found, shape, tmp_path, 40)


SWITCHES = {
    "the decision": (FitLoop, "_decide", 0, "before"),
    "after the decision": (FitLoop, "_decide", 0, "after"),
    "the end of groups": (FitLoop, "_decide", 1, "before"),
    "after groups": (FitLoop, "_decide", 1, "after"),
    "the optimizer's state": (fit_loop, "broadcast_optimizer_state", 0, "before"),
    "after the optimizer's state": (fit_loop, "broadcast_optimizer_state", 0, "after"),
    "into groups": (GroupSync, "__init__", 0, "before"),
    "into a mode with shards": (DecoupledStrategy, "__init__", 1, "before"),
    "in a mode with shards": (DecoupledStrategy, "__init__", 1, "after"),
}


@pytest.mark.timeout(90)
@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("point", SWITCHES)
def test_a_loss_during_a_switch_of_modes(tmp_path: Path, point: str, victim: int) -> None:
    where, name, number, when = SWITCHES[point]
    killed = at_call(where, name, number, victim, when=when)

    def fault(ctx: DistContext) -> Any:
        modes = ("adaptive", "decoupled", "age", "decoupled")
        sync_tuner.AutoSwitch = partial(ScriptedTuner, modes)
        return killed(ctx)

    found = train(tmp_path, (2, 3), fault, sync="auto", num_steps=40)
    assert victim not in found
    check(found, (2, 3), tmp_path, 40)
