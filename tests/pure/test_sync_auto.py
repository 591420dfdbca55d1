"""Auto: it moves when that pays, to the simplest way that does, goes back, and does not flap."""

import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.describe.scenario import Scenario, Slow
from polyrhythm.errors import PolicyError
from polyrhythm.simulate.job import CALM, SimulatedJob, equal_job
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.auto import Auto, Decision
from polyrhythm.sync.balanced import Dealer
from polyrhythm.sync.foreseen import (
    ADAPTIVE,
    BALANCED,
    DECOUPLED,
    GROUPS,
    WAYS,
    Shape,
    Times,
    Took,
    Wire,
)
from polyrhythm.sync.registry import make_policies
from polyrhythm.types import Seconds, Worker
from tests.pure.sync_drive import train, workers

Slowness = Callable[[random.Random, int, int], Seconds]  # of a micro-batch: pipeline, window


@dataclass
class World:
    """Pipelines that train in virtual time, in the way they are told, and say what it took."""

    shape: Shape
    unit: Slowness
    averaging: Seconds = 0.0  # of all; of a group it is less, by what its members send
    exposed: Seconds = 0.0
    in_vain: Seconds = 0.0  # what groups cost besides, and nobody foresees
    late_links: float = 0.0  # how often one slow link adds the time of two steps
    seed: int = 0
    num_windows: int = 0
    dealer: Dealer | None = None
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def compute(self, pipeline: int, count: int) -> Seconds:
        return sum(self.unit(self.rng, pipeline, self.num_windows) for _ in range(count))

    def window(self, way: str, num_steps: int) -> Times:
        if way != BALANCED:
            self.dealer = None
        found = (
            self._in_groups(way, num_steps) if way in GROUPS else self._in_lockstep(way, num_steps)
        )
        self.num_windows += 1
        return found

    def _late(self, probability: float) -> Seconds:
        return 2.0 * max(self.shape.shares) if self.rng.random() < probability else 0.0

    def _in_lockstep(self, way: str, num_steps: int) -> Times:
        number, shares = self.shape.num_pipelines, self.shape.shares
        found: list[list[Took]] = [[] for _ in shares]
        for _ in range(num_steps):
            counts: Sequence[int] = shares
            if way == BALANCED:
                self.dealer = self.dealer or Dealer(sum(shares))
                counts = list(self.dealer.deal(workers(number)).values())
            took = [self.compute(p, count) for p, count in enumerate(counts)]
            late = self._late(self.late_links)
            average = (self.averaging if way == BALANCED else self.exposed) + late
            for p, (seconds, count) in enumerate(zip(took, counts, strict=True)):
                waited = max(took) - seconds + average
                found[p].append(Took(seconds, waited, self.averaging + late, count, number))
                if self.dealer is not None:
                    self.dealer.measured(Worker(0, p), count, seconds)
        return found

    def _in_groups(self, way: str, num_steps: int) -> Times:
        number, shares = self.shape.num_pipelines, self.shape.shares
        computed: list[list[Seconds]] = [[] for _ in shares]

        def step(worker: Worker) -> Seconds:
            seconds = self.compute(worker.pipeline, shares[worker.pipeline])
            computed[worker.pipeline].append(seconds)
            return seconds

        average = self.averaging * (2 / 3) / ((number - 1) / number)
        policy = make_policies(way, num_stages=1, num_pipelines=number)[0]
        num_groups = num_steps * number // 3
        formed = train(
            policy, number, step, num_groups=num_groups, averaging=average + self.in_vain
        )
        found: list[list[Took]] = [[] for _ in shares]
        begun = [0.0] * number
        for at, group, _ in formed:
            end = at + average + self.in_vain
            for _, p in group.members:
                seconds = computed[p][len(found[p])]
                waited = max(0.0, end - begun[p] - seconds)
                found[p].append(Took(seconds, waited, average, shares[p], len(group.members)))
                begun[p] = end
        return found


