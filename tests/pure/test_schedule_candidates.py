"""The shortlist: required members, memory limits, and its distance to the best of all limits."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.cost.pipeline import PipelineTimes, length
from polyrhythm.schedule.candidates import ScheduleCandidate, shortlist, spec_for_limits
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Seconds
from tests.grids import num_examples
from tests.pure.schedule_cases import even_times, measured


def in_flight(spec: ScheduleSpec, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    return ScheduleCandidate.of(
        spec, num_stages=num_stages, microbatch_size=1, num_microbatches=num_microbatches
    ).in_flight


def best_of(
    found: dict[ScheduleSpec, Seconds], num_stages: int, num_microbatches: int, tolerance: float
) -> tuple[int, Seconds, ScheduleSpec]:
    enough = min(found.values()) * (1 + tolerance)
    return min(
        (
            (sum(in_flight(spec, num_stages, num_microbatches)), time, spec)
            for spec, time in found.items()
            if time <= enough
        ),
        key=lambda choice: choice[:2],
    )


@settings(max_examples=num_examples(40))
@given(st.data())
def test_shortlisted_schedules_fit_and_have_the_predicted_length(data: st.DataObject) -> None:
    times = data.draw(measured())
    num_microbatches = data.draw(st.integers(1, 12))
    max_in_flight = data.draw(
        st.lists(st.integers(1, 15), min_size=times.num_stages, max_size=times.num_stages)
    )
    found = shortlist(
        times, num_microbatches=num_microbatches, max_in_flight=max_in_flight, tolerance=0.02
    )
    assert found
    for spec, predicted in found.items():
        schedule = spec.build(num_stages=times.num_stages, num_microbatches=num_microbatches)
        assert predicted == length(schedule, times)
        held = in_flight(spec, times.num_stages, num_microbatches)
        assert all(h <= room for h, room in zip(held, max_in_flight, strict=True))


@settings(max_examples=25)
@given(measured(), st.integers(1, 16))
def test_without_memory_limit_1f1b_gpipe_and_2f2b_are_shortlisted(
    times: PipelineTimes, num_microbatches: int
) -> None:
    max_in_flight = (num_microbatches,) * times.num_stages
    found = shortlist(
        times, num_microbatches=num_microbatches, max_in_flight=max_in_flight, tolerance=0.02
    )
    held = {in_flight(spec, times.num_stages, num_microbatches) for spec in found}
    for spec in (ScheduleSpec("1f1b"), ScheduleSpec("gpipe")):
        assert in_flight(spec, times.num_stages, num_microbatches) in held
    assert num_microbatches < 3 or ScheduleSpec("kfkb", k=2) in found


@settings(max_examples=15)
@given(measured(num_stages=3))
def test_the_search_comes_near_the_best_of_all_limits(times: PipelineTimes) -> None:
    num_microbatches = 8
    found = shortlist(
        times, num_microbatches=num_microbatches, max_in_flight=(8,) * 3, tolerance=0.02
    )
    everything = [
        limits for limits in product(range(1, 9), repeat=3) if limits[0] >= limits[1] >= limits[2]
    ]
    lengths = {
        limits: length(spec_for_limits(limits, 8).build(num_stages=3, num_microbatches=8), times)
        for limits in everything
    }
    assert min(found.values()) <= min(lengths.values()) * 1.02
    enough = min(found.values()) * 1.02
    least = min(sum(limits) for limits, time in lengths.items() if time <= enough)
    assert best_of(found, 3, 8, 0.02)[0] <= least + 2


@pytest.mark.parametrize(
    ("transfer", "num_microbatches", "shortest", "held"),
    [
        (0.02, 12, 45.12, 10),  # 1F1B does
        (0.1, 12, 45.6, 13),  # the rule holds 16
        (0.5, 12, 48, 15),
        (1.0, 12, 51, 16),
        (0.5, 24, 84, 16),
        (1.0, 24, 87, 16),
        (1.5, 24, 90, 16),
        (2.0, 24, 93, 21),  # the rule holds 22
        (2.5, 24, 96, 22),
    ],
)
def test_even_pipelines_reach_the_ideal_in_little_memory(
    transfer: float, num_microbatches: int, shortest: float, held: int
) -> None:
    found = shortlist(
        even_times(4, transfer),
        num_microbatches=num_microbatches,
        max_in_flight=(num_microbatches,) * 4,
        tolerance=0.02,
    )
    assert min(found.values()) == pytest.approx(shortest)
    memory, time, _ = best_of(found, 4, num_microbatches, 0.02)
    assert memory <= held
    assert time <= shortest * 1.02


@pytest.mark.parametrize(
    ("limits", "spec"),
    [
        ((4, 3, 2, 1), "1f1b"),
        ((6, 6, 6, 6), "gpipe"),
        ((9, 8, 7, 6), "gpipe"),
        ((9, 5, 3, 1), "bounded:6,5,3,1"),
    ],
)
def test_limits_get_the_simplest_spec(limits: tuple[int, ...], spec: str) -> None:
    assert str(spec_for_limits(limits, 6)) == spec


def test_candidate_in_flight_matches_its_schedule() -> None:
    candidate = ScheduleCandidate.of(
        ScheduleSpec("kfkb", k=2), num_stages=4, microbatch_size=3, num_microbatches=7
    )
    assert candidate.in_flight == (7, 6, 4, 2)
    assert candidate.build() == ScheduleSpec("kfkb", k=2).build(num_stages=4, num_microbatches=7)
    assert str(candidate) == "kfkb:2 of 7 x 3"
