"""Auto switch: it switches to the simplest mode that pays, undoes failures, and does not flap."""

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
from polyrhythm.simulate.job import EMPTY_SCENARIO, SimulatedJob
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.autoswitch import NUM_WINDOWS, AutoSwitch, SwitchDecision
from polyrhythm.sync.modes import AUTO_MODES, make_policies
from polyrhythm.sync.policies.balanced import MicrobatchBalancer
from polyrhythm.sync.replay import JobShape, LinkCost, StepTiming, StepTimings
from polyrhythm.types import Seconds, Worker
from tests.pure.policy_driver import train, workers
from tests.pure.simulate_cases import equal_job

DECOUPLED, BALANCED, *GROUPS = AUTO_MODES
MicrobatchTime = Callable[[random.Random, int, int], Seconds]  # of a micro-batch: pipeline, window


@dataclass
class VirtualJob:
    """Pipelines that train in virtual time in a given sync mode, and return their step timings."""

    shape: JobShape
    unit: MicrobatchTime
    averaging: Seconds = 0.0  # of all pipelines; a group's average is shorter
    exposed: Seconds = 0.0
    hidden_group_cost: Seconds = 0.0  # extra cost of groups that the replay does not know
    slow_link_probability: float = 0.0  # that a slow link adds the time of two steps
    seed: int = 0
    num_windows: int = 0
    balancer: MicrobatchBalancer | None = None
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def compute(self, pipeline: int, count: int) -> Seconds:
        return sum(self.unit(self.rng, pipeline, self.num_windows) for _ in range(count))

    def window(self, sync_mode: str, num_steps: int) -> StepTimings:
        if sync_mode != BALANCED:
            self.balancer = None
        timings = (
            self._in_groups(sync_mode, num_steps)
            if sync_mode in GROUPS
            else self._in_lockstep(sync_mode, num_steps)
        )
        self.num_windows += 1
        return timings

    def _link_delay(self, probability: float) -> Seconds:
        return 2.0 * max(self.shape.shares) if self.rng.random() < probability else 0.0

    def _in_lockstep(self, sync_mode: str, num_steps: int) -> StepTimings:
        number, shares = self.shape.num_pipelines, self.shape.shares
        timings: list[list[StepTiming]] = [[] for _ in shares]
        for _ in range(num_steps):
            counts: Sequence[int] = shares
            if sync_mode == BALANCED:
                self.balancer = self.balancer or MicrobatchBalancer(sum(shares))
                counts = list(self.balancer.assign(workers(number)).values())
            compute = [self.compute(p, count) for p, count in enumerate(counts)]
            delay = self._link_delay(self.slow_link_probability)
            average = (self.averaging if sync_mode == BALANCED else self.exposed) + delay
            for p, (seconds, count) in enumerate(zip(compute, counts, strict=True)):
                waited = max(compute) - seconds + average
                timing = StepTiming(seconds, waited, self.averaging + delay, count, number)
                timings[p].append(timing)
                if self.balancer is not None:
                    self.balancer.record(Worker(0, p), count, seconds)
        return timings

    def _in_groups(self, sync_mode: str, num_steps: int) -> StepTimings:
        number, shares = self.shape.num_pipelines, self.shape.shares
        computed: list[list[Seconds]] = [[] for _ in shares]

        def step(worker: Worker) -> Seconds:
            seconds = self.compute(worker.pipeline, shares[worker.pipeline])
            computed[worker.pipeline].append(seconds)
            return seconds

        average = self.averaging * (2 / 3) / ((number - 1) / number)
        policy = make_policies(sync_mode, num_stages=1, num_pipelines=number)[0]
        num_groups = num_steps * number // 3
        formed = train(
            policy, number, step, num_groups=num_groups, averaging=average + self.hidden_group_cost
        )
        timings: list[list[StepTiming]] = [[] for _ in shares]
        starts = [0.0] * number
        for at, group, _ in formed:
            end = at + average + self.hidden_group_cost
            for _, p in group.members:
                seconds = computed[p][len(timings[p])]
                waited = max(0.0, end - starts[p] - seconds)
                timing = StepTiming(seconds, waited, average, shares[p], len(group.members))
                timings[p].append(timing)
                starts[p] = end
        return timings


def run_windows(
    world: VirtualJob, num_windows: int, auto: AutoSwitch | None = None
) -> list[SwitchDecision]:
    auto = auto or AutoSwitch(world.shape)
    return [
        auto.after_window(world.window(auto.sync_mode, auto.num_steps)) for _ in range(num_windows)
    ]


def sync_modes(decisions: Sequence[SwitchDecision]) -> list[str]:
    return [decision.sync_mode for decision in decisions]


def equal(noise: float = 0.0) -> MicrobatchTime:
    return lambda rng, pipeline, window: 1 + rng.uniform(-noise, noise)


