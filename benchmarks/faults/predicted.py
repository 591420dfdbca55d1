"""Steps after a fault: the simulator's prediction against processes of a Trainer's job.

The simulator gets what `polyrhythm profile` would measure: how long one layer takes in a process of
its own. It assigns the survivors as the runtime does, and simulates the steps that follow.
"""

import signal
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.faults.job import WIDTH, EmulatedLayer, Fault, Outcome, Setting
from benchmarks.faults.job import run as run_job
from polyrhythm.cost.step import StageWork
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import Kill, Scenario
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.job import SimulatedJob, replicas
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.modes import SyncMode
from polyrhythm.sync.setup import Setup
from polyrhythm.types import Seconds

_TIMEOUT: Seconds = 120.0
_NUM_PROFILED = 21  # forwards and backwards of a layer
_NUM_SETTLING = 3  # steps after a fault: connections are new, and `balanced` measures
_FIRST_AT, _APART = 1.0, 2.5  # of faults, in seconds after the first steps
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    what: str
    setting: Setting
    lost: tuple[int, ...]  # ranks, one after another
    what_each_gets: signal.Signals = signal.SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPrediction:
    """A step after the last fault, and how long the others paused."""

    what: str
    measured: Seconds
    predicted: Seconds
    measured_pause: Seconds  # from the last fault to the end of the next step
    predicted_pause: Seconds | None  # None for a leave, which the simulator does not have

    @property
    def error(self) -> float:
        """Relative to the measured step."""
        return abs(self.predicted / self.measured - 1)


def fault_predictions(quick: bool) -> list[FaultPrediction]:
    """Measure and predict a step after each fault."""
    return [_prediction(case) for case in cases(quick=quick)]


def cases(*, quick: bool) -> list[FaultCase]:
    """Steps of half a second and more: then other work of the processes counts little."""
    four = Setting(
        num_stages=1,
        num_pipelines=4,
        num_microbatches=12,
        forward=0.02 if quick else 0.05,
        num_steps=20 if quick else 24,
    )
    one = FaultCase(what="one of 4 pipelines, decoupled", setting=four, lost=(2,))
    if quick:
        return [one]
    stages = Setting(num_stages=4, num_pipelines=2, num_microbatches=8, forward=0.04, num_steps=20)
    unequal = Setting(
        num_stages=2,
        num_pipelines=3,
        num_microbatches=12,
        forward=0.03,
        num_steps=20,
        slowness=(1.0, 1.0, 2.0, 2.0, 1.0, 1.0),
    )
    return [
        one,
        FaultCase(
            what="one of 4 pipelines of unequal speeds, balanced",
            setting=_changed(four, "balanced", (1.0, 2.0, 1.0, 1.0)),
            lost=(3,),
        ),
        FaultCase(
            what="two of 4 pipelines leave, all_reduce",
            setting=_changed(four, "all_reduce", ()),
            lost=(0, 3),
            what_each_gets=signal.SIGTERM,
        ),
        FaultCase(what="a stage of 2 pipelines x 4 stages, decoupled", setting=stages, lost=(6,)),
        FaultCase(
            what="a stage of the fast one of 3 pipelines x 2 stages, decoupled",
            setting=unequal,
            lost=(5,),
        ),
    ]


def _changed(setting: Setting, sync: str, slowness: tuple[float, ...]) -> Setting:
    return Setting(
        num_stages=setting.num_stages,
        num_pipelines=setting.num_pipelines,
        num_microbatches=setting.num_microbatches,
        forward=setting.forward,
        num_steps=setting.num_steps,
        sync=sync,
        slowness=slowness,
    )


