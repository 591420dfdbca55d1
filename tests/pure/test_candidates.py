"""The shortlist: what it must hold, what it may not, and how near the best of all it comes."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, length
from polyrhythm.schedule.candidates import Candidate, limited_recipe, shortlist
from polyrhythm.schedule.recipe import Recipe
from polyrhythm.types import Seconds
from tests.pure.test_cost_pipeline import even_times

amounts = st.floats(0.1, 3)
samples = st.lists(st.floats(0, 4), min_size=1, max_size=5).map(tuple)
links = st.builds(LinkTimes, busy=samples, latency=st.floats(0, 1))


@st.composite
def measured(draw: st.DrawFn, num_stages: int | None = None) -> PipelineTimes:
    size = num_stages or draw(st.integers(1, 5))
    rows = [(amounts, size), (amounts, size), (links, size - 1), (links, size - 1)]
    forward, backward, down, up = (
        tuple(draw(st.lists(kind, min_size=count, max_size=count))) for kind, count in rows
    )
    return PipelineTimes(forward=forward, backward=backward, activations=down, gradients=up)


def in_flight(recipe: Recipe, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    return Candidate.of(
        recipe, num_stages=num_stages, microbatch_size=1, num_microbatches=num_microbatches
    ).in_flight


def best_of(
    found: dict[Recipe, Seconds], num_stages: int, num_microbatches: int, tolerance: float
) -> tuple[int, Seconds, Recipe]:
    enough = min(found.values()) * (1 + tolerance)
    return min(
        (
            (sum(in_flight(recipe, num_stages, num_microbatches)), time, recipe)
            for recipe, time in found.items()
            if time <= enough
        ),
        key=lambda choice: choice[:2],
    )


@settings(max_examples=40)
@given(st.data())
def test_all_that_is_listed_fits_and_takes_what_it_says(data: st.DataObject) -> None:
    times = data.draw(measured())
    num_microbatches = data.draw(st.integers(1, 12))
    most = data.draw(
        st.lists(st.integers(1, 15), min_size=times.num_stages, max_size=times.num_stages)
    )
    found = shortlist(times, num_microbatches=num_microbatches, most=most, tolerance=0.02)
    assert found
    for recipe, predicted in found.items():
        schedule = recipe.build(num_stages=times.num_stages, num_microbatches=num_microbatches)
        assert predicted == length(schedule, times)
        held = in_flight(recipe, times.num_stages, num_microbatches)
        assert all(h <= room for h, room in zip(held, most, strict=True))


@settings(max_examples=25)
@given(measured(), st.integers(1, 16))
def test_with_room_for_all_1f1b_gpipe_and_2f2b_are_on_the_list(
    times: PipelineTimes, num_microbatches: int
) -> None:
    most = (num_microbatches,) * times.num_stages
    found = shortlist(times, num_microbatches=num_microbatches, most=most, tolerance=0.02)
    held = {in_flight(recipe, times.num_stages, num_microbatches) for recipe in found}
    for recipe in (Recipe("1f1b"), Recipe("gpipe")):
        assert in_flight(recipe, times.num_stages, num_microbatches) in held
    assert num_microbatches < 3 or Recipe("kfkb", k=2) in found


@settings(max_examples=15)
@given(measured(num_stages=3))
def test_the_search_comes_near_the_best_of_all_limits(times: PipelineTimes) -> None:
    num_microbatches = 8
    found = shortlist(times, num_microbatches=num_microbatches, most=(8,) * 3, tolerance=0.02)
    everything = [
        limits for limits in product(range(1, 9), repeat=3) if limits[0] >= limits[1] >= limits[2]
    ]
    lengths = {
        limits: length(limited_recipe(limits, 8).build(num_stages=3, num_microbatches=8), times)
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
        most=(num_microbatches,) * 4,
        tolerance=0.02,
    )
    assert min(found.values()) == pytest.approx(shortest)
    memory, time, _ = best_of(found, 4, num_microbatches, 0.02)
    assert memory <= held
    assert time <= shortest * 1.02


@pytest.mark.parametrize(
    ("limits", "recipe"),
    [
        ((4, 3, 2, 1), "1f1b"),
        ((6, 6, 6, 6), "gpipe"),
        ((9, 8, 7, 6), "gpipe"),
        ((9, 5, 3, 1), "bounded:6,5,3,1"),
    ],
)
def test_limits_go_by_their_plainest_name(limits: tuple[int, ...], recipe: str) -> None:
    assert str(limited_recipe(limits, 6)) == recipe


def test_a_candidate_knows_what_it_holds_and_builds() -> None:
    candidate = Candidate.of(
        Recipe("kfkb", k=2), num_stages=4, microbatch_size=3, num_microbatches=7
    )
    assert candidate.in_flight == (7, 6, 4, 2)
    assert candidate.build() == Recipe("kfkb", k=2).build(num_stages=4, num_microbatches=7)
    assert str(candidate) == "kfkb:2 of 7 x 3"