def random_stalls(probability: float, factor: float, noise: float = 0.02) -> MicrobatchTime:
    """SDPipe's stragglers: a micro-batch takes longer with some probability."""

    def unit(rng: random.Random, pipeline: int, window: int) -> Seconds:
        stall = factor if rng.random() < probability else 0.0
        return 1 + rng.uniform(-noise, noise) + stall

    return unit


def one_slow(factor: float, noise: float, *, until: int | None = None) -> MicrobatchTime:
    def unit(rng: random.Random, pipeline: int, window: int) -> Seconds:
        is_slow = pipeline == 1 and (until is None or window < until)
        return (factor if is_slow else 1.0) * (1 + rng.uniform(-noise, noise))

    return unit


shares_of = st.tuples(st.integers(2, 16), st.integers(1, 8))
seeds = st.integers(0, 2**16)


@settings(max_examples=25)
@given(shares_of, st.floats(0, 0.05), st.floats(0, 3), st.floats(0, 1), st.booleans(), seeds)
def test_equal_machines_never_switch(
    sizes: tuple[int, int],
    noise: float,
    averaging: float,
    exposed: float,
    overlap: bool,
    seed: int,
) -> None:
    number, share = sizes
    world = VirtualJob(
        JobShape(shares=(share,) * number, overlap=overlap),
        equal(noise),
        averaging=averaging * share,
        exposed=averaging * share * exposed,
        seed=seed,
    )
    assert not [decision.why for decision in run_windows(world, 5) if decision.switches]


@settings(max_examples=10)
@given(st.integers(2, 12), st.floats(2.5, 4), st.floats(0, 0.05), st.booleans(), seeds)
def test_a_constant_straggler_switches_to_balanced_and_stays(
    number: int, factor: float, noise: float, overlap: bool, seed: int
) -> None:
    world = VirtualJob(
        JobShape(shares=(12,) * number, overlap=overlap),
        one_slow(factor, noise),
        averaging=0.3,
        exposed=0.1,
        seed=seed,
    )
    found = run_windows(world, 6)
    assert sync_modes(found) == [DECOUPLED] * 2 + [BALANCED] * 4
    assert "pipeline 1" in found[2].why
    assert found[-1].predicted[BALANCED] < found[-1].predicted[DECOUPLED]


@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=8), seeds)
def test_a_switch_needs_the_gain_in_three_windows_in_a_row(slow: list[bool], seed: int) -> None:
    def unit(rng: random.Random, pipeline: int, window: int) -> Seconds:
        return (3.0 if pipeline == 1 and slow[window] else 1.0) * (1 + rng.uniform(-0.02, 0.02))

    world = VirtualJob(JobShape(shares=(6,) * 4), unit, averaging=0.3, exposed=0.1, seed=seed)
    found = run_windows(world, len(slow))
    expected = next((n for n in range(2, len(slow)) if all(slow[n - 2 : n + 1])), None)
    assert next((n for n, each in enumerate(found) if each.switches), None) == expected


@settings(max_examples=10)
@given(st.floats(0, 0.3), st.floats(0, 6), st.floats(1, 4), seeds)
def test_one_machine_never_switches(
    probability: float, stall: float, factor: float, seed: int
) -> None:
    stalls = random_stalls(probability, stall)

    def unit(rng: random.Random, pipeline: int, window: int) -> Seconds:
        return stalls(rng, pipeline, window) * (factor if pipeline == 1 else 1.0)

    world = VirtualJob(JobShape(shares=(2,) * 4, is_one_machine=True), unit, 0.05, seed=seed)
    assert not any(decision.switches for decision in run_windows(world, 5))


@pytest.mark.parametrize(("share", "stall"), [(1, 3), (2, 6)])
@pytest.mark.parametrize("seed", range(2))
def test_random_stalls_switch_to_groups(share: int, stall: float, seed: int) -> None:
    world = VirtualJob(
        JobShape(shares=(share,) * 8), random_stalls(0.1, stall), averaging=0.05, seed=seed
    )
    found = sync_modes(run_windows(world, 10))
    assert set(found[4:]) <= set(GROUPS), found


def test_expensive_averages_do_not_switch_to_groups() -> None:
    world = VirtualJob(JobShape(shares=(1,) * 8), random_stalls(0.1, 3), averaging=3.0, exposed=0.0)
    assert set(sync_modes(run_windows(world, 12))) == {DECOUPLED}


def test_temporarily_slow_links_switch_to_groups() -> None:
    world = VirtualJob(
        JobShape(shares=(4,) * 16), equal(0.02), averaging=0.2, slow_link_probability=0.5
    )
    found = run_windows(world, 4)
    assert set(sync_modes(found)) & set(GROUPS), found


