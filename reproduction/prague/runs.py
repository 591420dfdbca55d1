"""Prague's runs: VGG-16's step time and steps to a loss, and throughput of the ResNets.

Times are those of VGG-16 on the testbed. Instead of VGG-16, a small network is trained, whose
workers draw from one data set, as in the paper: with the paper's learning rate and momentum, to a
loss that the parameter server reaches after 120 steps.

Step times are of the second half of a run, since the paper's runs are thousands of steps long:
smart groups need some tens of steps until the first divisions, which find few idle workers, have
given way to divisions of all workers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.simulate.convergence import ConvergenceCurve, converge
from polyrhythm.simulate.job import EMPTY_SCENARIO, SimulatedJob
from polyrhythm.simulate.problems import Perceptron, perceptron
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.simulate.simulator import simulate
from polyrhythm.types import Seconds
from reproduction.prague.testbed import (
    AD_PSGD,
    ALL_REDUCE,
    METHODS,
    RESNET_50,
    SERVER,
    SIXTEEN,
    SMART,
    STATIC,
    VGG_16,
    PragueModel,
    PragueWorkers,
    job,
)
from reproduction.simulation import loss_at

HOMOGENEOUS, TWICE, FIVE_TIMES = 0, 2, 5  # times "the normal iteration time of sleep" (section 7.4)
SLOW_WORKER = Random(0).randrange(SIXTEEN.number)  # "randomly selected"
DENSE = tuple(PragueWorkers(number=number) for number in (2, 4, 8, 16))
SEPARATE = tuple(PragueWorkers(number=number, per_node=1) for number in (4, 8, 12))
_COLUMNS = {  # of Figs. 21 and 22
    HOMOGENEOUS: (ALL_REDUCE, AD_PSGD, STATIC, SMART),
    FIVE_TIMES: (ALL_REDUCE, AD_PSGD, SMART),
}
_BATCHES = (64, 128, 256)  # of Fig. 16
_SECTION_LENGTHS = (1, 2, 4, 8)  # of Fig. 17
_LEARNING_RATE, _MOMENTUM = 0.1, 0.9  # Fig. 15 and section 7.1.3
_NUM_STEPS, _TARGET_AT = 160, 120  # of a training run; steps of the server to the target loss
_SECTION_STEPS, _SECTION_TARGET_AT = 100, 40
_TIMED_STEPS = 120
_POINTS_EVERY = 4  # steps
_SLEEPS_PER_STEP = 2  # drawn before the forward and before the backward
_TEN_HOURS: Seconds = 36_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    step: Seconds  # in which all workers together make as many steps as there are workers
    num_steps: float  # to the loss

    @property
    def total(self) -> Seconds:
        return self.step * self.num_steps


def step_time(job: SimulatedJob, num_steps: int = _TIMED_STEPS) -> Seconds:
    """The time in which all workers together make as many steps as there are workers."""
    return settled_step_time(simulate(job, num_steps=num_steps))


def settled_step_time(simulated: SimulationResult) -> Seconds:
    """The step time of a run's second half: between a worker's first and last end of a step."""
    half, rate = simulated.duration / 2, 0.0
    for ends in simulated.ends:
        late = [end for end in ends if end >= half]
        if len(late) > 1:
            rate += (len(late) - 1) / (late[-1] - late[0])
    return len(simulated.ends) / rate


def one_sleeps(times: int) -> Scenario:
    """One worker sleeps before each step, for `times` times the compute time of a step."""
    if not times:
        return EMPTY_SCENARIO
    slow = Slow(device=f"w{SLOW_WORKER}", factor=1.0 + times)
    return Scenario(name=f"{times}x", slow=(slow,))


def any_sleeps(times: int) -> Scenario:
    """Another reading: every worker sleeps in one of 16 steps, at random."""
    chance = 1 / SIXTEEN.number / _SLEEPS_PER_STEP
    slow = Slow(device=EVERY_DEVICE, probability=chance, sleep_factor=float(times))
    return Scenario(name=f"{times}x, any worker", slow=(slow,))


def train_vgg(log: Callable[[str], None]) -> dict[int, dict[str, TrainingTime]]:
    """By sleep and method; the server only without sleep, as in the paper."""
    problem = perceptron(SIXTEEN.number, skew=0.0)
    target, found = 0.0, {}
    for times in (HOMOGENEOUS, TWICE, FIVE_TIMES):
        log("VGG-16, " + (f"one worker sleeps {times} times" if times else "homogeneous"))
        jobs = {
            method: job(method, VGG_16, scenario=one_sleeps(times))
            for method in METHODS
            if method != SERVER or not times
        }
        curves = {method: _curve(problem, each) for method, each in jobs.items()}
        if SERVER in curves:
            target = loss_at(curves[SERVER], _TARGET_AT)
        found[times] = {
            method: TrainingTime(step=step_time(each), num_steps=curves[method].steps_to(target))
            for method, each in jobs.items()
        }
    return found


def section_steps() -> dict[int, float]:
    """Steps to a loss of AD-PSGD, by the steps from one average to the next (Fig. 17)."""
    problem = perceptron(SIXTEEN.number, skew=0.0)
    curves = {
        length: _curve(problem, job(AD_PSGD, VGG_16, every=length), _SECTION_STEPS)
        for length in _SECTION_LENGTHS
    }
    target = loss_at(curves[_SECTION_LENGTHS[0]], _SECTION_TARGET_AT)
    return {length: curve.steps_to(target) for length, curve in curves.items()}


def _curve(
    problem: Perceptron, training: SimulatedJob, num_steps: int = _NUM_STEPS
) -> ConvergenceCurve:
    return converge(
        training,
        problem,
        num_steps=num_steps,
        lr=_LEARNING_RATE,
        momentum=_MOMENTUM,
        every=_POINTS_EVERY,
    )


def images_per_second(model: PragueModel) -> dict[int, dict[str, float]]:
    """Images per second of a GPU, by sleep and method (Figs. 21 and 22)."""
    return {
        times: {
            method: model.batch / step_time(job(method, model, scenario=one_sleeps(times)))
            for method in methods
        }
        for times, methods in _COLUMNS.items()
    }


def steps_in_ten_hours() -> dict[str, float]:
    """Steps of ResNet-50 on 32 workers, by method (Fig. 23)."""
    workers = PragueWorkers(number=32)
    return {
        method: _TEN_HOURS / step_time(job(method, RESNET_50, workers))
        for method in _COLUMNS[HOMOGENEOUS]
    }


def compute_times() -> dict[int, Seconds]:
    """VGG-16's compute time of a step, by batch (Fig. 16)."""
    return {batch: replace(VGG_16, batch=batch).compute for batch in _BATCHES}


def all_reduce_times(placements: Sequence[PragueWorkers]) -> dict[int, Seconds]:
    """All-reduce of VGG-16's gradients, by number of workers (Fig. 16)."""
    return {
        workers.number: step_time(job(ALL_REDUCE, VGG_16, workers), num_steps=10) - VGG_16.compute
        for workers in placements
    }
