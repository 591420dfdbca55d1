"""A Trainer's job with emulated compute, in which processes are killed or asked to leave.

Each layer sleeps in its forward and backward, so that many workers fit on a few cores. Each process
writes when its steps have ended, by the clock that all processes of a machine share.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from polyrhythm.plan.degrees import Degrees
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.types import Seconds

_WIDTH, _NUM_SAMPLES, _LEARNING_RATE = 32, 4096, 1e-3
_POLL: Seconds = 0.01


class _Sleep(torch.autograd.Function):
    """Passes its input on; sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: Seconds) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class _Layer(nn.Module):
    def __init__(self, seconds: Seconds) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(_WIDTH, _WIDTH), seconds

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.linear(inputs))
        found: Tensor = _Sleep.apply(hidden, self.seconds)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A job: stages x pipelines, with so many micro-batches of one sample per step."""

    num_stages: int
    num_pipelines: int
    num_microbatches: int
    forward: Seconds  # of a micro-batch in a stage; its backward takes twice as long
    num_steps: int
    sync: str = "decoupled"

    @property
    def num_processes(self) -> int:
        return self.num_stages * self.num_pipelines


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one process, a time after all have made the first steps."""

    rank: int
    what: signal.Signals
    after: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """When steps ended, by rank and step, and when the faults came."""

    ends: dict[int, dict[int, Seconds]]
    faults_at: list[Seconds]
    losses: dict[int, float]  # of the last steps, by rank of a survivor
    events: list[dict[str, Any]]  # of the coordinator

    def all_ended(self, step: int) -> Seconds:
        """Return when the last process that trained on ended a step."""
        return max(ends[step] for ends in self.ends.values() if step in ends)


def run(setting: Setting, faults: list[Fault], *, timeout: Seconds, warm_up: int = 5) -> Outcome:
    """Run a job; faults count from the end of step `warm_up`."""
    with tempfile.TemporaryDirectory() as name:
        folder, faults_at = Path(name), list[Seconds]()
        work = _work_of(setting, folder)
        with LocalJob(
            work, setting.num_processes, output_folder=folder / "logs", keeps_survivors=True
        ) as job:
            deadline = time.monotonic() + timeout
            started = [folder / f"started{rank}" for rank in range(setting.num_processes)]
            while not all(path.exists() for path in started) and time.monotonic() < deadline:
                if job.wait(_POLL):
                    break
            start = time.monotonic()
            for fault in sorted(faults, key=lambda each: each.after):
                job.wait(max(0.0, start + fault.after - time.monotonic()))
                faults_at.append(time.monotonic())
                os.kill(int(started[fault.rank].read_text()), fault.what)
            if not job.wait(deadline - time.monotonic()):
                raise RuntimeError(f"{setting} still runs after {timeout:g} s")
        ends, losses = dict[int, dict[int, Seconds]](), dict[int, float]()
        for path in folder.glob("ends*.json"):
            rank = int(path.stem.removeprefix("ends"))
            found = json.loads(path.read_text())
            ends[rank] = {int(step): end for step, end in found["ends"].items()}
            losses[rank] = found["loss"]
        log = (folder / "logs" / "membership.jsonl").read_text().splitlines()
        return Outcome(
            ends=ends, faults_at=faults_at, losses=losses, events=[json.loads(x) for x in log]
        )


def _work_of(setting: Setting, folder: Path) -> Callable[[DistContext], None]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_NUM_SAMPLES, _WIDTH, generator=generator)
    data = TensorDataset(inputs, torch.tanh(inputs.flip(1)))

    def work(ctx: DistContext) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        os.environ.update(
            Degrees(stages=setting.num_stages, pipelines=setting.num_pipelines).environment
        )
        ends = dict[int, Seconds]()

        def on_step(info: Any) -> None:
            ends[info.step] = info.own.end
            if info.step == 5:
                partial = folder / f"starting{ctx.rank}"
                partial.write_text(str(os.getpid()))
                partial.rename(folder / f"started{ctx.rank}")

        model = nn.Sequential(*(_Layer(setting.forward) for _ in range(setting.num_stages)))
        with Trainer(
            model,
            mse_loss,
            lambda named: torch.optim.AdamW(named, lr=_LEARNING_RATE),
            data,
            batch_size=setting.num_microbatches,
            microbatch_size=1,
            stages=setting.num_stages,
            pipelines=setting.num_pipelines,
            schedule="1f1b",
            sync=setting.sync,
            timeout=60.0,
        ) as trainer:
            fitted = trainer.fit(max_steps=setting.num_steps, callbacks=[on_step], progress=False)
        found = {"ends": ends, "loss": fitted.losses[-1]}
        (folder / f"ends{ctx.rank}.json").write_text(json.dumps(found))

    return work
