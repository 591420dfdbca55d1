"""What is compared with what: sides and their learning rates, settings, and how much of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from benchmarks.converge.tasks import Task
from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.run.averaging.buffers import OptimizerStateMode
from polyrhythm.types import Seconds

ALL_REDUCE, ADAPTIVE, AGE, OVERLAP = "all_reduce", "adaptive", "age", "overlap"
WARM_UP = 0.2  # of all batches: the learning rate rises over them, and then falls to 0
MICROBATCHES = 8  # of a step
TRACE = "sdpipe_16gpu"
_SLOWER = 4.5  # about how much longer a step of all_reduce takes than that of the fastest machine
SHALLOW, DEEP = "1f1b", "bounded:16,12,8,4"  # the second is four times as deep


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How workers keep together, and the learning rate that this needs (its peak)."""

    name: str
    policy: str
    lr: float
    overlap: bool = False
    options: Mapping[str, object] = field(default_factory=dict)  # of the policy
    state: OptimizerStateMode = "local"  # of the optimizer: whether it is averaged, if models are


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Emulated machines, and how long they train."""

    name: str
    num_workers: int
    step: Seconds  # of a machine that nothing holds back; longer where real compute needs it
    steps: int  # of each worker under all_reduce; together, of all workers under any policy
    slow: Slow
    looks: int  # at the models of all_reduce; the others are done sooner, and have fewer

    def scenario(self, seed: int) -> Scenario:
        return Scenario(name=self.name, seed=seed, slow=(self.slow,))

    def paced(self, step: Seconds) -> Self:
        """The same with longer steps, and so with all that is measured in them."""
        longer, slow = step / self.step, self.slow
        if slow.trace_duration is not None:
            slow = replace(slow, trace_duration=longer * slow.trace_duration)
        return replace(self, step=step, slow=slow)

    @property
    def every(self) -> Seconds:
        """From one look to the next."""
        return _SLOWER * self.step * self.steps / self.looks

    @property
    def patience(self) -> Seconds:
        """For the slowest run, on a machine that is busy."""
        return 60.0 + 3 * self.looks * self.every

    @property
    def num_batches(self) -> int:
        return self.num_workers * self.steps


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Run:
    task: Task
    setting: Setting
    side: Side
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model in a setting, and the loss that counts as reached there."""

    setting: Setting
    task: str
    target: float
    lanes: tuple[tuple[str, ...], ...]  # sides that go on at the same time as all_reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    keeps_up: bool  # whether steps are as long as this machine needs
    trials: tuple[Trial, ...]
    seeds: tuple[int, ...]
    depth_rates: Mapping[str, float]  # of each schedule
    depth_steps: int


def setting_b(*, num_workers: int, step: Seconds, steps: int, looks: int) -> Setting:
    """SDPipe's: each forward and each backward may be preceded by a sleep of three steps."""
    slow = Slow(device=EVERY_DEVICE, probability=0.1, sleep_factor=3.0)
    return Setting(
        name="b", num_workers=num_workers, step=step, steps=steps, slow=slow, looks=looks
    )


def recorded(*, num_workers: int, step: Seconds, steps: int, looks: int) -> Setting:
    """SDPipe's virtual GPUs; their nine hours are over about when all_reduce is."""
    slow = Slow(device=EVERY_DEVICE, trace=TRACE, trace_duration=_SLOWER * step * steps)
    return Setting(
        name="trace", num_workers=num_workers, step=step, steps=steps, slow=slow, looks=looks
    )


# The peak learning rate that each side needs, found by a search.
RATES: Mapping[str, Mapping[str, float]] = {
    "gpt": {ALL_REDUCE: 0.016, ADAPTIVE: 0.012, AGE: 0.012, OVERLAP: 0.012},
    "cnn": {ALL_REDUCE: 0.5, ADAPTIVE: 0.5, AGE: 0.5, OVERLAP: 0.5},
}

_BESIDE = ((ADAPTIVE, AGE, OVERLAP),)
FULL = Plan(
    keeps_up=True,
    trials=(
        Trial(
            setting=setting_b(num_workers=8, step=0.250, steps=120, looks=80),
            task="gpt",
            target=2.1,
            lanes=_BESIDE,
        ),
        Trial(
            setting=setting_b(num_workers=8, step=0.080, steps=120, looks=80),
            task="cnn",
            target=0.6,
            lanes=_BESIDE,
        ),
        Trial(
            setting=recorded(num_workers=16, step=0.120, steps=120, looks=80),
            task="cnn",
            target=0.6,
            lanes=((AGE,),),
        ),
    ),
    seeds=(0, 1, 2),
    depth_rates={SHALLOW: 0.004, DEEP: 0.002},
    depth_steps=400,
)
QUICK = Plan(
    keeps_up=False,
    trials=(
        Trial(
            setting=setting_b(num_workers=3, step=0.010, steps=6, looks=4),
            task="gpt",
            target=9.0,
            lanes=_BESIDE,
        ),
        Trial(
            setting=setting_b(num_workers=3, step=0.010, steps=6, looks=4),
            task="cnn",
            target=9.0,
            lanes=_BESIDE,
        ),
        Trial(
            setting=recorded(num_workers=3, step=0.010, steps=6, looks=4),
            task="cnn",
            target=9.0,
            lanes=((AGE,),),
        ),
    ),
    seeds=(0,),
    depth_rates={SHALLOW: 0.004, DEEP: 0.002},
    depth_steps=18,
)


def make_side(task: str, name: str) -> Side:
    """`overlap` is `age` whose averages overlap with the next step, after the warm-up."""
    return Side(
        name=name,
        policy=AGE if name == OVERLAP else name,
        lr=RATES[task][name],
        overlap=name == OVERLAP,
        state="local" if name == ALL_REDUCE else "average",
    )
