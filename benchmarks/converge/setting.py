"""What is compared: sync modes and their learning rates, on emulated machines."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from benchmarks.converge.tasks import LearningTask
from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.run.averaging.buffers import OptimizerStateMode
from polyrhythm.sync.modes import SyncMode
from polyrhythm.types import Seconds

ALL_REDUCE, ADAPTIVE, AGE, OVERLAP = "all_reduce", "adaptive", "age", "overlap"
WARM_UP = 0.2  # of all batches: the learning rate rises during them, and then falls to 0
MICROBATCHES = 8  # of a step
_SLOWER = 4.5  # about the ratio of a step of all_reduce to that of the fastest machine
SHALLOW, DEEP = "1f1b", "bounded:16,12,8,4"  # the second is four times as deep

# The peak learning rate that each side needs, found by a search.
RATES: Mapping[str, Mapping[str, float]] = {
    "gpt": {ALL_REDUCE: 0.016, ADAPTIVE: 0.012, AGE: 0.012, OVERLAP: 0.012},
    "cnn": {ALL_REDUCE: 0.5, ADAPTIVE: 0.5, AGE: 0.5, OVERLAP: 0.5},
}
DEPTH_RATES: Mapping[str, float] = {SHALLOW: 0.004, DEEP: 0.002}


@dataclass(frozen=True, slots=True)
class EmulatedMachines:
    """The machines of a run, and how long they train."""

    name: str
    num_workers: int
    step: Seconds  # of a machine that nothing slows; longer where real compute needs it
    steps: int  # of each worker under all_reduce; together, of all workers under any policy
    num_points: int  # of the loss curve of all_reduce; the others end sooner, and have fewer
    slow: Slow

    def scenario(self, seed: int) -> Scenario:
        return Scenario(name=self.name, seed=seed, slow=(self.slow,))

    def with_step(self, step: Seconds) -> Self:
        """Return the same machines with longer steps, and all times that are relative to them."""
        longer, slow = step / self.step, self.slow
        if slow.trace_duration is not None:
            slow = replace(slow, trace_duration=longer * slow.trace_duration)
        return replace(self, step=step, slow=slow)

    @property
    def every(self) -> Seconds:
        """Return the time from one point of the curve to the next."""
        return _SLOWER * self.step * self.steps / self.num_points

    @property
    def timeout(self) -> Seconds:
        """Return a bound for the slowest run, on a machine that is busy."""
        return 60.0 + 3 * self.num_points * self.every

    @property
    def num_batches(self) -> int:
        return self.num_workers * self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergeTrial:
    """A model on emulated machines, and the loss that counts as reached there."""

    machines: EmulatedMachines
    task: str
    target: float
    others: tuple[str, ...]  # sides that run after one another, beside all_reduce


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ConvergeRun:
    """One side of a trial: `overlap` is `age` whose averages overlap the next step."""

    task: LearningTask
    machines: EmulatedMachines
    target: float
    side: str
    seed: int

    @property
    def policy(self) -> str:
        return AGE if self.side == OVERLAP else self.side

    @property
    def lr(self) -> float:
        return RATES[self.task.name][self.side]

    @property
    def averages_models(self) -> bool:
        return SyncMode.named(self.policy).averages == "model"

    @property
    def state(self) -> OptimizerStateMode:
        """Return whether the optimizer's state is averaged with the models."""
        return "average" if self.averages_models else "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergeSetting:
    trials: tuple[ConvergeTrial, ...]
    seeds: tuple[int, ...]
    depth_steps: int


def setting_b(num_workers: int, step: Seconds, steps: int, num_points: int) -> EmulatedMachines:
    """Return SDPipe's: a sleep of three steps before one in ten forwards and backwards."""
    slow = Slow(device=EVERY_DEVICE, probability=0.1, sleep_factor=3.0)
    return EmulatedMachines("b", num_workers, step, steps, num_points, slow)


def recorded(num_workers: int, step: Seconds, steps: int, num_points: int) -> EmulatedMachines:
    """Return SDPipe's virtual GPUs; their nine hours end about when all_reduce does."""
    slow = Slow(device=EVERY_DEVICE, trace="sdpipe_16gpu", trace_duration=_SLOWER * step * steps)
    return EmulatedMachines("trace", num_workers, step, steps, num_points, slow)


def _trials(
    gpt: EmulatedMachines, cnn: EmulatedMachines, trace: EmulatedMachines, *targets: float
) -> tuple[ConvergeTrial, ...]:
    every_side = (ADAPTIVE, AGE, OVERLAP)
    return (
        ConvergeTrial(machines=gpt, task="gpt", target=targets[0], others=every_side),
        ConvergeTrial(machines=cnn, task="cnn", target=targets[1], others=every_side),
        ConvergeTrial(machines=trace, task="cnn", target=targets[1], others=(AGE,)),
    )


FULL = ConvergeSetting(
    trials=_trials(
        setting_b(8, 0.250, 120, 80),
        setting_b(8, 0.080, 120, 80),
        recorded(16, 0.120, 120, 80),
        2.1,
        0.6,
    ),
    seeds=(0, 1, 2),
    depth_steps=400,
)
QUICK = ConvergeSetting(
    trials=_trials(
        setting_b(3, 0.010, 6, 4), setting_b(3, 0.010, 6, 4), recorded(3, 0.010, 6, 4), 9.0, 9.0
    ),
    seeds=(0,),
    depth_steps=18,
)