@pytest.mark.parametrize("seed", range(2))
def test_end_of_a_burst_switches_back_to_decoupled(seed: int) -> None:
    slow, calm = random_stalls(0.1, 6), equal(0.03)

    def burst(rng: random.Random, pipeline: int, window: int) -> Seconds:
        return (slow if 3 <= window < 13 else calm)(rng, pipeline, window)

    world = VirtualJob(JobShape(shares=(2,) * 8), burst, averaging=0.05, seed=seed)
    found = sync_modes(run_windows(world, 20))
    assert set(found[:3]) == {DECOUPLED}
    assert set(found[8:13]) <= set(GROUPS), found
    assert set(found[15:]) == {DECOUPLED}, found


def test_recovered_straggler_switches_back_to_decoupled() -> None:
    world = VirtualJob(JobShape(shares=(8,) * 4), one_slow(2, 0.02, until=6), averaging=0.5)
    found = sync_modes(run_windows(world, 12))
    assert found[:6] == [DECOUPLED] * 2 + [BALANCED] * 4
    assert set(found[8:]) == {DECOUPLED}, found


@settings(max_examples=6)
@given(st.floats(0, 0.2), st.floats(0, 2), st.floats(0, 1), seeds)
def test_equally_good_modes_do_not_flap(
    probability: float, factor: float, averaging: float, seed: int
) -> None:
    world = VirtualJob(
        JobShape(shares=(2,) * 4), random_stalls(probability, factor), averaging, seed=seed
    )
    switches = [decision.why for decision in run_windows(world, 40) if decision.switches]
    assert len(switches) <= 6, switches


def test_failed_switch_is_undone_and_retried_with_backoff() -> None:
    world = VirtualJob(
        JobShape(shares=(1,) * 8), random_stalls(0.1, 3), averaging=0.05, hidden_group_cost=5.0
    )
    found = run_windows(world, 80)
    tried = [
        n for n, decision in enumerate(found) if decision.switches and decision.sync_mode in GROUPS
    ]
    left = [
        n
        for n, decision in enumerate(found)
        if decision.switches and decision.sync_mode == DECOUPLED
    ]
    assert all(out == into + 1 for into, out in zip(tried, left, strict=False)), (tried, left)
    assert "did not pay" in found[left[0]].why
    assert 3 <= len(tried) <= 6
    assert max(b - a for a, b in pairwise(tried)) > 16


@settings(max_examples=4)
@given(seeds)
def test_same_timings_give_the_same_switch_decisions(seed: int) -> None:
    world = VirtualJob(JobShape(shares=(2,) * 4), random_stalls(0.1, 3), averaging=0.05, seed=seed)
    first, second = AutoSwitch(world.shape), AutoSwitch(world.shape)
    for _ in range(6):
        times = world.window(first.sync_mode, first.num_steps)
        assert first.after_window(times) == second.after_window(pickle.loads(pickle.dumps(times)))


def test_autoswitch_state_size_is_bounded() -> None:
    world = VirtualJob(JobShape(shares=(2,) * 4), random_stalls(0.1, 3), averaging=0.05)
    auto = AutoSwitch(world.shape)
    run_windows(world, 8, auto)
    before = len(pickle.dumps(auto))
    run_windows(world, 16, auto)
    assert len(pickle.dumps(auto)) < 2 * before


def test_balanced_respects_the_memory_limit() -> None:
    shape = JobShape(shares=(8,) * 4)
    for most, expected in ((9, DECOUPLED), (12, BALANCED)):
        limited = replace(shape, sync_modes=(DECOUPLED, BALANCED), max_microbatches=(most,) * 4)
        assert run_windows(VirtualJob(limited, one_slow(2, 0.0)), 3)[-1].sync_mode == expected


def test_no_switch_with_one_pipeline_or_without_steps() -> None:
    step = [StepTiming(1.0, 0.0, 0.0, 1, 1)] * 20
    alone = AutoSwitch(JobShape(shares=(1,))).after_window([step])
    assert (alone.switches, alone.why) == (False, "a single pipeline waits for no other")
    auto = AutoSwitch(JobShape(shares=(1, 1, 1)))
    auto.sync_mode = GROUPS[0]
    assert "pipeline 2 has not ended a step" in auto.after_window([step, step, []]).why


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JobShape(shares=(1, 0)), "shares="),
        (lambda: JobShape(shares=(1, 1), sync_modes=(BALANCED,)), "sync_modes=balanced"),
        (lambda: JobShape(shares=(1, 1), sync_modes=(DECOUPLED, "static")), "static"),
        (lambda: AutoSwitch(JobShape(shares=(1, 1)), num_steps=2, num_discarded=1), "num_steps=2"),
        (lambda: decide_once([[1.0], [1.0, 1.0]]), r"\[1, 2\] steps in mode decoupled"),
        (lambda: decide_once([[1.0]]), "2 pipelines"),
        (lambda: decide_once([[1.0], [0.0]]), "pipeline 1: StepTiming"),
        (lambda: decide_once([[1.0], [float("nan")]]), "pipeline 1: StepTiming"),
    ],
)
def test_invalid_shapes_and_timings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()


