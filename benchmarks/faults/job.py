"""A Trainer's job with emulated compute, in which processes are killed or asked to leave.

Each layer sleeps in its forward and backward, so that many workers fit on a few cores. Each process
writes when its steps have ended, by the clock that all processes of a machine share.
"""

import contextlib
import math
import os
import signal
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from polyrhythm.plan.degrees import Degrees
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer.config import DataConfig
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.dispatch import Range, Ranges, SamplerState
from polyrhythm.sync.log_reader import membership_changes
from polyrhythm.types import Seconds

WIDTH, _NUM_SAMPLES, _LEARNING_RATE = 32, 4096, 1e-3
_POLL: Seconds = 0.01
_WARM_UP = 6  # steps of each process before faults come


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


class EmulatedLayer(nn.Module):
    """A layer whose forward takes `seconds`, and its backward twice as long."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.linear(inputs))
        found: Tensor = _Sleep.apply(hidden, self.seconds)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A job: stages x pipelines, with so many micro-batches of one sample per step, in order."""

    num_stages: int
    num_pipelines: int
    num_microbatches: int
    forward: Seconds  # of a micro-batch in a stage; its backward takes twice as long
    num_steps: int
    sync: str = "decoupled"
    slowness: tuple[float, ...] = ()  # by rank: how many times as long its compute takes
    num_layers: int | None = None  # None for one per stage

    @property
    def step(self) -> Seconds:
        """Of equal pipelines, without communication: their micro-batches, filled and drained."""
        num_microbatches = self.num_microbatches / self.num_pipelines
        return 3 * self.forward * (num_microbatches + self.num_stages - 1)

    @property
    def num_processes(self) -> int:
        return self.num_stages * self.num_pipelines


@dataclass(frozen=True, slots=True)
class Fault:
    """What one process gets, a time after all have made the first steps."""

    rank: int
    what: signal.Signals
    after: Seconds
    # Not before the survivors of the faults before it have made steps: their epoch has begun, and
    # the optimizer's state is divided anew, however slow the machine is.
    after_recovery: bool = False


class DeliveredFault(NamedTuple):
    fault: Fault
    at: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the processes that trained to the end have, by rank, and when the faults came."""

    ends: dict[int, dict[int, Seconds]]  # of steps, by step
    delivered: list[DeliveredFault]  # none for a process that had ended
    used: dict[int, Ranges]  # the positions of samples that all pipelines have used
    read: frozenset[int]  # the positions that some process has read, also one that was lost
    weights: dict[int, dict[str, Tensor]]
    events: list[dict[str, Any]]  # of the coordinator

    @property
    def faults_at(self) -> list[Seconds]:
        return [each.at for each in self.delivered]

    @property
    def num_faults(self) -> int:
        return sum(each.fault.what is not signal.SIGCONT for each in self.delivered)

    def all_ended(self, step: int) -> Seconds:
        """Return when the last process that trained on ended a step."""
        return max(ends[step] for ends in self.ends.values() if step in ends)


def run(
    setting: Setting,
    faults: list[Fault],
    *,
    timeout: Seconds,
    restart_delay: Seconds | None = None,
) -> Outcome:
    """Run a job; its faults count from the time when all processes have made the first steps.

    With `restart_delay` processes that are lost are started again.
    Raises WorkerError if the job fails, and TimeoutError if it has not ended in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = _work_of(setting, folder)
        with LocalJob(
            work,
            setting.num_processes,
            output_folder=folder / "logs",
            keeps_survivors=True,
            restart_delay=restart_delay,
        ) as job:
            running = _RunningJob(job, setting, folder, time.monotonic() + timeout)
            delivered = running.deliver(faults)
            if not job.wait(running.remaining()):
                raise TimeoutError(f"{setting} still runs after {timeout:g} s")
        return _outcome(folder, delivered)


