"""VGG-16's runs: how long a step takes, and how many of them a loss takes (Figs. 17 to 20).

Time is that of VGG-16 on the testbed. What is trained in that time is a small network whose workers
draw from one data set, as the paper's do: with its learning rate and momentum, to a loss that the
parameter server needs 120 steps for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.simulate.convergence import ConvergenceCurve, converge
from polyrhythm.simulate.job import EMPTY_SCENARIO, SimulatedJob
from polyrhythm.simulate.problems import Perceptron, perceptron
from polyrhythm.types import Seconds
from reproduction.prague.models import VGG_16
from reproduction.prague.pace import pace
from reproduction.prague.testbed import (
    AD_PSGD,
    METHODS,
    SERVER,
    SIXTEEN,
    job,
)

_LEARNING_RATE, _MOMENTUM = 0.1, 0.9  # Fig. 15 and section 7.1.3
_NUM_STEPS, _TARGET_AT = 160, 120
_SECTION_STEPS, _SECTION_TARGET_AT = 100, 40
_POINTS_EVERY = 4  # steps
_ACTIONS = 2  # of a step: a forward and a backward, before each of which a sleep is drawn
SECTION_LENGTHS = (1, 2, 4, 8)
SLOW_WORKER = Random(0).randrange(SIXTEEN.number)  # "randomly selected"
HOMOGENEOUS, TWICE, FIVE_TIMES = 0, 2, 5  # times "the normal iteration time of sleep" (section 7.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    step: Seconds  # in which all workers together make as many steps as they are
    steps: float  # to the loss

    @property
    def time(self) -> Seconds:
        """To the loss."""
        return self.step * self.steps


def slowed(times: int) -> Scenario:
    """One worker sleeps for so many times what a step computes, before each step."""
    if not times:
        return EMPTY_SCENARIO
    slow = Slow(device=f"w{SLOW_WORKER}", factor=1.0 + times)
    return Scenario(name=f"{times}x", slow=(slow,))


def straying(times: int) -> Scenario:
    """Another reading: in each step of each worker, it is the one with a chance of 1 in 16."""
    chance = 1 / SIXTEEN.number / _ACTIONS
    slow = Slow(device=EVERY_DEVICE, probability=chance, sleep_factor=float(times))
    return Scenario(name=f"{times}x, straying", slow=(slow,))


def trained(say: Callable[[str], None]) -> dict[int, dict[str, Trained]]:
    """By what one worker sleeps, and by method; the server without sleep only, as in the paper."""
    problem = perceptron(SIXTEEN.number, skew=0.0)
    target, found = 0.0, {}
    for times in (HOMOGENEOUS, TWICE, FIVE_TIMES):
        say("VGG-16, " + (f"one worker sleeps {times} times" if times else "homogeneous"))
        jobs = {
            method: job(method, VGG_16, scenario=slowed(times))
            for method in METHODS
            if method != SERVER or not times
        }
        curves = {method: _curve(problem, each) for method, each in jobs.items()}
        if SERVER in curves:
            target = _loss_at(curves[SERVER], _TARGET_AT)
        found[times] = {
            method: Trained(step=pace(each), steps=curves[method].steps_to(target))
            for method, each in jobs.items()
        }
    return found


def sections() -> dict[int, float]:
    """Steps to a loss of AD-PSGD, by steps from one average to the next (Fig. 17)."""
    problem = perceptron(SIXTEEN.number, skew=0.0)
    curves = {
        length: _curve(problem, job(AD_PSGD, VGG_16, every=length), _SECTION_STEPS)
        for length in SECTION_LENGTHS
    }
    target = _loss_at(curves[SECTION_LENGTHS[0]], _SECTION_TARGET_AT)
    return {length: curve.steps_to(target) for length, curve in curves.items()}


def _loss_at(curve: ConvergenceCurve, step: float) -> float:
    return next(loss for at, loss in zip(curve.steps, curve.losses, strict=True) if at >= step)


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