def live(world: World, num_windows: int, auto: Auto | None = None) -> list[Decision]:
    auto = auto or Auto(world.shape)
    return [auto.after_window(world.window(auto.way, auto.num_steps)) for _ in range(num_windows)]


def ways(decisions: Sequence[Decision]) -> list[str]:
    return [decision.way for decision in decisions]


def equal(noise: float = 0.0) -> Slowness:
    return lambda rng, pipeline, window: 1 + rng.uniform(-noise, noise)


def sleeps(probability: float, factor: float, noise: float = 0.02) -> Slowness:
    """SDPipe's: a micro-batch takes longer, now and then."""

    def unit(rng: random.Random, pipeline: int, window: int) -> Seconds:
        late = factor if rng.random() < probability else 0.0
        return 1 + rng.uniform(-noise, noise) + late

    return unit


def one_slow(factor: float, noise: float, *, until: int | None = None) -> Slowness:
    def unit(rng: random.Random, pipeline: int, window: int) -> Seconds:
        is_slow = pipeline == 1 and (until is None or window < until)
        return (factor if is_slow else 1.0) * (1 + rng.uniform(-noise, noise))

    return unit


shares_of = st.tuples(st.integers(2, 16), st.integers(1, 8))
seeds = st.integers(0, 2**16)


@settings(max_examples=25)
@given(shares_of, st.floats(0, 0.05), st.floats(0, 3), st.floats(0, 1), st.booleans(), seeds)
def test_equal_machines_never_move_whatever_their_network(
    sizes: tuple[int, int],
    noise: float,
    averaging: float,
    exposed: float,
    overlap: bool,
    seed: int,
) -> None:
    number, share = sizes
    world = World(
        Shape(shares=(share,) * number, overlap=overlap),
        equal(noise),
        averaging=averaging * share,
        exposed=averaging * share * exposed,
        seed=seed,
    )
    assert not [decision.why for decision in live(world, 5) if decision.moves]


@settings(max_examples=10)
@given(st.integers(2, 12), st.floats(1.5, 4), st.floats(0, 0.05), st.booleans(), seeds)
def test_one_that_is_slow_for_good_gets_less_and_it_stays_so(
    number: int, factor: float, noise: float, overlap: bool, seed: int
) -> None:
    world = World(
        Shape(shares=(12,) * number, overlap=overlap),
        one_slow(factor, noise),
        averaging=0.3,
        exposed=0.1,
        seed=seed,
    )
    found = live(world, 5)
    assert ways(found) == [BALANCED] * 5
    assert "pipeline 1" in found[0].why
    assert found[-1].predicted[BALANCED] < found[-1].predicted[DECOUPLED]


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_slowness_that_comes_and_goes_is_met_with_groups(share: int, seed: int) -> None:
    world = World(Shape(shares=(share,) * 8), sleeps(0.1, 3), averaging=0.05, seed=seed)
    found = ways(live(world, 10))
    assert set(found[4:]) <= set(GROUPS), found


def test_averages_that_cost_more_than_waiting_are_not_worth_groups() -> None:
    world = World(Shape(shares=(1,) * 8), sleeps(0.1, 3), averaging=3.0, exposed=0.0)
    assert set(ways(live(world, 12))) == {DECOUPLED}


def test_links_that_are_slow_now_and_then_are_met_with_groups() -> None:
    world = World(Shape(shares=(4,) * 16), equal(0.02), averaging=0.2, late_links=0.5)
    found = live(world, 4)
    assert set(ways(found)) & set(GROUPS), found


@pytest.mark.parametrize("seed", range(2))
def test_when_a_burst_is_over_it_goes_back(seed: int) -> None:
    slow, calm = sleeps(0.1, 3), equal(0.03)

    def burst(rng: random.Random, pipeline: int, window: int) -> Seconds:
        return (slow if 3 <= window < 13 else calm)(rng, pipeline, window)

    world = World(Shape(shares=(2,) * 8), burst, averaging=0.05, seed=seed)
    found = ways(live(world, 20))
    assert set(found[:3]) == {DECOUPLED}
    assert set(found[8:13]) <= set(GROUPS), found
    assert set(found[15:]) == {DECOUPLED}, found


