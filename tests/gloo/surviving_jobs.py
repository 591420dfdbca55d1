"""Trainer jobs of which workers are lost, and what the survivors must have then."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.coordinator.epoch_server import LossTimeouts
from polyrhythm.sync.log_reader import membership_changes
from polyrhythm.types import Seconds
from tests.gloo.faults import Fault, after_step
from tests.gloo.trainer_jobs import plan_of, samples, trainer
from tests.gloo.transport_peers import wait_until

NUM_STEPS, TIMEOUT = 12, 60.0


class Found(NamedTuple):
    """What a survivor has trained."""

    steps: list[int]
    weights: dict[str, Tensor]
    evals: list[int]


def train(
    folder: Path,
    shape: tuple[int, int],
    fault: Fault,
    *,
    eval_every: int | None = None,
    timeouts: LossTimeouts | None = None,
    limit: Seconds = TIMEOUT,
    num_steps: int = NUM_STEPS,
    restart_delay: Seconds | None = None,
    during: Callable[[LocalJob], None] | None = None,
    **more: Any,
) -> dict[int, Found]:
    """Train stages x pipelines; return what the processes that were left have found, by rank."""
    plan = more.pop("plan", None) or plan_of(*shape)

    def work(ctx: DistContext) -> None:
        callback = fault(ctx)
        with trainer(plan, **more) as made:
            fitted = made.fit(
                max_steps=num_steps,
                callbacks=[] if callback is None else [callback],
                progress=False,
                eval_every=eval_every,
                eval_dataset=None if eval_every is None else samples(),
            )
            weights = {name: value.cpu().clone() for name, value in made.model.state_dict().items()}
        steps, evals = [info.step for info in fitted.steps], [step for step, _ in fitted.evals]
        torch.save((steps, weights, evals), folder / f"found{ctx.rank}.pt")

    folder.mkdir(exist_ok=True)
    logs, num = folder / "logs", plan.num_workers
    with LocalJob(
        work,
        num,
        output_folder=logs,
        keeps_survivors=True,
        restart_delay=restart_delay,
        timeouts=timeouts,
    ) as job:
        if during is not None:
            thread = threading.Thread(target=during, args=(job,))
            thread.start()
        assert job.wait(limit), "not done in time"
        if during is not None:
            thread.join()
    paths = {rank: folder / f"found{rank}.pt" for rank in range(num)}
    return {rank: Found(*torch.load(path)) for rank, path in paths.items() if path.exists()}


def check(
    found: dict[int, Found],
    expected: Mapping[str, Tensor],
    *,
    num_steps: int = NUM_STEPS,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Check that the survivors made all steps, once each, and have the weights of one process."""
    weights = dict[str, Tensor]()
    for survivor in found.values():
        assert survivor.steps == list(range(num_steps))
        for name, value in survivor.weights.items():
            torch.testing.assert_close(value, weights.setdefault(name, value), rtol=0, atol=0)
    assert weights.keys() == expected.keys(), "some stage has no survivor"
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=rtol, atol=atol)


@contextmanager
def stopped_until_lost(folder: Path, *, step: int, rank: int) -> Iterator[Fault]:
    """Yield a fault that stops a process after a step; wake it when it is lost."""
    fault, pid_file = after_step(step, rank, how=signal.SIGSTOP), folder / "pid"

    def noting(ctx: DistContext) -> Any:
        if ctx.rank == rank:
            pid_file.write_text(str(os.getpid()))
        return fault(ctx)

    def wake() -> None:
        log = folder / "logs/membership.jsonl"
        wait_until(lambda: log.exists() and log.stat().st_size > 0, "the job starts")
        wait_until(lambda: "Lost" in {e["event"] for e in membership(folder)}, "it is lost")
        os.kill(int(pid_file.read_text()), signal.SIGCONT)

    waking = threading.Thread(target=wake)
    waking.start()
    try:
        yield noting
    finally:
        waking.join()


def membership(folder: Path) -> list[dict[str, Any]]:
    """Return the coordinator's log."""
    changes = membership_changes(folder / "logs/membership.jsonl")
    return [{"event": name, **msgspec.structs.asdict(change)} for name, change in changes]
