"""The engine: its times equal the cost model's, its draws a real worker's, limits are kept."""

import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes
from polyrhythm.cost.pipeline import simulate as pipeline_simulate
from polyrhythm.cost.step import StageWork, StepSpec, step_time
from polyrhythm.cost.sync import Links, Sync
from polyrhythm.describe.scenario import LinkChange, Pause, Scenario, Slow
from polyrhythm.describe.slowness import Slowness, load_traces
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.engine.engine import Engine
from polyrhythm.simulate.engine.hosts import DRAWS
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.simulator import simulate
from polyrhythm.types import Action, Op
from tests.grids import num_examples
from tests.pure.schedule_cases import specs
from tests.pure.simulate_cases import (
    actions_of,
    equal_job,
    one_pipeline,
    one_step,
    region_per_device,
    slow_entries,
    slowed,
    steps_after_first,
)


def job_with_times(rng: random.Random, spec: ScheduleSpec, num_microbatches: int) -> SimulatedJob:
    """A job with unequal stages and links."""
    num_stages = rng.randint(1, 5) if spec.limits is None else len(spec.limits)

    def draw(largest: float) -> list[float]:
        return [rng.choice([0.0, 1.0, rng.random()]) * largest for _ in range(num_stages)]

    # Forward or backward may take no time, but not both.
    forward = draw(3.0)
    backward = [b if f else 1.0 for f, b in zip(forward, draw(5.0), strict=True)]

    cluster = region_per_device(
        num_stages,
        latency=[draw(2.0) for _ in range(num_stages)],
        bandwidth=[[rng.uniform(0.2, 5) for _ in range(num_stages)] for _ in range(num_stages)],
        speeds=[rng.uniform(0.5, 2) for _ in range(num_stages)],
    )
    schedule = spec.build(num_stages=num_stages, num_microbatches=num_microbatches)
    return one_pipeline(cluster, schedule, forward, backward, draw(4.0))


def times_of(job: SimulatedJob) -> PipelineTimes:
    cluster, stages = job.cluster, job.stages
    speeds = [device.speed for device in cluster.devices]

    def link(a: int, b: int) -> LinkTimes:
        busy = stages[min(a, b)].activation_bytes / cluster.bandwidth[a][b]
        return LinkTimes(busy=(busy,), latency=cluster.latency[a][b])

    return PipelineTimes(
        forward=tuple(s.forward / speed for s, speed in zip(stages, speeds, strict=True)),
        backward=tuple(s.backward / speed for s, speed in zip(stages, speeds, strict=True)),
        activations=tuple(link(a, b) for a, b in pairwise(range(len(stages)))),
        gradients=tuple(link(b, a) for a, b in pairwise(range(len(stages)))),
    )