def test_when_the_slow_one_is_as_fast_as_others_again_it_goes_back() -> None:
    world = World(Shape(shares=(8,) * 4), one_slow(2, 0.02, until=6), averaging=0.5)
    found = ways(live(world, 12))
    assert set(found[:6]) == {BALANCED}
    assert set(found[8:]) == {DECOUPLED}, found


@settings(max_examples=6)
@given(st.floats(0, 0.2), st.floats(0, 2), st.floats(0, 1), seeds)
def test_two_ways_that_are_about_as_good_do_not_flap(
    probability: float, factor: float, averaging: float, seed: int
) -> None:
    world = World(Shape(shares=(2,) * 4), sleeps(probability, factor), averaging, seed=seed)
    moves = [decision.why for decision in live(world, 40) if decision.moves]
    assert len(moves) <= 6, moves


def test_a_way_that_does_not_pay_is_left_at_once_and_tried_more_and_more_seldom() -> None:
    world = World(Shape(shares=(1,) * 8), sleeps(0.1, 3), averaging=0.05, in_vain=5.0)
    found = live(world, 80)
    tried = [n for n, decision in enumerate(found) if decision.moves and decision.way in GROUPS]
    left = [n for n, decision in enumerate(found) if decision.moves and decision.way == DECOUPLED]
    assert all(out == into + 1 for into, out in zip(tried, left, strict=False)), (tried, left)
    assert "did not pay" in found[left[0]].why
    assert 3 <= len(tried) <= 6
    assert max(b - a for a, b in pairwise(tried)) > 16


@settings(max_examples=4)
@given(seeds)
def test_the_same_numbers_give_the_same_decisions(seed: int) -> None:
    one = World(Shape(shares=(2,) * 4), sleeps(0.1, 3), averaging=0.05, seed=seed)
    first, second = Auto(one.shape), Auto(one.shape)
    for _ in range(6):
        times = one.window(first.way, first.num_steps)
        assert first.after_window(times) == second.after_window(pickle.loads(pickle.dumps(times)))


def test_what_it_remembers_does_not_grow() -> None:
    world = World(Shape(shares=(2,) * 4), sleeps(0.1, 3), averaging=0.05)
    auto = Auto(world.shape)
    live(world, 8, auto)
    before = len(pickle.dumps(auto))
    live(world, 16, auto)
    assert len(pickle.dumps(auto)) < 2 * before


def test_more_than_there_is_memory_for_is_not_dealt() -> None:
    shape = Shape(shares=(8,) * 4)
    for most, expected in ((9, DECOUPLED), (12, BALANCED)):
        limited = replace(shape, ways=(DECOUPLED, BALANCED), most=(most,) * 4)
        assert ways(live(World(limited, one_slow(2, 0.0)), 2)) == [expected] * 2