@dataclass(frozen=True, slots=True)
class _RunningJob:
    job: LocalJob
    setting: Setting
    folder: Path
    deadline: Seconds

    def remaining(self, until: Seconds = math.inf) -> Seconds:
        return max(0.0, min(until, self.deadline) - time.monotonic())

    def deliver(self, faults: list[Fault]) -> list[DeliveredFault]:
        """Send the faults in their order; return those whose process had not ended."""
        started = [self.folder / f"started{rank}" for rank in range(self.setting.num_processes)]
        delivered = list[DeliveredFault]()
        while not all(path.exists() for path in started):
            if self.job.wait(_POLL) or not self.remaining():
                break
        start = time.monotonic()
        for fault in sorted(faults, key=lambda each: each.after):
            if self.job.wait(self.remaining(start + fault.after)):
                break
            if fault.after_recovery and not self._wait_for_recovery(delivered):
                break
            if not started[fault.rank].exists():
                continue
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(int(started[fault.rank].read_text()), fault.what)
                delivered.append(DeliveredFault(fault, time.monotonic()))
        return delivered

    def _wait_for_recovery(self, delivered: list[DeliveredFault]) -> bool:
        """Wait until those that are left have made steps; return False if the job ends before."""
        hit = {each.fault.rank for each in delivered if each.fault.what is not signal.SIGCONT}
        # With so many steps of an epoch some process has made two, for which all have made one.
        enough, num_before = 2 * self.setting.num_processes, math.inf
        while not self.job.wait(_POLL) and self.remaining():
            num_made = sum(path.stat().st_size for path in self.folder.glob("steps*"))
            begins = [event for event in _events(self.folder) if event["event"] == "Begin"]
            if not begins or hit & ({*begins[-1]["members"]} - {*begins[-1]["departing"]}):
                num_before = math.inf  # an epoch with one of them must end first
            elif num_before == math.inf:
                num_before = num_made
            elif num_made > num_before + enough:
                return True
        return False


def _events(folder: Path) -> list[dict[str, Any]]:
    """Return what the coordinator has logged so far."""
    log = folder / "logs" / "membership.jsonl"
    if not log.exists() or not log.stat().st_size:
        return []
    changes = membership_changes(log)
    return [{"event": name, **msgspec.structs.asdict(change)} for name, change in changes]


def _outcome(folder: Path, delivered: list[DeliveredFault]) -> Outcome:
    paths = {int(path.stem.removeprefix("found")): path for path in folder.glob("found*.pt")}
    found = {rank: torch.load(path) for rank, path in paths.items()}
    read = (array("i", path.read_bytes()) for path in folder.glob("read*"))
    return Outcome(
        ends={rank: each["ends"] for rank, each in found.items()},
        delivered=delivered,
        used={rank: each["used"] for rank, each in found.items()},
        read=frozenset(chain.from_iterable(read)),
        weights={rank: each["weights"] for rank, each in found.items()},
        events=_events(folder),
    )


def used_ranges(state: SamplerState) -> Ranges:
    """Return the positions that are used: all below the next one, but those to be used again."""
    found, end = list[Range](), 0
    for start, stop in (*sorted((*state.pool, *state.outstanding)), (state.next, state.next)):
        if end < start:
            found.append((end, start))
        end = stop
    return tuple(found)


class _LoggedSamples(Dataset[tuple[Tensor, Tensor]]):
    """Logs the positions that are read, in a process that may be killed at any time."""

    def __init__(self, path: Path, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs, targets
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        os.write(self._log, array("i", [index]).tobytes())
        return self._inputs[index], self._targets[index]


def _work_of(setting: Setting, folder: Path) -> Callable[[DistContext], None]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_NUM_SAMPLES, WIDTH, generator=generator)
    targets = torch.tanh(inputs.flip(1))

    def work(ctx: DistContext) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        os.environ.update(
            Degrees(stages=setting.num_stages, pipelines=setting.num_pipelines).environment
        )
        ends = dict[int, Seconds]()
        steps = os.open(folder / f"steps{ctx.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def on_step(info: Any) -> None:
            ends[info.step] = info.own.end
            os.write(steps, b".")
            if len(ends) == _WARM_UP:
                partial = folder / f"starting{ctx.rank}"
                partial.write_text(str(os.getpid()))
                partial.rename(folder / f"started{ctx.rank}")

        forward = setting.forward * (setting.slowness[ctx.rank] if setting.slowness else 1.0)
        num_layers = setting.num_layers or setting.num_stages
        model = nn.Sequential(*(EmulatedLayer(forward) for _ in range(num_layers)))
        with Trainer(
            model,
            mse_loss,
            lambda named: torch.optim.AdamW(named, lr=_LEARNING_RATE),
            _LoggedSamples(folder / f"read{ctx.rank}", inputs, targets),
            data=DataConfig(shuffle=False),
            batch_size=setting.num_microbatches,
            microbatch_size=1,
            stages=setting.num_stages,
            pipelines=setting.num_pipelines,
            schedule="1f1b",
            sync=setting.sync,
            timeout=60.0,
        ) as trainer:
            trainer.fit(max_steps=setting.num_steps, callbacks=[on_step], progress=False)
            weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            used = used_ranges(trainer._progress.sampler_state)
        found = {"ends": ends, "used": used, "weights": weights}
        torch.save(found, folder / f"found{ctx.rank}.partial")
        (folder / f"found{ctx.rank}.partial").rename(folder / f"found{ctx.rank}.pt")

    return work
