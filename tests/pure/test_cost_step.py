"""Step times: closed forms, overlap, and invariants.

Every time in a step is a maximum of sums of given times, in an order that the schedules fix. So
there are no anomalies of list scheduling: a faster part never makes a step longer.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.cost.pipeline import PipelineTimes, length, simulate
from polyrhythm.cost.step import StageRun, StageWork, StepSpec, groups_of, pipeline_times, step_time
from polyrhythm.cost.sync import Sync, reduce_scatter_times
from polyrhythm.schedule.builders import Schedule
from tests.pure.schedule_cases import timed_schedules
from tests.pure.step_cases import (
    even_links,
    even_step,
    links_of,
    random_links,
    random_step,
    replica,
    seeds,
)

_STEADY = 1 + 2e-3  # tolerance of the simulated steady state


@given(timed_schedules())
def test_ready_at_0_equals_no_ready_times(
    timed: tuple[Schedule, PipelineTimes],
) -> None:
    schedule, times = timed
    assert simulate(schedule, times, ready=[0.0] * len(schedule)) == simulate(schedule, times)


@given(timed_schedules(), st.data())
def test_later_ready_times_make_nothing_earlier(
    timed: tuple[Schedule, PipelineTimes], data: st.DataObject
) -> None:
    schedule, times = timed
    num_stages = len(schedule)
    some = st.lists(st.floats(0, 20), min_size=num_stages, max_size=num_stages)
    ready, more = data.draw(some), data.draw(some)
    early = simulate(schedule, times, ready=ready)
    late = simulate(schedule, times, ready=[a + b for a, b in zip(ready, more, strict=True)])
    for stage in range(num_stages):
        assert all(early.starts[stage][0] >= ready[stage] for _ in schedule[stage])
        assert all(a <= b for a, b in zip(early.starts[stage], late.starts[stage], strict=True))


@given(timed_schedules(), st.floats(0, 100))
def test_delaying_all_stages_delays_every_end(
    timed: tuple[Schedule, PipelineTimes], shift: float
) -> None:
    schedule, times = timed
    before = simulate(schedule, times)
    after = simulate(schedule, times, ready=[shift] * len(schedule))
    for early, late in zip(before.ends, after.ends, strict=True):
        assert late == pytest.approx([end + shift for end in early])
    assert after.length == pytest.approx(before.length + shift)


@given(seeds)
def test_one_pipeline_alone_takes_the_length_of_its_schedule(seed: int) -> None:
    step = random_step(np.random.default_rng(seed))
    alone = replace(step, replicas=step.replicas[:1])
    times = pipeline_times(alone.replicas[0].runs, alone)
    time = step_time(alone)
    assert time.total == pytest.approx(length(alone.replicas[0].schedule, times))
    assert time.sync == pytest.approx(0, abs=1e-9)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.sampled_from(["1f1b", "gpipe"]))
def test_equal_stages_take_fill_plus_work_plus_averaging(
    num_stages: int, num_pipelines: int, num_microbatches: int, spec: str
) -> None:
    """With one stage that is plain data parallelism."""
    step = even_step(num_stages, num_pipelines, num_microbatches, spec=spec, gradients=6.0)
    time = step_time(step)
    work = 3.0 * num_microbatches
    averaging = 2 * 6 * (num_pipelines - 1) / num_pipelines
    assert time.compute == pytest.approx(work)
    assert time.bubbles == pytest.approx(3.0 * (num_stages - 1))
    assert time.transfers == 0
    assert time.sync == pytest.approx(averaging)
    assert time.total == pytest.approx(work + 3 * (num_stages - 1) + averaging)


@given(seeds)
def test_parts_are_never_negative_and_sum_up_to_the_step(seed: int) -> None:
    time = step_time(random_step(np.random.default_rng(seed)))
    parts = (time.compute, time.bubbles, time.transfers, time.sync)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(time.total, rel=2e-3)


def faster(step: StepSpec, rng: np.random.Generator) -> StepSpec:
    """Make one device and random links up to three times as fast, with the same schedules."""
    devices = len(step.speeds)
    chosen = rng.random((devices, devices)) < 0.4
    speeds = list(step.speeds)
    speeds[rng.integers(devices)] *= rng.uniform(1, 3)
    return replace(
        step,
        speeds=tuple(speeds),
        links=links_of(
            np.where(chosen, step.links.latency / 2, step.links.latency),
            np.where(chosen, step.links.bandwidth * 3, step.links.bandwidth),
        ),
    )


@given(seeds)
def test_a_faster_device_or_link_never_makes_a_step_longer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    step = random_step(rng)
    assert step_time(faster(step, rng)).total <= step_time(step).total * _STEADY


def test_alternating_step_times_give_their_mean() -> None:
    found, num_alternating = [], 0
    for seed in (*range(30), 158):
        step = random_step(np.random.default_rng(seed))
        if step.sync not in (Sync.GROUPS, Sync.DECOUPLED):
            ends = step_ends(step)
            found.append(step_time(step).total / ((ends[35] - ends[11]) / 24))
            num_alternating += ends[35] - ends[34] != pytest.approx(ends[34] - ends[33])
    assert found == pytest.approx([1.0] * len(found), rel=1.1e-3)
    assert num_alternating, "one of these alternates"


def step_ends(step: StepSpec) -> list[float]:
    """Return the end of each of many steps, by a plain loop."""
    times = [pipeline_times(one.runs, step) for one in step.replicas]
    scatter_times = reduce_scatter_times(
        groups_of(step), step.links, step.sync, coordinator=step.replicas[0].runs[0].device
    )
    takes = [2 * half for half in scatter_times]
    ready, ends_at = [0.0] * len(step.stages), []
    for _ in range(36):
        ends = [0.0] * len(step.stages)
        for one, time in zip(step.replicas, times, strict=True):
            begin = [max(ready[run.first : run.end]) for run in one.runs]
            for run, done in zip(
                one.runs, simulate(one.schedule, time, ready=begin).ends, strict=True
            ):
                for stage in range(run.first, run.end):
                    ends[stage] = max(ends[stage], done[-1])
        ready = [end + taken for end, taken in zip(ends, takes, strict=True)]
        ends_at.append(max(ready))
    return ends_at


def two_stages(gradients: tuple[float, float], sync: Sync = Sync.ALL_REDUCE) -> StepSpec:
    """Two pipelines, 4 micro-batches, 1 byte/s, one latency-free link for all."""
    step = even_step(2, 2, 4, sync=sync)
    works = tuple(
        StageWork(forward=1.0, backward=2.0, activation_bytes=0.0, gradient_bytes=size)
        for size in gradients
    )
    return replace(step, stages=works)


def test_sync_of_late_stages_overlaps_the_drain_of_earlier_ones() -> None:
    """The last stage is done 2 s, a backward, before the first, and begins 1 s after it."""
    pipeline = step_time(two_stages((0.0, 0.0))).total
    assert pipeline == pytest.approx(15)
    for size in (1.0, 2.0, 3.0):  # two replicas: reduce-scatter plus all-gather take `size` seconds
        assert step_time(two_stages((0.0, size))).total == pytest.approx(pipeline)
    assert step_time(two_stages((0.0, 5.0))).total == pytest.approx(pipeline + 2)
    assert step_time(two_stages((5.0, 0.0))).total == pytest.approx(pipeline + 5)
    assert step_time(two_stages((5.0, 5.0))).total == pytest.approx(pipeline + 5)


def test_decoupled_sync_overlaps_backward_and_forward() -> None:
    for size, waited in (
        (2.0, 0.0),
        (4.0, 1.0),
        (8.0, 2.0 + 3.0),
    ):  # a reduce-scatter takes size / 2 seconds
        step = even_step(1, 2, 4, gradients=size, sync=Sync.DECOUPLED)
        assert step_time(step).total == pytest.approx(12 + waited)
    for speeds in ((0.5, 1.0), (1.0, 0.5)):
        slow = even_step(1, 2, 4, gradients=2.0, sync=Sync.DECOUPLED)
        assert step_time(replace(slow, speeds=speeds)).total == pytest.approx(24)


@given(seeds)
def test_decoupled_is_never_slower_than_all_reduce(seed: int) -> None:
    step = random_step(np.random.default_rng(seed), Sync.ALL_REDUCE)
    decoupled = step_time(replace(step, sync=Sync.DECOUPLED)).total
    assert decoupled <= step_time(step).total * _STEADY


@given(seeds)
def test_device_with_several_stages_equals_one_large_stage(seed: int) -> None:
    rng = np.random.default_rng(seed)
    small = [
        StageWork(
            forward=float(rng.uniform(0.1, 1)),
            backward=float(rng.uniform(0.1, 1)),
            activation_bytes=float(rng.uniform(0, 2)),
            gradient_bytes=float(rng.uniform(0, 3)),
        )
        for _ in range(4)
    ]
    large = StageWork(
        forward=small[1].forward + small[2].forward,
        backward=small[1].backward + small[2].backward,
        activation_bytes=small[2].activation_bytes,
        gradient_bytes=small[1].gradient_bytes + small[2].gradient_bytes,
    )
    four = tuple(
        replica((StageRun(p, 0, 1), StageRun(2 + p, 1, 3), StageRun(4 + p, 3, 4)), 5, "gpipe")
        for p in range(2)
    )
    three = tuple(
        replica((StageRun(p, 0, 1), StageRun(2 + p, 1, 2), StageRun(4 + p, 2, 3)), 5, "gpipe")
        for p in range(2)
    )
    step = StepSpec(
        replicas=four,
        stages=tuple(small),
        speeds=tuple(map(float, rng.uniform(0.5, 2, 6))),
        links=random_links(rng, 6),
        sync=Sync.ALL_REDUCE,
    )
    merged = replace(step, replicas=three, stages=(small[0], large, small[3]))
    assert step_time(step).total == pytest.approx(step_time(merged).total)


def test_in_groups_a_slow_pipeline_does_not_hold_up_the_others() -> None:
    """Two pipelines run 4 micro-batches in 12 s each, and one in 48 s: the rates add up."""
    step = even_step(1, 3, 4, sync=Sync.GROUPS)
    step = replace(step, speeds=(1.0, 1.0, 0.25))
    assert step_time(step).total == pytest.approx(12 / (4 / 12 + 4 / 12 + 4 / 48))
    assert step_time(replace(step, sync=Sync.ALL_REDUCE)).total == pytest.approx(48)


def test_in_groups_every_step_still_pays_for_its_own_averaging() -> None:
    step = even_step(1, 3, 4, sync=Sync.GROUPS, gradients=3.0, links=even_links(3, latency=0.5))
    # A reduce-scatter takes 2 s for two thirds of 3 bytes, or 1 s and both latencies for one
    # third; then there are two messages of the coordinator.
    assert step_time(step).total == pytest.approx(12 + 2 * (2.0 + 1.0))
    assert step_time(step).sync == pytest.approx(6)


def test_a_transfer_is_waited_for_once_in_each_direction_when_the_pipeline_fills() -> None:
    """3 bytes at 10 bytes/s and 0.2 s: half a second there, half a second back."""
    step = even_step(2, 1, 4, spec="gpipe", links=even_links(2, latency=0.2, bandwidth=10.0))
    work = replace(step.stages[0], activation_bytes=3.0)
    time = step_time(replace(step, stages=(work, work)))
    assert time.transfers == pytest.approx(1.0)
    assert time.total == pytest.approx(15 + 1.0)


def test_reduce_scatter_overlaps_only_the_last_replica() -> None:
    """A replica with one micro-batch on a slow device ends long before: it overlaps nothing."""
    step = even_step(1, 2, 8, gradients=8.0, sync=Sync.DECOUPLED)
    step = replace(step, replicas=(step.replicas[0], replica((StageRun(1, 0, 1),), 1)))
    for speed in (0.25, 0.5, 1.0):
        time = step_time(replace(step, speeds=(1.0, speed)))
        assert time.total == pytest.approx(8 * 3 + (4 - 2) + (4 - 1))