def test_one_pipeline_and_one_that_has_made_no_step_decide_nothing() -> None:
    step = [Took(1.0, 0.0, 0.0, 1, 1)] * 20
    alone = Auto(Shape(shares=(1,))).after_window([step])
    assert (alone.moves, alone.why) == (False, "one pipeline waits for nobody")
    auto = Auto(Shape(shares=(1, 1, 1)))
    auto.way = ADAPTIVE
    assert "pipeline 2 has yet to end a step" in auto.after_window([step, step, []]).why


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shape(shares=(1, 0)), "shares="),
        (lambda: Shape(shares=(1, 1), ways=(BALANCED,)), "ways=balanced"),
        (lambda: Shape(shares=(1, 1), ways=(DECOUPLED, "static")), "static"),
        (lambda: Auto(Shape(shares=(1, 1)), num_steps=2, num_discarded=1), "num_steps=2"),
        (lambda: told([[1.0], [1.0, 1.0]]), r"\[1, 2\] steps under decoupled"),
        (lambda: told([[1.0]]), "2 pipelines"),
        (lambda: told([[1.0], [0.0]]), "pipeline 1: Took"),
        (lambda: told([[1.0], [float("nan")]]), "pipeline 1: Took"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        make()


def told(compute: Sequence[Sequence[Seconds]]) -> Decision:
    times = [[Took(seconds, 0.0, 0.0, 1, 2) for seconds in one] for one in compute]
    return Auto(Shape(shares=(1, 1))).after_window(times)


class Recorder:
    """Watches a simulation: what each step of each pipeline computes, at its first stage."""

    def __init__(self, num_pipelines: int) -> None:
        self.computed: list[list[Seconds]] = [[] for _ in range(num_pipelines)]
        self._began = [0.0] * num_pipelines

    def on_begin(self, worker: Worker, now: Seconds) -> None:
        if worker.stage == 0:
            self._began[worker.pipeline] = now

    def on_step(self, worker: Worker, now: Seconds) -> None:
        if worker.stage == 0:
            self.computed[worker.pipeline].append(now - self._began[worker.pipeline])

    def on_average(self, *_: object) -> None: ...
    def on_applied(self, *_: object) -> None: ...
    def on_healed(self, *_: object) -> None: ...
    def on_served(self, *_: object) -> None: ...


SLOW = Scenario(name="slow", slow=(Slow(device="d2", factor=2.0),))
A, B = Scenario.load("sdpipe_a"), Scenario.load("sdpipe_b")
NUM_STEPS = 80
SIZE, UPLINK = 1e7, 1e9


class Case(NamedTuple):
    scenario: Scenario
    expected: tuple[str, ...]
    num_stages: int = 1
    num_pipelines: int = 8
    share: int = 4
    overlap: bool = False

    @property
    def shape(self) -> Shape:
        ways = WAYS if self.num_stages == 1 else (DECOUPLED, *GROUPS)  # as the simulator can
        return Shape(
            shares=(self.share,) * self.num_pipelines,
            num_stages=self.num_stages,
            ways=ways,
            overlap=self.overlap,
        )

    def job(self, way: str) -> SimulatedJob:
        return equal_job(
            num_stages=self.num_stages,
            num_pipelines=self.num_pipelines,
            num_microbatches=self.share,
            forward=0.1,
            backward=0.2,
            gradient_bytes=SIZE,
            bandwidth=UPLINK,
            uplink=UPLINK,
            policy="all_reduce" if way == DECOUPLED else way,
            decoupled=way == DECOUPLED,
            overlap=self.overlap and way in GROUPS,
            scenario=self.scenario,
        )


CASES = {
    "calm": Case(CALM, (DECOUPLED,)),
    "one slow": Case(SLOW, (BALANCED,)),
    "setting a": Case(A, (DECOUPLED, *GROUPS)),
    "setting b": Case(B, GROUPS),
    "setting b, 16": Case(B, GROUPS, num_pipelines=16, share=2),
    "setting b, stages": Case(B, (DECOUPLED,), num_stages=4, num_pipelines=4, share=8),
    "setting b, overlap": Case(B, GROUPS, num_stages=4, num_pipelines=4, share=8, overlap=True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_foreseen_is_what_is_simulated_and_the_choice_is_no_worse(case: str) -> None:
    tried = CASES[case]
    number, recorder = tried.num_pipelines, Recorder(tried.num_pipelines)
    simulate(tried.job(DECOUPLED), num_steps=NUM_STEPS, observers=[recorder])
    averaging = Wire(2 * SIZE / UPLINK).cost(number)
    steps = list(zip(*recorder.computed, strict=True))
    times = [
        [Took(step[p], max(step) - step[p], averaging, tried.share, number) for step in steps]
        for p in range(number)
    ]
    decision = Auto(tried.shape, num_steps=NUM_STEPS).after_window(times)
    simulated = {
        way: simulate(tried.job(way), num_steps=NUM_STEPS).step_time for way in decision.predicted
    }
    assert decision.way in tried.expected, decision
    assert decision.predicted == pytest.approx(simulated, rel=0.1)
    assert simulated[decision.way] <= 1.03 * simulated[DECOUPLED]