@settings(max_examples=num_examples(60))
@given(st.integers(0, 2**32), specs, st.integers(1, 9), st.booleans(), st.booleans())
def test_action_times_match_the_cost_model(
    seed: int, spec: ScheduleSpec, num_microbatches: int, is_shared: bool, is_late: bool
) -> None:
    """Whether or not messages are flows: fast uplinks are not shared."""
    rng = random.Random(seed)
    job = job_with_times(rng, spec, num_microbatches)
    if is_shared:
        devices = tuple(replace(device, uplink=9e16) for device in job.cluster.devices)
        job = replace(job, cluster=replace(job.cluster, devices=devices))
    ready = [rng.uniform(0, 9) if is_late else 0.0 for _ in job.stages]
    schedule = job.pipelines[0].schedule
    expected = pipeline_simulate(schedule, times_of(job), ready=ready)
    runs = one_step(job, ready)
    assert [[record.action for record in records] for records in runs] == [*map(list, schedule)]
    for records, starts, ends in zip(runs, expected.starts, expected.ends, strict=True):
        assert [record.start for record in records] == pytest.approx(starts, rel=1e-9, abs=1e-9)
        assert [record.end for record in records] == pytest.approx(ends, rel=1e-9, abs=1e-9)


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_waits_fill_the_gaps_between_actions(seed: int, num_microbatches: int) -> None:
    job = job_with_times(random.Random(seed), ScheduleSpec("1f1b"), num_microbatches)
    for records in one_step(job):
        before = 0.0
        for record in records:
            assert record.start - record.waited == pytest.approx(before, abs=1e-9)
            before = record.end


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_stages_on_one_device_are_one_run_without_messages(seed: int) -> None:
    """Three stages on two devices take as long as two stages with the same total work."""
    rng = random.Random(seed)
    work = [
        StageWork(
            forward=rng.random(),
            backward=rng.random(),
            activation_bytes=rng.random(),
            gradient_bytes=0.0,
        )
        for _ in range(3)
    ]
    schedule = ScheduleSpec("1f1b").build(num_stages=2, num_microbatches=5)
    cluster = region_per_device(2, bandwidth=1.0, latency=0.1)
    joined = replace(
        work[2],
        forward=work[1].forward + work[2].forward,
        backward=work[1].backward + work[2].backward,
    )
    two = one_pipeline(
        cluster,
        schedule,
        [work[0].forward, joined.forward],
        [work[0].backward, joined.backward],
        [work[0].activation_bytes, joined.activation_bytes],
    )
    runs = two.pipelines[0].runs
    longer = replace(two.pipelines[0], runs=(runs[0], runs[1]._replace(end=3)))
    three = replace(
        two,
        stages=tuple(work),
        pipelines=(longer,),
        sync=replace(two.sync, num_stages=3),
    )
    assert one_step(three) == one_step(two)


@settings(max_examples=20)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.03]),
    st.sampled_from([0.0, 1e4, 1e7]),
)
def test_all_reduce_step_time_matches_the_cost_model(
    num_stages: int, num_pipelines: int, num_microbatches: int, latency: float, gradients: float
) -> None:
    """With equal links both are equal, including messages with the coordinator."""
    # A small buffer has one owner, which the cost model does not have.
    assume(gradients != 1e4 or num_pipelines <= 2)
    job = equal_job(
        num_stages=num_stages,
        num_pipelines=num_pipelines,
        forward=0.1,
        backward=0.2,
        activation_bytes=1e6,
        gradient_bytes=gradients,
        num_microbatches=num_microbatches,
        latency=latency,
        bandwidth=1e8,
    )
    step = StepSpec(
        replicas=job.pipelines,
        stages=job.stages,
        speeds=(1.0,) * len(job.cluster.devices),
        links=Links.of(job.cluster),
        sync=Sync.ALL_REDUCE,
    )
    found = simulate(job, num_steps=12)
    ends = np.array(found.ends)
    steady = (ends[:, -1] - ends[:, 3]) / 8
    assert steady == pytest.approx([step_time(step).total] * num_pipelines, rel=5e-3)


@pytest.mark.parametrize("num_pipelines", [2, 4])
@pytest.mark.parametrize("gradients", [1e6, 2e7])
def test_decoupled_hides_communication_and_no_more(num_pipelines: int, gradients: float) -> None:
    def seconds(*, decoupled: bool) -> float:
        return steps_after_first(
            simulate(
                equal_job(
                    num_pipelines=num_pipelines,
                    forward=0.1,
                    backward=0.2,
                    gradient_bytes=gradients,
                    bandwidth=1e8,
                    decoupled=decoupled,
                ),
                num_steps=20,
            )
        )

    compute, phase = 0.3, gradients / num_pipelines / 1e8
    assert seconds(decoupled=False) == pytest.approx(compute + 2 * phase)
    hidden = seconds(decoupled=True)
    assert max(compute, 2 * phase) <= hidden < compute + 2 * phase
    # The last bucket of reduce-scatter and the first one of all-gather are never hidden.
    assert hidden >= compute + 2 * phase / 8 - 1e-9


def test_decoupled_single_worker_takes_its_compute_time() -> None:
    job = equal_job(num_pipelines=1, forward=0.1, backward=0.2, latency=0.5, decoupled=True)
    assert simulate(job, num_steps=3).ends == (pytest.approx((0.3, 0.6, 0.9)),)


