"""Schedules and measured times, drawn or by hand, for tests of schedules and their cost."""

import random

from hypothesis import strategies as st

from polyrhythm.cost.memory import StageMemory
from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Action, Op

limits_s = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(
    lambda limits: tuple(sorted(limits, reverse=True))
)
specs = st.one_of(
    st.just(ScheduleSpec("1f1b")),
    st.just(ScheduleSpec("gpipe")),
    st.integers(1, 40).map(lambda k: ScheduleSpec("kfkb", k=k)),
    limits_s.map(lambda limits: ScheduleSpec("bounded", limits=limits)),
)
durations = st.floats(0, 10)
amounts = st.floats(0.1, 3)
samples = st.lists(st.floats(0, 4), min_size=1, max_size=5).map(tuple)
measured_links = st.builds(LinkTimes, busy=samples, latency=st.floats(0, 1))


def parse(*rows: str) -> Schedule:
    return [[Action.parse(text) for text in row.split()] for row in rows]


@st.composite
def ordered_schedules(draw: st.DrawFn) -> tuple[Schedule, int]:
    """Draw a schedule whose stages run F and B each in order and F(m) before B(m)."""
    num_stages, num_microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    schedule = []
    for _ in range(num_stages):
        actions, forwards, backwards = [], 0, 0
        while backwards < num_microbatches:
            can_forward, can_backward = forwards < num_microbatches, backwards < forwards
            if can_forward and (not can_backward or draw(st.booleans())):
                actions.append(Action(Op.F, forwards))
                forwards += 1
            else:
                actions.append(Action(Op.B, backwards))
                backwards += 1
        schedule.append(actions)
    return schedule, num_microbatches


def even_times(
    num_stages: int, transfer: float, *, forward: float = 1.0, backward: float = 2.0
) -> PipelineTimes:
    links = (LinkTimes(busy=(transfer,)),) * (num_stages - 1)
    return PipelineTimes(
        forward=(forward,) * num_stages,
        backward=(backward,) * num_stages,
        activations=links,
        gradients=links,
    )


@st.composite
def times_s(draw: st.DrawFn, num_stages: int) -> PipelineTimes:
    def some(kind: st.SearchStrategy, count: int) -> tuple:
        return tuple(draw(st.lists(kind, min_size=count, max_size=count)))

    link = st.builds(
        LinkTimes,
        busy=st.lists(durations, min_size=1, max_size=3).map(tuple),
        latency=durations,
    )
    return PipelineTimes(
        forward=some(durations, num_stages),
        backward=some(durations, num_stages),
        activations=some(link, num_stages - 1),
        gradients=some(link, num_stages - 1),
    )


@st.composite
def timed_schedules(draw: st.DrawFn) -> tuple[Schedule, PipelineTimes]:
    spec = draw(specs)
    num_stages = draw(st.integers(1, 5)) if spec.limits is None else len(spec.limits)
    schedule = spec.build(num_stages=num_stages, num_microbatches=draw(st.integers(1, 10)))
    return schedule, draw(times_s(num_stages))


@st.composite
def measured(draw: st.DrawFn, num_stages: int | None = None) -> PipelineTimes:
    size = num_stages or draw(st.integers(1, 5))
    rows = [
        (amounts, size),
        (amounts, size),
        (measured_links, size - 1),
        (measured_links, size - 1),
    ]
    forward, backward, down, up = (
        tuple(draw(st.lists(kind, min_size=count, max_size=count))) for kind, count in rows
    )
    return PipelineTimes(forward=forward, backward=backward, activations=down, gradients=up)


def times_of(
    *transfers: float, work: float = 1.0, noise: random.Random | None = None
) -> PipelineTimes:
    """Return times with backward = 2 x forward; with `noise`, each differs by up to 1 %."""

    def noisy(time: float) -> float:
        return time * (1 + noise.uniform(-0.01, 0.01)) if noise else time

    def links() -> tuple[LinkTimes, ...]:
        return tuple(LinkTimes(busy=(noisy(transfer),)) for transfer in transfers)

    stages = range(len(transfers) + 1)
    return PipelineTimes(
        forward=tuple(noisy(work) for _ in stages),
        backward=tuple(noisy(2 * work) for _ in stages),
        activations=links(),
        gradients=links(),
    )


def stage_memory(**amounts: int) -> StageMemory:
    nothing = {"weights": 0, "gradients": 0, "optimizer": 0, "activation": 1, "message": 0}
    return StageMemory(**{**nothing, **amounts})
