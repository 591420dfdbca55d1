"""Micro-batches of lost workers are run by others of their stage, in lists that never deadlock."""

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from polyrhythm.cost.pipeline import LinkTimes
from polyrhythm.errors import PlanError, ScheduleError
from polyrhythm.plan.plan import PipelinePlan, Plan, even_plan
from polyrhythm.plan.reroute import RerouteDecision, decide_rerouting
from polyrhythm.plan.rerouted_order import (
    Rerouting,
    RoutedAction,
    check_rerouting,
    order_actions,
    replay,
)
from polyrhythm.plan.routes import GridTimes, Routes, assign_routes, least_length
from polyrhythm.plan.survivors import Assignment, assign_survivors, first_assignment
from polyrhythm.types import Op, Worker
from tests.pure.schedule_cases import even_times, measured

MICROBATCHES = 8
PIPELINES = 4


@dataclass(frozen=True)
class Case:
    lost: frozenset[Worker]
    num_microbatches: tuple[int, ...]
    times: GridTimes

    @property
    def routes(self) -> Routes:
        return assign_routes(self.lost, self.num_microbatches, self.times)

    @property
    def num_stages(self) -> int:
        return self.times.pipelines[0].num_stages


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any losses that leave a worker of each stage, and any times."""
    num_stages, num_pipelines = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    every = [Worker(s, p) for s in range(num_stages) for p in range(num_pipelines)]
    lost = draw(st.frozensets(st.sampled_from(every)))
    kept = {Worker(s, draw(st.integers(0, num_pipelines - 1))) for s in range(num_stages)}
    return Case(
        lost=frozenset(lost - kept),
        num_microbatches=tuple(draw(st.integers(1, 5)) for _ in range(num_pipelines)),
        times=GridTimes(pipelines=tuple(draw(measured(num_stages)) for _ in range(num_pipelines))),
    )


limits_of_stages = st.lists(st.integers(1, 6), min_size=4, max_size=4)


@dataclass
class Channel:
    """Messages between two workers, in the order sent; receives in the order of the list."""

    expected: list[RoutedAction] = field(default_factory=list)
    sent: list[RoutedAction] = field(default_factory=list)
    num_arrived: int = 0
    num_used: int = 0


class Messages:
    """The runtime: sends never block, and `window` receives are posted ahead per sender."""

    def __init__(self, rerouting: Rerouting, window: int) -> None:
        self.rerouting, self.window = rerouting, window
        self.places = dict.fromkeys(rerouting.actions, 0)
        self.channels: dict[tuple[Worker, Worker], Channel] = {}
        for worker, actions in rerouting.actions.items():
            for action in actions:
                if (source := rerouting.source(worker, action)) is not None:
                    self.channel(source, worker).expected.append(action)

    def channel(self, source: Worker, target: Worker) -> Channel:
        return self.channels.setdefault((source, target), Channel())

    def moves(self) -> list[Channel | Worker]:
        able: list[Channel | Worker] = [
            channel
            for channel in self.channels.values()
            if channel.num_arrived < min(len(channel.sent), channel.num_used + self.window)
        ]
        for worker, place in self.places.items():
            actions = self.rerouting.actions[worker]
            if place < len(actions) and self.has_input(worker, actions[place]):
                able.append(worker)
        return able

    def has_input(self, worker: Worker, action: RoutedAction) -> bool:
        source = self.rerouting.source(worker, action)
        if source is None:
            return True
        channel = self.channel(source, worker)
        return channel.num_used < channel.num_arrived

    def move(self, mover: Channel | Worker) -> None:
        if isinstance(mover, Channel):
            assert mover.sent[mover.num_arrived] == mover.expected[mover.num_arrived]
            mover.num_arrived += 1
            return
        action = self.rerouting.actions[mover][self.places[mover]]
        self.places[mover] += 1
        if (source := self.rerouting.source(mover, action)) is not None:
            channel = self.channel(source, mover)
            assert channel.sent[channel.num_used] == action
            channel.num_used += 1
        if (target := self.rerouting.target(mover, action)) is not None:
            self.channel(mover, target).sent.append(action)

    def run(self, choices: Random) -> bool:
        while able := self.moves():
            self.move(choices.choice(able))
        return all(p == len(self.rerouting.actions[w]) for w, p in self.places.items())


@given(cases())
def test_each_microbatch_has_one_worker_per_stage(case: Case) -> None:
    routes = case.routes
    assert routes.num_microbatches == case.num_microbatches
    assert {*routes.workers}.isdisjoint(case.lost)
    for pipeline, of_pipeline in enumerate(routes.by_pipeline):
        for number in range(len(of_pipeline)):
            for stage in range(case.num_stages):
                worker = routes.worker(stage, pipeline, number)
                own = Worker(stage, pipeline)
                assert worker.stage == stage
                assert worker not in case.lost
                assert own in case.lost or worker == own
    for stage in range(case.num_stages):
        loads = [load for worker, load in routes.loads.items() if worker.stage == stage]
        assert sum(loads) == sum(case.num_microbatches)


@given(st.integers(1, 3), st.integers(2, 6), st.integers(1, 9), st.data())
def test_equal_workers_of_a_stage_get_equal_work(
    num_stages: int, num_pipelines: int, size: int, data: st.DataObject
) -> None:
    times = GridTimes(pipelines=(even_times(num_stages, 0.0),) * num_pipelines)
    holes = data.draw(st.sets(st.integers(0, num_pipelines - 1), max_size=num_pipelines - 1))
    lost = {Worker(0, pipeline) for pipeline in holes}
    routes = assign_routes(lost, [size] * num_pipelines, times)
    loads = [routes.loads[worker] for worker in routes.workers if worker.stage == 0]
    assert max(loads) - min(loads) <= 1


@given(cases(), limits_of_stages)
def test_each_action_runs_once_and_memory_is_bounded(case: Case, limits: list[int]) -> None:
    most = tuple(limits[: case.num_stages])
    found = order_actions(case.routes, case.times, max_in_flight=most)
    check_rerouting(found)
    counts = Counter(
        (worker.stage, action) for worker, actions in found.actions.items() for action in actions
    )
    assert counts == {
        (stage, RoutedAction(op, pipeline, number)): 1
        for stage in range(case.num_stages)
        for op in Op
        for pipeline, size in enumerate(case.num_microbatches)
        for number in range(size)
    }
    assert all(peak <= limit for peak, limit in zip(found.in_flight, most, strict=True))
    for actions in found.actions.values():
        places = {action: place for place, action in enumerate(actions)}
        for op, pipeline, number in actions:
            if op is Op.F:
                backward = RoutedAction(Op.B, pipeline, number)
                assert places[backward] > places[op, pipeline, number]


@given(cases(), limits_of_stages, st.integers(1, 3), st.randoms(use_true_random=False))
def test_lists_never_deadlock(case: Case, limits: list[int], window: int, choices: Random) -> None:
    most = tuple(limits[: case.num_stages])
    found = order_actions(case.routes, case.times, max_in_flight=most)
    assert Messages(found, window).run(choices)


@given(cases(), st.randoms(use_true_random=False))
def test_check_finds_lists_that_cannot_be_executed(case: Case, random: Random) -> None:
    found = order_actions(case.routes, case.times)
    actions = {worker: list(row) for worker, row in found.actions.items()}
    row = actions[random.choice(found.routes.workers)]
    assume(len(row) > 1)
    place = random.randrange(len(row) - 1)
    row[place], row[place + 1] = row[place + 1], row[place]
    other = replace(found, actions={worker: tuple(row) for worker, row in actions.items()})
    try:
        check_rerouting(other)
    except ScheduleError:
        return
    assert Messages(other, 1).run(random)


def test_check_names_the_defect() -> None:
    """A pipeline that has lost all its workers shares those of the other one."""
    times = GridTimes(pipelines=(even_times(2, 0.0),) * 2)
    routes = assign_routes([Worker(0, 0), Worker(1, 0)], [1, 1], times)
    found = order_actions(routes, times)
    f0, f1, b0, b1 = (RoutedAction(op, pipeline, 0) for op in (Op.F, Op.B) for pipeline in (0, 1))
    first, last = Worker(0, 1), Worker(1, 1)

    def error(of_first: tuple[RoutedAction, ...], of_last: tuple[RoutedAction, ...]) -> str:
        with pytest.raises(ScheduleError) as raised:
            check_rerouting(replace(found, actions={first: of_first, last: of_last}))
        return str(raised.value)

    assert "s0p1 runs F0p0 B0p0" in error((f0, b0), (f0, f1, b0, b1))
    assert "s1p1 runs B0p1 before F0p1" in error((f0, f1, b0, b1), (f0, b0, b1, f1))
    assert "uses the messages of s0p1 in another order" in error((f0, f1, b0, b1), (f1, f0, b0, b1))
    assert "deadlock: s0p1 before B0p0, s1p1 before F0p1" in error(
        (f0, b0, f1, b1), (f0, f1, b0, b1)
    )


@given(cases())
def test_prediction_is_that_of_the_lists_and_above_the_bound(case: Case) -> None:
    found = order_actions(case.routes, case.times)
    ends = replay(found, case.times)
    last = max(end for of_worker in ends.values() for end in of_worker)
    assert last == pytest.approx(found.length)
    assert found.length >= least_length(case.routes, case.times) * (1 - 1e-9)


@given(cases(), st.randoms(use_true_random=False))
def test_all_members_reach_the_same_lists(case: Case, random: Random) -> None:
    shuffled = [*case.lost]
    random.shuffle(shuffled)
    again = assign_routes(shuffled, [*case.num_microbatches], case.times)
    assert again == case.routes
    assert order_actions(again, case.times) == order_actions(case.routes, case.times)


@pytest.mark.parametrize("transfer", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_step_takes_at_most_a_tenth_more_than_its_bound(num_stages: int, transfer: float) -> None:
    """For any lost stage: the bound divides its work among three workers of four."""
    times = GridTimes(pipelines=(even_times(num_stages, transfer),) * PIPELINES)
    for stage in range(num_stages):
        for pipeline in range(PIPELINES):
            routes = assign_routes([Worker(stage, pipeline)], [MICROBATCHES] * PIPELINES, times)
            found = order_actions(routes, times)
            bound = least_length(routes, times)
            assert bound >= PIPELINES * MICROBATCHES / 3 * 3.0
            assert bound / found.length >= 0.94
            assert max(routes.loads.values()) == 11


def decision_for(
    plan: Plan, lost: set[int], times: GridTimes, **more: object
) -> tuple[Assignment, RerouteDecision]:
    start = first_assignment(plan)
    members = [member for member in start.members if member not in lost]
    return start, decide_rerouting(start, members, times, **more)  # type: ignore[arg-type]


def four_pipelines(num_stages: int, size: int = MICROBATCHES) -> Plan:
    plan = even_plan(num_layers=num_stages, num_stages=num_stages, num_pipelines=PIPELINES)
    pipeline = PipelinePlan(num_microbatches=size, schedule="1f1b")
    return replace(plan, pipelines=(pipeline,) * PIPELINES, microbatch_size=1)


def test_a_lost_first_stage_is_rerouted_and_a_lost_last_stage_is_not() -> None:
    times = GridTimes(pipelines=(even_times(4, 0.0),) * PIPELINES)
    _, first = decision_for(four_pipelines(4), {0}, times)
    assert first.rerouting is not None
    assert first.rerouted_step is not None
    assert first.dissolved_step is not None
    assert first.dissolved_step / first.rerouted_step == pytest.approx(42 / 35)
    assert first.workers == {
        m: first_assignment(four_pipelines(4)).workers[m] for m in range(1, 16)
    }
    assert first.why == (
        "reroute: with the micro-batches of s0p0 rerouted a step takes 35 s (at best 33 s), "
        "with 3 whole pipelines 42 s"
    )
    # Its workers wait for the other stages in any case, and have as much to do.
    _, last = decision_for(four_pipelines(4), {3}, times)
    assert last.rerouting is None
    assert last.workers == {}
    assert last.dissolved is not None
    assert last.dissolved.plan.num_pipelines == 3
    assert last.why.startswith("dissolve: with 3 whole pipelines a step takes 42 s")


@given(cases())
def test_the_decision_is_for_the_shorter_step_unless_both_are_as_long(case: Case) -> None:
    plan = even_plan(
        num_layers=case.num_stages,
        num_stages=case.num_stages,
        num_pipelines=len(case.num_microbatches),
    )
    pipelines = tuple(PipelinePlan(num_microbatches=size) for size in case.num_microbatches)
    plan = replace(plan, pipelines=pipelines, microbatch_size=1)
    lost = {plan.rank(worker) for worker in case.lost}
    start, found = decision_for(plan, lost, case.times)
    assert found.dissolved == assign_survivors(start, {*start.members} - lost)
    left = {*start.members} - lost
    whole = {start.workers[member].pipeline for member in left}
    assert found.before.plan.num_pipelines == len(whole)
    if len(left) == case.num_stages * len(whole):
        assert (found.rerouting, found.why) == (None, "no place is without a process")
        return
    assert found.rerouted_step is not None
    assert found.bound is not None
    assert found.bound <= found.rerouted_step * (1 + 1e-9)
    assert found.dissolved_step is not None
    assert (found.rerouting is not None) == (found.rerouted_step < found.dissolved_step * 0.99)
    if found.rerouting is not None:
        assert found.rerouting.length == found.rerouted_step
        assert {*found.workers.values()} == {*found.rerouting.routes.workers}
        assert {*found.workers} == left
        assert sum(found.rerouting.routes.num_microbatches) == sum(case.num_microbatches)


def test_a_spare_takes_the_place_of_a_lost_worker() -> None:
    plan = four_pipelines(2)
    whole = first_assignment(plan)
    fewer = assign_survivors(whole, {*whole.members} - {0})  # process 1 is a spare of stage 1
    assert fewer is not None
    times = GridTimes(pipelines=(even_times(2, 0.0),) * 3)
    found = decide_rerouting(fewer, {*fewer.members} - {3}, times)
    assert found.rerouting is None
    assert found.why == "no place is without a process"
    # Process 4 has the first stage, of which there is no spare.
    found = decide_rerouting(fewer, {*fewer.members} - {3, 4}, times)
    assert found.rerouting is not None
    assert found.rerouting.routes.lost == (Worker(0, 1),)
    assert found.workers[1] == Worker(1, 0)


def test_losses_one_after_the_other() -> None:
    """Holes add up; a pipeline that has lost all its workers is dissolved."""
    times = GridTimes(pipelines=(even_times(3, 0.0),) * PIPELINES)
    _, first = decision_for(four_pipelines(3), {0}, times)
    assert first.rerouting is not None
    second = decide_rerouting(first.before, {*first.workers} - {4}, times)
    assert second.rerouting is not None
    assert second.rerouting.routes.lost == (Worker(0, 0), Worker(1, 1))
    third = decide_rerouting(second.before, {*second.workers} - {1, 2}, times)
    assert third.before.plan.num_pipelines == 3
    assert third.rerouting is not None
    assert third.rerouting.routes.lost == (Worker(1, 0),)
    assert third.rerouting.routes.num_microbatches == (11, 11, 10)
    assert third.workers[3] == Worker(0, 0)


def test_what_cannot_be_rerouted_says_why() -> None:
    times = GridTimes(pipelines=(even_times(2, 0.0),) * PIPELINES)
    plan = four_pipelines(2)
    _, found = decision_for(replace(plan, sync="groups"), {0}, times)
    assert found.rerouting is None
    assert "average in groups" in found.why
    shared = tuple(
        replace(pipeline, devices=(f"d{number}",) * 2)
        for number, pipeline in enumerate(plan.pipelines)
    )
    _, found = decision_for(replace(plan, pipelines=shared), {0}, times)
    assert found.why == "dissolve: a device runs several stages"
    _, found = decision_for(plan, {0, 2, 4, 6}, times)
    assert (found.rerouting, found.dissolved) == (None, None)
    assert found.why == "nobody has the layers of stage 0"
    with pytest.raises(PlanError, match="stage 0 has lost all its 4 workers"):
        assign_routes([Worker(0, p) for p in range(4)], [1] * 4, times)
    routes = assign_routes([], [1] * 4, times)
    with pytest.raises(ScheduleError, match="max_in_flight"):
        order_actions(routes, times, max_in_flight=(1, 0))


def test_a_known_link_between_pipelines_counts() -> None:
    slow = LinkTimes(busy=(40.0,))
    every = [(Worker(a, p), Worker(1 - a, q)) for a in (0, 1) for p in range(4) for q in range(4)]
    crossings = {(a, b): slow for a, b in every if a.pipeline != b.pipeline}
    times = GridTimes(pipelines=(even_times(2, 0.0),) * PIPELINES, crossings=crossings)
    _, near = decision_for(four_pipelines(2), {0}, replace(times, crossings={}))
    _, far = decision_for(four_pipelines(2), {0}, times)
    assert near.rerouting is not None
    assert far.rerouting is None


def test_a_plan_without_numbers_shares_the_batch() -> None:
    plan = even_plan(num_layers=3, num_stages=3, num_pipelines=PIPELINES)
    times = GridTimes(pipelines=(even_times(3, 0.0),) * PIPELINES)
    _, found = decision_for(plan, {0}, times, num_microbatches=PIPELINES * MICROBATCHES)
    assert found.rerouting is not None
    assert found.dissolved_step == pytest.approx(39.0)


def test_memory_bounds_what_rerouting_gains() -> None:
    """With 1F1B's micro-batches in flight, workers wait for gradients."""
    times = GridTimes(pipelines=(even_times(4, 0.0),) * PIPELINES)
    plan = four_pipelines(4)
    _, rich = decision_for(plan, {0}, times)
    _, poor = decision_for(plan, {0}, times, max_in_flight=(4, 3, 2, 1))
    assert rich.rerouted_step is not None
    assert poor.rerouted_step is not None
    assert rich.rerouted_step < poor.rerouted_step
    assert poor.rerouting is None


def test_an_unknown_link_counts_as_the_slower_of_both_pipelines() -> None:
    fast, slow = even_times(2, 1.0), even_times(2, 3.0)
    times = GridTimes(pipelines=(fast, slow))
    assert times.link(Worker(0, 0), Worker(1, 1)).transfer == 3.0
    assert times.link(Worker(1, 0), Worker(0, 0)).transfer == 1.0