def expected_actions(scenario: Scenario, num_microbatches: int, *, index: int = 0) -> list[tuple]:
    """Start and end of each action on a single device, by the slowness of a real worker."""
    forward, backward = 0.4, 0.7
    slowness = Slowness.of(scenario, f"d{index}", index=index, traces=load_traces(scenario))
    now, actions = 0.0, []
    for action in ScheduleSpec("1f1b").build(num_stages=1, num_microbatches=num_microbatches)[0]:
        work = forward if action.op is Op.F else backward
        end = now + (work + slowness.delay(now, work, forward + backward))
        actions.append((action, now, end))
        now = end
    return actions


def run_alone(scenario: Scenario, num_microbatches: int, *, index: int = 0) -> list[tuple]:
    schedule = ScheduleSpec("1f1b").build(num_stages=1, num_microbatches=num_microbatches)
    job = one_pipeline(region_per_device(index + 1), schedule, [0.4], [0.7], scenario=scenario)
    run = job.pipelines[0].runs[0]._replace(device=index)
    job = replace(job, pipelines=(replace(job.pipelines[0], runs=(run,)),))
    return [(record.action, record.start, record.end) for record in one_step(job)[0]]


@settings(max_examples=num_examples(40))
@given(st.lists(slow_entries(), min_size=1, max_size=4), st.integers(0, 99), st.integers(0, 3))
def test_slowness_draws_match_those_of_a_real_worker(
    entries: list[Slow], seed: int, index: int
) -> None:
    """To the last bit: a lab and a simulation play the same scenario."""
    scenario = slowed(*entries, seed=seed)
    assert run_alone(scenario, 12, index=index) == expected_actions(scenario, 12, index=index)


def test_draws_continue_across_batches() -> None:
    scenario = slowed(
        Slow(device="*", probability=0.3, sleep_factor=1.5),
        Slow(device="d0", probability=0.1, sleep_factor=3.0, start=100.0, until=700.0),
    )
    num_microbatches = DRAWS + 3  # two actions each
    assert run_alone(scenario, num_microbatches) == expected_actions(scenario, num_microbatches)


def test_devices_draw_independently() -> None:
    entry = slowed(Slow(device="*", probability=0.5, sleep_factor=1.0))
    assert run_alone(entry, 30, index=0) != run_alone(entry, 30, index=1)


def test_ended_trace_holds_its_last_value_and_warns_once() -> None:
    short = slowed(
        Slow(device="*", trace="sdpipe_16gpu", trace_duration=2.0),
        Slow(device="*", trace="alibaba_job1", trace_duration=1.0),
    )
    job = equal_job(num_pipelines=3, forward=0.4, backward=0.7, scenario=short)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(job, num_steps=400)  # several batches of draws
        assert len(caught) == 1
        assert "held at its last value" in str(caught[0].message)
        assert run_alone(short, 15) == expected_actions(short, 15)


def paused(start: float, duration: float, pauses: Sequence[Pause]) -> float:
    """End of work with pauses, by stepping from one change to the next."""
    changes = sorted({time for pause in pauses for time in (pause.at, pause.until)})
    now = start
    for change in [*changes, float("inf")]:
        if change <= now:
            continue
        is_paused = any(pause.at <= now < pause.until for pause in pauses)
        if not is_paused:
            if now + duration <= change:
                return now + duration
            duration -= change - now
        now = change
    raise AssertionError("the work never ends")


@settings(max_examples=num_examples(40))
@given(st.lists(st.tuples(st.floats(0, 12), st.floats(0.01, 5)), min_size=1, max_size=4))
def test_paused_device_resumes_where_it_stopped(spans: list[tuple]) -> None:
    pauses = tuple(Pause(device="d0", at=at, until=at + length) for at, length in spans)
    found = run_alone(Scenario(name="p", pause=pauses), 8)
    now = 0.0
    for action, start, end in found:
        assert start == pytest.approx(now)
        now = paused(now, 0.4 if action.op is Op.F else 0.7, pauses)
        assert end == pytest.approx(now)


