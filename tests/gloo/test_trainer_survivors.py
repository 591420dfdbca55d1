"""Workers of a Trainer's job are lost: the others go on, with the same steps and results."""

import contextlib
import gc
import json
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import WorkerError
from polyrhythm.processes import TERMINATED, Child
from polyrhythm.run.checkpoint import save
from polyrhythm.run.comm import epoch, process_groups
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.comm.process_groups import GlooGroup
from polyrhythm.run.coordinator.epoch_client import EpochClient
from polyrhythm.run.coordinator.epoch_server import LossTimeouts
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer import checkpointer, elastic
from polyrhythm.run.trainer import trainer as trainer_module
from polyrhythm.run.trainer.config import CheckpointConfig, DeviceConfig
from polyrhythm.run.trainer.fit_loop import BufferCopies, FitLoop
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo import faults
from tests.gloo.checkpoint_faults import mount_small_disk
from tests.gloo.faults import Fault, after_step, both
from tests.gloo.surviving_jobs import (
    NUM_STEPS,
    TIMEOUT,
    Found,
    membership,
    stopped_until_lost,
    train,
)
from tests.gloo.surviving_jobs import check as check_survivors
from tests.gloo.trainer_jobs import fit, plan_of, trainer
from tests.gloo.transport_peers import wait_until
from tests.grids import long_except


def check(found: dict[int, Found], folder: Path) -> None:
    check_survivors(found, fit(folder / "alone", 1, 1, steps=NUM_STEPS)[1])


SYNCS = ["decoupled", "all_reduce", "balanced"]


@pytest.mark.parametrize(
    ("sync", "victim"),
    long_except([(sync, victim) for sync in SYNCS for victim in (0, 1)], 0),
)
def test_a_killed_replica(tmp_path: Path, sync: str, victim: int) -> None:
    found = train(tmp_path, (1, 3), after_step(4, victim), sync=sync)
    assert found.keys() == {0, 1, 2} - {victim}
    check(found, tmp_path)


@pytest.mark.parametrize(
    ("sync", "victim"),
    long_except([(s, v) for s in ("decoupled", "all_reduce") for v in (0, 3)], 1),
)
def test_a_killed_stage(tmp_path: Path, sync: str, victim: int) -> None:
    fault = both(after_step(4, victim), faults.write_warnings(tmp_path))
    found = train(tmp_path, (2, 2), fault, sync=sync)
    pipeline = victim // 2
    lost = {2 * pipeline, 2 * pipeline + 1}  # a spare has no result
    assert found.keys() == {0, 1, 2, 3} - lost
    check(found, tmp_path)
    warnings = [path.read_text() for path in tmp_path.glob("warnings*.log")]
    assert len(warnings) == 4
    assert not any("no label" in text for text in warnings), "of steps whose losses are lost"