def decide_once(compute: Sequence[Sequence[Seconds]]) -> SwitchDecision:
    times = [[StepTiming(seconds, 0.0, 0.0, 1, 2) for seconds in steps] for steps in compute]
    return AutoSwitch(JobShape(shares=(1, 1))).after_window(times)


class Recorder:
    """Observer that records the compute time of each step of each pipeline's first stage."""

    def __init__(self, num_pipelines: int) -> None:
        self.computed: list[list[Seconds]] = [[] for _ in range(num_pipelines)]
        self._start = [0.0] * num_pipelines

    def on_step_start(self, worker: Worker, now: Seconds) -> None:
        if worker.stage == 0:
            self._start[worker.pipeline] = now

    def on_step(self, worker: Worker, now: Seconds) -> None:
        if worker.stage == 0:
            self.computed[worker.pipeline].append(now - self._start[worker.pipeline])

    def on_average(self, *_: object) -> None: ...
    def on_applied(self, *_: object) -> None: ...
    def on_copied(self, *_: object) -> None: ...
    def on_server_transfer(self, *_: object) -> None: ...


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
    def shape(self) -> JobShape:
        # The simulator cannot balance pipelines of several stages.
        sync_modes = AUTO_MODES if self.num_stages == 1 else (DECOUPLED, *GROUPS)
        return JobShape(
            shares=(self.share,) * self.num_pipelines,
            num_stages=self.num_stages,
            sync_modes=sync_modes,
            overlap=self.overlap,
        )

    def job(self, sync_mode: str) -> SimulatedJob:
        return equal_job(
            num_stages=self.num_stages,
            num_pipelines=self.num_pipelines,
            num_microbatches=self.share,
            forward=0.1,
            backward=0.2,
            gradient_bytes=SIZE,
            bandwidth=UPLINK,
            uplink=UPLINK,
            policy="all_reduce" if sync_mode == DECOUPLED else sync_mode,
            decoupled=sync_mode == DECOUPLED,
            overlap=self.overlap and sync_mode in GROUPS,
            scenario=self.scenario,
        )


CASES = {
    "calm": Case(EMPTY_SCENARIO, (DECOUPLED,)),
    "one slow": Case(SLOW, (BALANCED,)),
    "setting a": Case(A, (DECOUPLED, *GROUPS)),
    "setting b": Case(B, (DECOUPLED,)),  # 16 % less
    "setting b, 16": Case(B, GROUPS, num_pipelines=16, share=2),
    "setting b, stages": Case(B, (DECOUPLED,), num_stages=4, num_pipelines=4, share=8),
    "setting b, overlap": Case(
        B, (DECOUPLED,), num_stages=4, num_pipelines=4, share=8, overlap=True
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_predicted_step_times_match_the_simulator(case: str) -> None:
    tried = CASES[case]
    number, recorder = tried.num_pipelines, Recorder(tried.num_pipelines)
    simulate(tried.job(DECOUPLED), num_steps=NUM_STEPS, observers=[recorder])
    averaging = LinkCost(2 * SIZE / UPLINK).cost(number)
    steps = list(zip(*recorder.computed, strict=True))
    times = [
        [StepTiming(step[p], max(step) - step[p], averaging, tried.share, number) for step in steps]
        for p in range(number)
    ]
    auto = AutoSwitch(tried.shape, num_steps=NUM_STEPS)
    decision = [auto.after_window(times) for _ in range(3)][-1]
    simulated = {
        sync_mode: simulate(tried.job(sync_mode), num_steps=NUM_STEPS).step_time
        for sync_mode in decision.predicted
    }
    assert decision.sync_mode in tried.expected, decision
    assert decision.predicted == pytest.approx(simulated, rel=0.1)
    assert simulated[decision.sync_mode] <= 1.03 * simulated[DECOUPLED]


def test_lost_pipeline_is_forgotten() -> None:
    def timings(compute: float) -> list[StepTiming]:
        return [StepTiming(compute, 0.0, 0.0, 4, 2)] * 20

    auto, other = (AutoSwitch(JobShape(shares=shares)) for shares in ((4, 4, 4), (6, 6)))
    for each in (auto, other):
        each._switch("adaptive")
    auto.after_window([timings(1.0), timings(9.0), timings(1.0)])  # its last window
    auto.keep([0, 2])
    assert auto.shape == other.shape
    for _ in range(NUM_WINDOWS):
        left = [timings(1.0), timings(1.0)]
        decision = auto.after_window(left)
        assert decision.predicted == other.after_window(left).predicted
    auto.keep([1])
    assert not auto.after_window([timings(1.0)]).switches