def test_pause_of_another_device_has_no_effect() -> None:
    cluster, schedule = (
        region_per_device(2),
        ScheduleSpec("1f1b").build(num_stages=1, num_microbatches=4),
    )
    calm = one_pipeline(cluster, schedule, [0.4], [0.7])
    scenario = Scenario(name="p", pause=(Pause(device="d1", at=0.1, until=9.0),))
    assert one_step(replace(calm, scenario=scenario)) == one_step(calm)


limits = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(
    lambda found: tuple(sorted(found, reverse=True))
)


def never_flushed(limit: int, num_steps: int) -> list[Action]:
    """Actions of one stage: forwards up to the limit, then one backward for each forward."""
    order = []
    for step in range(num_steps):
        order.append(Action(Op.F, step))
        if step >= limit - 1:
            order.append(Action(Op.B, step - limit + 1))
    return order


@settings(max_examples=25)
@given(st.integers(0, 2**32), limits, st.booleans())
def test_a_pipeline_that_is_never_flushed_keeps_to_its_limits_and_times(
    tmp_path_factory: pytest.TempPathFactory, seed: int, in_flight: tuple[int, ...], shares: bool
) -> None:
    rng = random.Random(seed)
    job = job_with_times(rng, ScheduleSpec("bounded", limits=in_flight), 1)
    scenario = Scenario(name="x")
    if shares:  # messages are flows if a link may change
        change = LinkChange(at=1e6, source="d0", target=f"d{len(in_flight) - 1}", latency=1.0)
        scenario = replace(scenario, link=(change,) if len(in_flight) > 1 else ())
    job = replace(job, in_flight=in_flight, scenario=scenario)
    folder = tmp_path_factory.mktemp("run") / "log"
    simulate(job, num_steps=15, run=folder)
    schedule = [never_flushed(limit, 40) for limit in in_flight]
    expected = pipeline_simulate(schedule, times_of(job))
    for stage, events in enumerate(actions_of(folder).values()):
        # Actions of zero length at the same time are logged in any order.
        starts = sorted(event.time + event.values.get("wait", 0.0) for event in events)
        assert starts == pytest.approx(expected.starts[stage][: len(starts)], rel=1e-9, abs=1e-9)
        by_number = sorted(event.name or "" for event in events)
        assert by_number == sorted(map(str, schedule[stage][: len(starts)]))
    assert len(actions_of(folder)) == len(in_flight)


@settings(max_examples=15)
@given(limits, st.lists(slow_entries(), max_size=2))
def test_in_flight_is_never_above_its_limits(
    tmp_path_factory: pytest.TempPathFactory, in_flight: tuple[int, ...], slow: list[Slow]
) -> None:
    job = equal_job(
        num_stages=len(in_flight),
        num_pipelines=2,
        forward=0.3,
        backward=0.5,
        activation_bytes=1e6,
        gradient_bytes=1e6,
        bandwidth=1e7,
        latency=0.05,
        uplink=2e7,
        policy="adaptive",
        in_flight=in_flight,
        scenario=slowed(*slow),
    )
    folder = tmp_path_factory.mktemp("run") / "log"
    assert simulate(job, num_steps=12, run=folder).stop_reason == ""
    for worker, events in actions_of(folder).items():
        limit = in_flight[int(worker[1])]
        order = [event.name or "" for event in events]
        live = np.cumsum([1 if name.startswith("F") else -1 for name in order])
        assert live.min() >= 0
        assert live.max() == limit  # the pipeline fills to its limit
        for op in "FB":
            numbers = [int(name[1:]) for name in order if name[0] == op]
            assert numbers == list(range(len(numbers)))


def test_records_are_all_kept_when_there_are_many() -> None:
    """More records than the compiled engine can hold at a time."""
    schedule = ScheduleSpec("1f1b").build(num_stages=1, num_microbatches=33_000)
    job = one_pipeline(region_per_device(1), schedule, [1.0], [2.0])
    records = one_step(job)[0]
    assert [record.action for record in records] == schedule[0]
    assert records[-1].end == pytest.approx(99_000.0)
    assert Engine(job).take_records() == []
