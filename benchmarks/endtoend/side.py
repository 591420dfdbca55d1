"""What a job is told, and what its processes say: the same for torch's way and for ours."""

import os
import resource
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.endtoend.pace import Pace
from benchmarks.sleeping.worker import settle
from benchmarks.words import word_of_boss
from polyrhythm.describe.scenario import Scenario
from polyrhythm.describe.slowness import Slowness
from polyrhythm.plan.plan import Plan
from polyrhythm.types import Bytes, Seconds, Worker

# Of this host alone: wider windows would let TCP fill the queues of links that have become slow.
_RECEIVE_BUFFER = Path("/proc/sys/net/ipv4/tcp_rmem")
_SHORT = "4096 65536 131072"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What is trained by how many steps of whom, and at which pace."""

    plan: Plan
    num_steps: int
    forward: Seconds  # of one layer and sample, on a device of speed 1
    backward: Seconds
    num_held_out: int  # samples
    timeout: Seconds  # of any wait for another process
    turn: int = 0  # steps, after which the boss is asked whether to go on; 0: never
    scenario: Scenario = field(default_factory=Scenario)  # its `slow` is played
    bucket: Bytes = 25 * 2**20  # of gradients that torch averages at a time, as DDP
    sync: str = "auto"

    @property
    def num_layers(self) -> int:
        return sum(self.plan.layers_per_stage)

    @property
    def batch(self) -> int:
        assert self.plan.batch is not None, "the plan is complete"
        return self.plan.batch

    @property
    def microbatch_size(self) -> int:
        assert self.plan.microbatch_size is not None, "the plan is complete"
        return self.plan.microbatch_size

    def pace(self, worker: Worker, device: str) -> Pace:
        number = self.plan.layers_per_stage[worker.stage]
        return Pace(
            forward=self.forward * number,
            backward=self.backward * number,
            slowness=Slowness.of(self.scenario, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Of one process: its rank, its device, and where all meet."""

    rank: int
    device: str
    master: str
    port: int
    in_lab: bool = True  # on a host of its own, and not on this machine's own network


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A step of a pipeline, as its last stage says."""

    worker: Worker
    step: int
    num_samples: int
    loss: float
    moment: Seconds  # of time.monotonic(), which all hosts of a lab share


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    worker: Worker
    first: Seconds  # when the first action of the first step began
    moment: Seconds  # when the last step was over, and all that belongs to it
    cpu: Seconds  # on a core since the beginning
    slept: Seconds  # in place of compute
    held_out: float | None = None  # loss, of the model that came out; by those who evaluate it


class Line:
    """A process's line to who drives the benchmark."""

    def __init__(self, boss: Connection, timeout: Seconds, turn: int) -> None:
        self._boss, self._timeout, self._turn = boss, timeout, turn
        self._num_ended, self._cpu = 0, 0.0

    def ready(self) -> Seconds:
        """When all begin; returned at that moment."""
        self._boss.send("ready")
        begin: Seconds = word_of_boss(self._boss, "waiting for the beginning", self._timeout)
        time.sleep(max(0.0, begin - time.monotonic()))
        self._cpu = _cpu()
        return begin

    def ended(self, worker: Worker, step: int, num_samples: int, loss: float | None) -> None:
        """After every step; at the end of a turn it returns when the next one begins."""
        if loss is not None:
            said = Ended(
                worker=worker,
                step=step,
                num_samples=num_samples,
                loss=loss,
                moment=time.monotonic(),
            )
            self._boss.send(said)
        self._num_ended += 1
        if self._turn and self._num_ended % self._turn == 0:
            self._boss.send("turn")
            word_of_boss(self._boss, "waiting for its turn", self._timeout)

    def done(self, worker: Worker, moment: Seconds, pace: Pace, held_out: float | None) -> None:
        said = Done(
            worker=worker,
            first=moment if pace.first is None else pace.first,
            moment=moment,
            cpu=_cpu() - self._cpu,
            slept=pace.slept,
            held_out=held_out,
        )
        self._boss.send(said)


def enter(seat: Seat, world_size: int) -> None:
    """Become a process of a job on a host of the lab, as if torchrun had started it."""
    if seat.in_lab:
        _RECEIVE_BUFFER.write_text(_SHORT)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    settle()
    os.environ |= {
        "RANK": str(seat.rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": seat.master,
        "MASTER_PORT": str(seat.port),
        "POLYRHYTHM_DEVICE": seat.device,
    }


def _cpu() -> Seconds:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