def _prediction(case: FaultCase) -> FaultPrediction:
    faults = [
        Fault(rank, case.what_each_gets, _FIRST_AT + _APART * number)
        for number, rank in enumerate(case.lost)
    ]
    outcome = run_job(case.setting, faults, timeout=_TIMEOUT)
    job = simulated_job(case, profiled(case.setting.forward))
    found = simulate(job, num_steps=case.setting.num_steps)
    first = _first_after(outcome, len(faults))
    ends = next(iter(outcome.ends.values()))
    steps = range(first + _NUM_SETTLING, case.setting.num_steps)
    return FaultPrediction(
        what=case.what,
        measured=statistics.median(ends[step] - ends[step - 1] for step in steps),
        predicted=_step_after(found),
        measured_pause=outcome.all_ended(first) - outcome.faults_at[-1],
        predicted_pause=_pause(found) if case.what_each_gets is signal.SIGKILL else None,
    )


def _first_after(outcome: Outcome, num_losses: int) -> int:
    """Return the first step after so many losses, each of which ends an epoch."""
    begins = [event for event in outcome.events if event["event"] == "Begin"]
    if len(begins) < 1 + num_losses:
        raise RuntimeError(f"no epoch followed a fault: {num_losses} faults, {len(begins)} epochs")
    committed = [event["committed"] for event in begins[1 : 1 + num_losses]]
    return sum(0 if last is None else int(last) + 1 for last in committed)


def _step_after(found: SimulationResult) -> Seconds:
    resumed = found.changes[-1].resumed
    ends = [end for end in found.ends[0] if end > resumed][_NUM_SETTLING:]
    return statistics.median(b - a for a, b in pairwise(ends))


def _pause(found: SimulationResult) -> Seconds:
    last = found.changes[-1]
    return min(end for end in found.ends[0] if end > last.resumed) - last.at


def simulated_job(case: FaultCase, times: tuple[Seconds, Seconds]) -> SimulatedJob:
    """Return the same job for the simulator; `times` of a layer's forward and backward."""
    setting, mode, (forward, backward) = case.setting, SyncMode.named(case.setting.sync), times
    slowness = setting.slowness or (1.0,) * setting.num_processes
    schedule = ScheduleSpec.parse("1f1b").build(
        num_stages=setting.num_stages,
        num_microbatches=setting.num_microbatches // setting.num_pipelines,
    )
    stage = StageWork(
        forward=forward,
        backward=backward,
        activation_bytes=_FLOAT_BYTES * WIDTH,
        gradient_bytes=_FLOAT_BYTES * WIDTH * (WIDTH + 1),
    )
    begins = 5 * setting.num_microbatches / setting.num_pipelines * (forward + backward)
    return SimulatedJob(
        cluster=Cluster(
            name="this machine",
            devices=tuple(
                Device(name=f"d{rank}", region="here", speed=1 / slow)
                for rank, slow in enumerate(slowness)
            ),
            regions=("here",),
            latency=((5e-5,),),
            bandwidth=((1e9,),),
        ),
        stages=(stage,) * setting.num_stages,
        pipelines=replicas(schedule, setting.num_pipelines),
        sync=Setup(
            policy="all_reduce" if mode.decoupled else mode.name,
            num_stages=setting.num_stages,
            num_pipelines=setting.num_pipelines,
        ),
        decoupled=mode.decoupled,
        scenario=Scenario(
            name="faults",
            kill=tuple(
                Kill(device=f"d{rank}", at=begins + _FIRST_AT + _APART * number)
                for number, rank in enumerate(case.lost)
            ),
        ),
    )


def profiled(seconds: Seconds) -> tuple[Seconds, Seconds]:
    """Return the time of a layer's forward and backward: medians, in this process."""
    layer, inputs = EmulatedLayer(seconds), torch.randn(1, WIDTH)
    forwards, backwards = list[Seconds](), list[Seconds]()
    for _ in range(_NUM_PROFILED):
        start = time.perf_counter()
        output = layer(inputs)
        forwards.append(time.perf_counter() - start)
        start = time.perf_counter()
        output.sum().backward()
        backwards.append(time.perf_counter() - start)
    return statistics.median(forwards), statistics.median(backwards)
