"""The pipeline simulator: closed forms, published tables, and invariants."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, length, simulate
from polyrhythm.errors import DescriptionError, ScheduleError
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.check import check
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Action, Op
from tests.pure.schedule_cases import (
    even_times,
    ordered_schedules,
    parse,
    timed_schedules,
)


def ideal(spec: str, num_stages: int, num_microbatches: int, transfer: float) -> float:
    schedule = ScheduleSpec.parse(spec).build(
        num_stages=num_stages, num_microbatches=num_microbatches
    )
    return length(schedule, even_times(num_stages, transfer))


@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 5), st.integers(1, 5))
def test_without_transfers_1f1b_and_gpipe_take_the_fill_and_the_work(
    num_stages: int, num_microbatches: int, forward: int, backward: int
) -> None:
    times = even_times(num_stages, 0.0, forward=forward, backward=backward)
    expected = (num_microbatches + num_stages - 1) * (forward + backward)
    for name in ("1f1b", "gpipe"):
        schedule = ScheduleSpec(name).build(
            num_stages=num_stages, num_microbatches=num_microbatches
        )
        assert length(schedule, times) == expected


@given(st.integers(1, 8), st.integers(1, 32), st.sampled_from([0.25, 0.5, 1.0]))
def test_gpipe_waits_for_a_transfer_once_in_each_direction(
    num_stages: int, num_microbatches: int, transfer: float
) -> None:
    expected = (num_microbatches + num_stages - 1) * 3 + 2 * (num_stages - 1) * transfer
    assert ideal("gpipe", num_stages, num_microbatches, transfer) == expected


@given(st.integers(1, 8), st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]))
def test_1f1b_pays_transfer_round_trips_in_every_period(num_stages: int, transfer: float) -> None:
    # The first stage holds num_stages micro-batches, and each returns after the work of all stages
    # and two transfers per link: that period yields num_stages micro-batches.
    long, short = (ideal("1f1b", num_stages, m * num_stages, transfer) for m in (9, 5))
    round_trip = num_stages * 3 + 2 * (num_stages - 1) * transfer
    assert (long - short) / 4 == pytest.approx(round_trip)


def test_1f1b_steady_period_is_work_plus_two_transfers() -> None:
    schedule = ScheduleSpec("1f1b").build(num_stages=8, num_microbatches=64)
    timeline = simulate(schedule, even_times(8, 0.5))
    middle = [timeline.starts[4][schedule[4].index(Action(Op.B, m))] for m in range(30, 33)]
    assert [later - earlier for earlier, later in pairwise(middle)] == [4.0, 4.0]


TABLE = [  # F=1, B=2, 4 stages: transfer, micro-batches, spec, length
    (0.5, 12, "1f1b", 56),
    (0.5, 12, "kfkb:2", 48),
    (0.5, 12, "kfkb:3", 48),
    (0.5, 12, "gpipe", 48),
    (0.5, 12, "bounded:7,5,3,1", 48),
    (0.5, 12, "bounded:6,4,3,1", 50),
    (1.0, 12, "1f1b", 67),
    (1.0, 12, "kfkb:2", 51),
    (1.0, 12, "gpipe", 51),
    (1.0, 12, "bounded:7,5,3,1", 51),
    (1.0, 12, "bounded:6,4,3,1", 58),
    (0.1, 24, "bounded:7,5,3,1", 81.6),
    (0.1, 24, "kfkb:2", 81.6),
    (1.0, 24, "bounded:7,5,3,1", 87),
    (1.0, 24, "kfkb:2", 87),
    (1.5, 24, "bounded:7,5,3,1", 90),
    (1.5, 24, "kfkb:3", 91),
    (2.0, 24, "bounded:10,7,4,1", 93),
    (2.0, 24, "kfkb:3", 95),
    (2.5, 24, "bounded:10,7,4,1", 96),
    (2.5, 24, "kfkb:4", 107),
]


@pytest.mark.parametrize(("transfer", "num_microbatches", "spec", "expected"), TABLE)
def test_known_lengths(transfer: float, num_microbatches: int, spec: str, expected: float) -> None:
    assert ideal(spec, 4, num_microbatches, transfer) == pytest.approx(expected)


@given(timed_schedules(), st.integers(0, 7))
def test_actions_start_as_early_as_possible(
    case: tuple[Schedule, PipelineTimes], first_message: int
) -> None:
    schedule, times = case
    timeline = simulate(schedule, times, first_message=first_message)
    ends = [dict(zip(*row, strict=True)) for row in zip(schedule, timeline.ends, strict=True)]

    def arrivals(op: Op, stage: int) -> dict[Action, float]:
        """Return when the inputs of each `op` arrive at `stage`, by the rules of the link."""
        source = stage - 1 if op is Op.F else stage + 1
        if not 0 <= source < len(schedule):
            return {action: 0.0 for action in schedule[stage] if action.op is op}
        link = times.activations[stage - 1] if op is Op.F else times.gradients[stage]
        free, found = 0.0, {}
        for action in schedule[source]:
            if action.op is op:
                busy = link.busy[(first_message + action.microbatch) % len(link.busy)]
                free = max(free, ends[source][action]) + busy
                found[action] = free + link.latency
        return found

    for stage, actions in enumerate(schedule):
        ready = arrivals(Op.F, stage) | arrivals(Op.B, stage)
        takes = {Op.F: times.forward[stage], Op.B: times.backward[stage]}
        free = 0.0
        for action, start in zip(actions, timeline.starts[stage], strict=True):
            assert start == max(free, ready[action])
            free = start + takes[action.op]
            assert ends[stage][action] == free


@given(timed_schedules())
def test_length_is_the_last_end(case: tuple[Schedule, PipelineTimes]) -> None:
    schedule, times = case
    timeline = simulate(schedule, times)
    assert timeline.length == max(row[-1] for row in timeline.ends)


@given(st.data())
def test_longer_times_never_shorten_the_step(data: st.DataObject) -> None:
    schedule, times = data.draw(timed_schedules())
    more = data.draw(st.floats(0.1, 5))

    def longer(values: tuple[float, ...]) -> tuple[float, ...]:
        place = data.draw(st.integers(0, len(values) - 1))
        return (*values[:place], values[place] + more, *values[place + 1 :])

    name = data.draw(st.sampled_from(["forward", "backward", "activations", "gradients"]))
    values = getattr(times, name)
    if name in ("forward", "backward"):
        slower = replace(times, **{name: longer(values)})
    elif values:
        place = data.draw(st.integers(0, len(values) - 1))
        link = values[place]
        if data.draw(st.booleans()):
            link = replace(link, latency=link.latency + more)
        else:
            link = replace(link, busy=longer(link.busy))
        slower = replace(times, **{name: (*values[:place], link, *values[place + 1 :])})
    else:
        slower = times
    assert length(schedule, slower) >= length(schedule, times) - 1e-9


def test_recorded_transfers_are_replayed_in_order_from_first_message() -> None:
    link, free = LinkTimes(busy=(0.0, 10.0)), LinkTimes(busy=(0.0,))
    times = PipelineTimes(
        forward=(1.0, 1.0), backward=(1.0, 1.0), activations=(link,), gradients=(free,)
    )
    schedule = ScheduleSpec("1f1b").build(num_stages=2, num_microbatches=1)
    assert [simulate(schedule, times, first_message=i).length for i in range(3)] == [4, 14, 4]
    assert length(schedule, times) == 9.0
    assert length(schedule, times, num_replays=1) == 4.0


def test_a_link_carries_one_message_at_a_time_but_latencies_overlap() -> None:
    gpipe = ScheduleSpec("gpipe").build(num_stages=2, num_microbatches=4)
    free = LinkTimes(busy=(0.0,))

    def last_forward(link: LinkTimes) -> float:
        times = PipelineTimes(
            forward=(1.0, 1.0), backward=(1.0, 1.0), activations=(link,), gradients=(free,)
        )
        return simulate(gpipe, times).ends[1][3]

    assert last_forward(LinkTimes(busy=(3.0,))) == 1 + 4 * 3 + 1
    assert last_forward(LinkTimes(busy=(0.0,), latency=3.0)) == 4 + 3 + 1


@given(ordered_schedules())
def test_deadlocking_schedules_are_refused_and_all_others_run(
    case: tuple[Schedule, int],
) -> None:
    schedule, num_microbatches = case
    times = even_times(len(schedule), 0.5)
    try:
        check(schedule, num_microbatches=num_microbatches)
    except ScheduleError:
        with pytest.raises(ScheduleError, match="deadlock"):
            length(schedule, times)
    else:
        assert length(schedule, times) >= 3 * num_microbatches


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "stage 0 before B0, stage 1 before F1"),
        (["B0 F0"], "stage 0 before B0"),
        (["F0 B0", "F0 B0 F1 B1"], "stage 1 before F1"),
    ],
)
def test_deadlock_error_names_the_waiting_actions(rows: list[str], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(parse(*rows), even_times(len(rows), 0.5))
    assert message in str(caught.value)


def test_empty_schedule_takes_no_time() -> None:
    assert length([[], []], even_times(2, 0.5)) == 0.0


def test_times_with_mismatched_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="2 stages with times of 3"):
        length([[], []], even_times(3, 0.5))
    with pytest.raises(DescriptionError, match="one link fewer"):
        replace(even_times(3, 0.5), backward=(1.0,))
    with pytest.raises(DescriptionError, match="forward is -1s"):
        replace(even_times(1, 0.5), forward=(-1.0,))
    with pytest.raises(DescriptionError, match="without times"):
        LinkTimes(busy=())
    with pytest.raises(DescriptionError, match="busy is nan"):
        LinkTimes(busy=(1.0, float("nan")))


def test_period_first_pace_and_transfers() -> None:
    times = PipelineTimes(
        forward=(1.0, 2.0),
        backward=(3.0, 1.0),
        activations=(LinkTimes(busy=(1.0, 2.0), latency=0.5),),
        gradients=(LinkTimes(busy=(4.0,)),),
    )
    assert times.period == 4.0
    assert times.transfers == (3.0,)