@pytest.mark.parametrize("sync", long_except(SYNCS, 0))
def test_a_replica_that_runs_out_of_memory(
    tmp_path: Path, sync: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = train(tmp_path, (1, 3), faults.out_of_memory(41, 1), sync=sync)
    assert found.keys() == {0, 2}
    check(found, tmp_path)
    shown = capfd.readouterr().err
    assert "worker of rank 1 failed: " in shown
    assert "s0p1 ran out of memory in F" in shown


@pytest.mark.long
def test_all_run_out_of_memory(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="ran out of memory in F"):
        train(tmp_path, (2, 2), faults.out_of_memory(0, 0, 1, 2, 3))


POINTS = {
    "all_reduce": ["before_vote", "after_vote", "after_commit", "during_exchange", "after_done"],
    "balanced": ["before_vote", "during_exchange"],
    "decoupled": [
        "before_vote",
        "after_vote",
        "after_commit",
        "during_reduce_scatter",
        "during_all_gather",
    ],
}


@pytest.mark.parametrize(
    ("sync", "point"),
    long_except([(s, p) for s in POINTS for p in POINTS[s]], 1, 9, 11),
)
def test_a_loss_at_each_point_of_a_step(tmp_path: Path, sync: str, point: str) -> None:
    found = train(tmp_path, (1, 3), getattr(faults, point)(1), sync=sync)
    assert found.keys() == {0, 2}
    check(found, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("victim", long_except([0, 2], 0))
def test_a_loss_during_an_evaluation(tmp_path: Path, victim: int) -> None:
    fault = faults.during_evaluation(victim)
    found = train(tmp_path, (1, 3), fault, sync="all_reduce", eval_every=3)
    check(found, tmp_path)
    assert all(each.evals == [3, 6, 9, 12] for each in found.values())


@pytest.mark.long
def test_a_loss_during_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = train(
        tmp_path,
        (2, 2),
        faults.during_checkpoint(1),
        sync="all_reduce",
        run_dir=run,
        checkpoint=CheckpointConfig(every=3),
    )
    check(found, tmp_path)
    complete = [path.name for path in (run / "checkpoints").iterdir()]
    assert len(complete) == 3, complete


@pytest.mark.long
def test_a_loss_during_a_checkpoint_for_which_the_disk_is_full(tmp_path: Path) -> None:
    """When there is space again, the survivors save complete checkpoints."""
    disk, shape = tmp_path / "run/checkpoints", (2, 2)
    disk.mkdir(parents=True)

    def full_disk(ctx: DistContext) -> Any:
        def callback(info: Any) -> None:
            if (info.step, ctx.rank) == (4, 0):  # a spare after the loss
                with contextlib.suppress(OSError), (disk / "other").open("wb", 0) as other:
                    while True:
                        other.write(bytes(1024))
            elif (info.step, ctx.rank) == (6, 2):  # metrics are a step late
                assert os.statvfs(disk).f_bavail == 0
                (disk / "other").unlink()

        return callback

    def work() -> None:
        if (problem := mount_small_disk(disk, "512k")) is not None:
            (tmp_path / "problem").write_text(problem)
            return
        fault = both(full_disk, faults.during_checkpoint(1))
        options = {"run_dir": tmp_path / "run", "checkpoint": CheckpointConfig(every=3)}
        check(train(tmp_path, shape, fault, sync="all_reduce", **options), tmp_path)
        complete = sorted(path.name for path in disk.iterdir())
        assert complete == [f"step-{step:08}" for step in (3, 9, 12)]

    child = Child(work, output=tmp_path / "output.txt")
    assert child.wait(TIMEOUT) == 0, (tmp_path / "output.txt").read_text()
    if (tmp_path / "problem").exists():
        pytest.skip(f"no small disk: {(tmp_path / 'problem').read_text()}")


@pytest.mark.parametrize(
    "point", long_except(["while_exchanging", "while_joining", "after_joining"], 0, 2)
)
def test_a_second_loss_while_the_survivors_connect(tmp_path: Path, point: str) -> None:
    killed = both(after_step(4, 1), getattr(faults, point)(2))

    def fault(ctx: DistContext) -> Any:
        elastic._MAX_FRUITLESS = 1  # an epoch that has lost somebody does not count
        return killed(ctx)

    found = train(tmp_path, (1, 4), fault, sync="all_reduce")
    assert found.keys() == {0, 3}
    check(found, tmp_path)


@pytest.mark.parametrize("is_connected", long_except([True, False], 1))
def test_one_survivor_alone_fails_to_connect(tmp_path: Path, is_connected: bool) -> None:
    """The others know it at once, although gloo waits for it for a long time.

    Torch counts groups, also failed ones, and the number is in the keys of the next one.
    """
    killed = after_step(4, 1)

    def fault(ctx: DistContext) -> Any:
        numbers = count()

        class Failing(GlooGroup):
            def __init__(self, store: Any, rank: int, size: int, *args: Any, **more: Any) -> None:
                fails = (ctx.rank, size) == (2, 3) and next(numbers) == 0
                if is_connected or not fails:
                    super().__init__(store, rank, size, *args, **more)
                if fails:
                    raise RuntimeError("connect timeout")

        process_groups.GlooGroup = Failing  # type: ignore[misc]
        epoch._CONNECT_TIMEOUT = 2 * TIMEOUT
        return killed(ctx)

    found = train(tmp_path, (1, 4), fault, sync="all_reduce")
    assert found.keys() == {0, 2, 3}
    check(found, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_survivor_that_never_connects_ends_the_job(tmp_path: Path) -> None:
    killed = after_step(4, 1)

    def fault(ctx: DistContext) -> Any:
        class Failing(GlooGroup):
            def __init__(self, store: Any, rank: int, size: int, *args: Any, **more: Any) -> None:
                super().__init__(store, rank, size, *args, **more)
                if (ctx.rank, size) == (2, 3):
                    raise RuntimeError("connect timeout")

        process_groups.GlooGroup = Failing  # type: ignore[misc]
        elastic._MAX_FRUITLESS = 2
        return killed(ctx)

    with pytest.raises(WorkerError, match="rank 1 was ended by SIGKILL"):
        train(tmp_path, (1, 4), fault, sync="all_reduce")
    for rank in (0, 2, 3):
        output = (tmp_path / f"logs/rank{rank}.log").read_text()
        assert "2 epochs, in which no step was completed" in output


@pytest.mark.long
@pytest.mark.parametrize("sync", long_except(["decoupled", "all_reduce"], 0))
def test_two_losses_at_once_leave_one_pipeline_of_what_is_left(tmp_path: Path, sync: str) -> None:
    found = train(tmp_path, (2, 2), after_step(4, 1, 2), sync=sync)
    assert found.keys() == {0, 3}  # stage 0 of one pipeline, and stage 1 of the other
    check(found, tmp_path)


@pytest.mark.parametrize("sync", long_except(["decoupled", "all_reduce"], 0))
def test_a_spare_becomes_a_worker_again(tmp_path: Path, sync: str) -> None:
    first, second = after_step(3, 1), after_step(7, 2)
    found = train(tmp_path, (2, 3), both(first, second), sync=sync)
    assert found.keys() == {0, 3, 4, 5}  # process 0 was a spare, and takes the place of process 2
    assert found[0].steps != list(range(NUM_STEPS))
    found[0] = found[0]._replace(steps=list(range(NUM_STEPS)))
    check(found, tmp_path)


@pytest.mark.long
def test_a_spare_outlives_many_epochs(tmp_path: Path) -> None:
    """It does not vote, but learns of each epoch that it had commits."""

    def fault(ctx: DistContext) -> Any:
        elastic._MAX_FRUITLESS = 1
        return both(after_step(3, 1), after_step(7, 3))(ctx)

    found = train(tmp_path, (2, 3), fault, sync="all_reduce")
    assert found.keys() == {4, 5}  # processes 0 and 2 are spares until the end
    check(found, tmp_path)


@pytest.mark.long
def test_a_second_loss_while_state_moves(tmp_path: Path) -> None:
    """What was made to receive the state is gone in the next epoch, which makes it again."""
    moving = faults.at_call(trainer_module, "reshard", 0, 3)
    found = train(tmp_path, (1, 4), both(after_step(4, 1), moving), sync="decoupled")
    assert found.keys() == {0, 2}
    check(found, tmp_path)


@pytest.mark.long
def test_a_spare_that_could_not_join_has_still_no_state(tmp_path: Path) -> None:
    """The last worker of its stage dies while it connects: nobody may go on with old weights."""
    last = faults.at_call(trainer_module, "join_epoch", 2, 4)
    fault = both(after_step(3, 1), after_step(7, 2), last)
    with pytest.raises(WorkerError, match="were spares, which do not get them"):
        train(tmp_path, (2, 3), fault, sync="all_reduce")


def slow_steps(ctx: DistContext) -> Any:
    """Let steps take a tenth of a second, without a fault."""
    return lambda info: time.sleep(0.1)


def asked_to_leave(step: int, rank: int) -> Fault:
    """Let steps take a tenth of a second; one process gets SIGTERM after `step`."""

    def fault(ctx: DistContext) -> Any:
        def callback(info: Any) -> None:
            time.sleep(0.1)
            if (ctx.rank, info.step) == (rank, step):
                os.kill(os.getpid(), signal.SIGTERM)

        return callback

    return fault


@pytest.mark.parametrize("rank", long_except([0, 2], 0))
def test_a_worker_that_gets_sigterm_leaves(tmp_path: Path, rank: int) -> None:
    found = train(tmp_path, (1, 3), asked_to_leave(2, rank), sync="all_reduce")
    assert found.keys() == {0, 1, 2} - {rank}
    check(found, tmp_path)
    events = membership(tmp_path)
    assert not any(event["event"] == "End" for event in events), "no step was cut"
    departing = [event["departing"] for event in events if event["event"] == "Begin"]
    assert departing == [(), (rank,)]


def test_a_stopped_process_is_lost_and_ends_when_it_wakes(tmp_path: Path) -> None:
    timeouts = LossTimeouts(min_heartbeat=1.0, max_heartbeat=1.5)
    with stopped_until_lost(tmp_path, step=4, rank=1) as fault:
        found = train(tmp_path, (1, 3), fault, sync="all_reduce", timeouts=timeouts)
    assert found.keys() == {0, 2}
    check(found, tmp_path)


@pytest.mark.long
def test_all_processes_that_are_asked_to_leave_save_and_exit(tmp_path: Path) -> None:
    plan, run = plan_of(1, 3), tmp_path / "run"

    def work(ctx: DistContext) -> None:
        with trainer(plan, sync="all_reduce", run_dir=run) as made:
            made.fit(max_steps=1000, callbacks=[slow_steps(ctx)], progress=False)
        sys.exit("it was not stopped")

    logs = tmp_path / "logs"
    with LocalJob(work, 3, output_folder=logs, keeps_survivors=True) as job:
        assert not job.wait(2.0)
        job.request_stop()
        with pytest.raises(WorkerError) as stopped:
            job.wait(TIMEOUT)
    assert stopped.value.status == TERMINATED
    assert len(list((run / "checkpoints").iterdir())) == 1
    assert len([e for e in membership(tmp_path) if e["event"] == "Begin"]) == 1


def test_a_job_with_a_spare_saves_when_all_are_asked_to_leave(tmp_path: Path) -> None:
    plan, run, logs = plan_of(2, 2), tmp_path / "run", tmp_path / "logs"
    killed = after_step(2, 1)

    def work(ctx: DistContext) -> None:
        callback = killed(ctx) or slow_steps(ctx)
        with trainer(plan, sync="all_reduce", run_dir=run) as made:
            made.fit(max_steps=1000, callbacks=[callback], progress=False)
        sys.exit("it was not stopped")

    def trains_after_loss() -> bool:
        assert not job.wait(0.0)
        return len([event for event in membership(tmp_path) if event["event"] == "Begin"]) == 2

    with LocalJob(work, plan.num_workers, output_folder=logs, keeps_survivors=True) as job:
        log = logs / "membership.jsonl"
        wait_until(lambda: log.exists() and log.stat().st_size > 0, "it starts")
        wait_until(trains_after_loss, "a worker is lost")
        with pytest.raises(WorkerError) as stopped:
            if not job.wait(1.5):
                job.request_stop()
            job.wait(TIMEOUT)
        assert stopped.value.status == TERMINATED
    assert len(list((run / "checkpoints").iterdir())) == 1


@pytest.mark.long
def test_the_last_pipeline_saves_when_one_of_its_workers_is_asked_to_leave(tmp_path: Path) -> None:
    plan, run = plan_of(2, 2), tmp_path / "run"
    faults_of = both(after_step(2, 1), asked_to_leave(8, 3))

    def work(ctx: DistContext) -> None:
        callback = faults_of(ctx) or slow_steps(ctx)
        with trainer(plan, sync="all_reduce", run_dir=run) as made:
            made.fit(max_steps=1000, callbacks=[callback], progress=False)
        sys.exit("it was not stopped")

    logs = tmp_path / "logs"
    job = LocalJob(work, 4, output_folder=logs, keeps_survivors=True)
    with job, pytest.raises(WorkerError):
        assert not job.wait(TIMEOUT), "it goes on"
    assert len(list((run / "checkpoints").iterdir())) == 1


@pytest.mark.long
def test_a_loss_after_a_restore_repeats_no_later_steps(tmp_path: Path) -> None:
    """The steps of the fit before the restore do not count as made."""
    plan, run = plan_of(1, 3), tmp_path / "run"

    def work(ctx: DistContext) -> None:
        with trainer(plan, sync="all_reduce", run_dir=run) as made:
            made.fit(max_steps=2, progress=False)
            made.save()
            made.fit(max_steps=8, progress=False)
            made.restore(run / "checkpoints" / "step-00000002")
            if ctx.rank == 1:
                faults.at_call(EpochClient, "commit", 0, 1)(ctx)
            fitted = made.fit(max_steps=NUM_STEPS, progress=False)
            weights = {name: value.clone() for name, value in made.model.state_dict().items()}
        torch.save((weights, [info.step for info in fitted.steps]), tmp_path / f"{ctx.rank}.pt")

    with LocalJob(work, 3, output_folder=tmp_path / "logs", keeps_survivors=True) as job:
        assert job.wait(TIMEOUT)
    _, expected = fit(tmp_path / "alone", 1, 1, steps=NUM_STEPS)
    for rank in (0, 2):
        weights, steps = torch.load(tmp_path / f"{rank}.pt")
        assert steps == list(range(2, NUM_STEPS))
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_spare_that_works_again_agrees_on_evaluations(tmp_path: Path) -> None:
    fault = both(after_step(3, 1), faults.at_call(EpochClient, "commit", 8, 2))
    found = train(tmp_path, (2, 3), fault, sync="all_reduce", eval_every=4)
    assert found.keys() == {0, 3, 4, 5}
    assert found[3].evals == [4, 8, 12]


@pytest.mark.parametrize(
    ("sync", "point"),
    long_except(
        [(s, p) for s in ("all_reduce", "decoupled") for p in ("before_vote", "after_commit")], 0
    ),
)
def test_a_loss_in_float16(tmp_path: Path, sync: str, point: str) -> None:
    device = DeviceConfig("cpu", autocast=torch.float16)
    found = train(tmp_path, (1, 3), getattr(faults, point)(1), sync=sync, device=device)
    assert found.keys() == {0, 2}
    for each in found.values():
        assert each.steps == list(range(NUM_STEPS))
        for name, value in each.weights.items():
            assert torch.equal(value, found[0].weights[name])


@pytest.mark.long
def test_a_loss_in_float16_while_stages_exchange_their_norms(tmp_path: Path) -> None:
    """The optimizer of the survivors has unscaled its gradients: it does so again."""
    killed = faults.at_call(Pipeline, "clip_grad_norm_", 5, 5)

    def fault(ctx: DistContext) -> Any:
        clip = Pipeline.clip_grad_norm_

        def slow(pipeline: Pipeline, limit: float) -> Tensor:
            if ctx.rank == 1:  # process 0 waits for it, and both learn of the loss
                time.sleep(0.3)
            return clip(pipeline, limit)

        Pipeline.clip_grad_norm_ = slow
        return killed(ctx)

    device = DeviceConfig("cpu", autocast=torch.float16)
    found = train(tmp_path, (2, 3), fault, sync="all_reduce", device=device)
    assert found.keys() == {0, 1, 2, 3}
    assert all(each.steps == list(range(NUM_STEPS)) for each in found.values())


def with_statistics() -> nn.Sequential:
    return nn.Sequential(
        *(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 16), nn.Tanh()),
        *(nn.Linear(16, 4), nn.Identity()),
    )


@pytest.mark.long
def test_statistics_count_no_step_twice(tmp_path: Path) -> None:
    fault = faults.during_all_gather(1)
    found = train(tmp_path, (1, 3), fault, sync="decoupled", model=with_statistics)
    begins = [event for event in membership(tmp_path) if event["event"] == "Begin"]
    num_before = begins[1]["committed"] + 1
    num_microbatches = 4 * num_before + 6 * (NUM_STEPS - num_before)  # of each pipeline
    assert found.keys() == {0, 2}
    for each in found.values():
        assert each.weights["0.num_batches_tracked"] == num_microbatches


def test_running_statistics_of_a_repeated_step_count_once() -> None:
    module = nn.BatchNorm1d(4)
    module(torch.randn(8, 4))
    copies, before = BufferCopies(module), {k: v.clone() for k, v in module.state_dict().items()}
    copies.save()
    module(torch.randn(8, 4))
    assert not torch.equal(module.running_mean, before["running_mean"])
    copies.restore()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module(torch.randn(8, 4))
    copies.save()
    copies.restore()
    assert int(module.num_batches_tracked) == 2


@pytest.mark.long
def test_the_last_checkpoint_is_saved_again_after_a_loss(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saves = CheckpointConfig(every=1000)
    fault = faults.at_call(checkpointer.Checkpointer, "_write", 0, 1)
    found = train(tmp_path, (2, 2), fault, sync="all_reduce", run_dir=run, checkpoint=saves)
    check(found, tmp_path)
    assert len(list((run / "checkpoints").iterdir())) == 1


def test_a_loss_while_the_last_checkpoint_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed = faults.at_call(FitLoop, "_wait_for_last_save", 0, 3)

    def fault(ctx: DistContext) -> Any:
        write = save._write

        def slow(*args: Any) -> Any:
            time.sleep(1.0 * (ctx.rank == 1))
            return write(*args)

        save._write = slow
        return killed(ctx)

    saves = CheckpointConfig(every=1000)
    found = train(tmp_path, (2, 2), fault, sync="all_reduce", run_dir=run, checkpoint=saves)
    assert found.keys() == {0, 1}
    check(found, tmp_path)
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{NUM_STEPS:08}"]


@pytest.mark.parametrize("sync", long_except(["decoupled", "all_reduce", "age"], 0))
def test_a_loss_after_fit(tmp_path: Path, sync: str) -> None:
    def work(ctx: DistContext) -> None:
        with trainer(plan_of(2, 2), sync=sync) as made:
            made.fit(max_steps=4, progress=False)
            if ctx.rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1.0)
        (tmp_path / f"done{ctx.rank}").touch()

    with LocalJob(work, 4, output_folder=tmp_path / "logs", keeps_survivors=True) as job:
        assert job.wait(TIMEOUT), "not done in time"
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1", "done2"]


@pytest.mark.long
def test_a_loss_while_a_callback_reads_the_weights(tmp_path: Path) -> None:
    """They are on their way, and do not come."""
    killed = faults.during_all_gather(1)

    def fault(ctx: DistContext) -> Any:
        killed(ctx)
        fit_of, made = Trainer.fit, list[Trainer]()

        def fit_and_remember(trainer: Trainer, **arguments: Any) -> Any:
            made.append(trainer)
            return fit_of(trainer, **arguments)

        Trainer.fit = fit_and_remember  # type: ignore[method-assign]
        return lambda info: sum(value.norm() for value in made[0].model.state_dict().values())

    found = train(tmp_path, (1, 3), fault, sync="decoupled")
    assert found.keys() == {0, 2}
    check(found, tmp_path)


@pytest.mark.long
def test_nothing_of_an_epoch_that_has_ended_stays_in_memory(tmp_path: Path) -> None:
    killed = after_step(4, 1)

    def fault(ctx: DistContext) -> Any:
        callback = killed(ctx)

        def count_objects(info: Any) -> None:
            if info.step == NUM_STEPS - 2:
                gc.collect()
                kinds = [type(each) for each in gc.get_objects()]
                found = [kinds.count(kind) for kind in (DistributedOptimizer, FitLoop, Pipeline)]
                (tmp_path / f"objects{ctx.rank}.json").write_text(json.dumps(found))

        return callback or count_objects

    train(tmp_path, (1, 3), fault, sync="decoupled")
    found = [json.loads((tmp_path / f"objects{rank}.json").read_text()) for rank in (0, 2)]
    assert found == [[1, 1, 1]] * 2
