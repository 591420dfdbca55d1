"""The planner's schedules: near the best of a closer look, within memory, and always the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, length
from polyrhythm.schedule.candidates import shortlist
from polyrhythm.schedule.planned import PlannedSchedules
from tests.pure.step_cases import seeds
from tests.pure.test_candidates import measured
from tests.pure.test_cost_pipeline import even_times


def unequal(rng: np.random.Generator) -> tuple[PipelineTimes, int]:
    """2 to 8 stages with links from fast to three times as slow as a forward, near or far."""
    num_stages, num_microbatches = int(rng.integers(2, 9)), int(rng.choice([4, 8, 16, 32]))
    forward = rng.uniform(0.5, 1.5, num_stages)

    def links() -> tuple[LinkTimes, ...]:
        busy = rng.choice([0.01, 0.3, 1, 3], num_stages - 1) * rng.uniform(0.5, 1.5, num_stages - 1)
        far = rng.choice([0, 0.1, 1, 5], num_stages - 1) * rng.uniform(0, 1, num_stages - 1)
        pairs = zip(busy.tolist(), far.tolist(), strict=True)
        return tuple(LinkTimes(busy=(each,), latency=latency) for each, latency in pairs)

    times = PipelineTimes(
        forward=tuple(forward.tolist()),
        backward=tuple((2 * forward).tolist()),
        activations=links(),
        gradients=links(),
    )
    return times, num_microbatches


def takes(recipe: str, times: PipelineTimes, num_microbatches: int) -> float:
    schedule = PlannedSchedules().build(
        recipe, num_stages=times.num_stages, num_microbatches=num_microbatches
    )
    return length(schedule, times)


@pytest.mark.parametrize("tight", [False, True])
def test_a_planned_schedule_is_nearly_as_short_as_the_shortest_of_a_closer_look(
    tight: bool,
) -> None:
    """Where memory is tight, stages far from the last one must not starve those after them."""
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(60):
        times, count = unequal(rng)
        most = (
            rng.integers(1, count + 1, times.num_stages) if tight else [count] * len(times.forward)
        )
        most = [int(room) for room in most]
        recipe = PlannedSchedules().choose(times, num_microbatches=count, most=most)
        closer = shortlist(times, num_microbatches=count, most=most, tolerance=0.01)
        shares.append(takes(recipe, times, count) / min(closer.values()))
    assert max(shares) < 1.1
    assert np.mean(shares) < 1.01
    assert np.quantile(shares, 0.95) < 1.04


@settings(max_examples=50)
@given(measured(), st.integers(1, 20), st.data())
def test_no_stage_holds_more_than_fits(
    times: PipelineTimes, num_microbatches: int, data: st.DataObject
) -> None:
    size = times.num_stages
    most = data.draw(st.lists(st.integers(1, 24), min_size=size, max_size=size))
    schedules = PlannedSchedules()
    recipe = schedules.choose(times, num_microbatches=num_microbatches, most=most)
    schedule = schedules.build(recipe, num_stages=size, num_microbatches=num_microbatches)
    held = list(map(peak_in_flight, schedule))
    assert all(peak <= room for peak, room in zip(held, most, strict=True))
    assert all(len(actions) == 2 * num_microbatches for actions in schedule)


@given(seeds)
def test_the_same_pipeline_gets_the_same_answer(seed: int) -> None:
    times, count = unequal(np.random.default_rng(seed))
    room = [count] * times.num_stages
    schedules = PlannedSchedules()
    first = schedules.choose(times, num_microbatches=count, most=room)
    assert schedules.choose(times, num_microbatches=count, most=room) == first
    assert PlannedSchedules().choose(times, num_microbatches=count, most=room) == first


@pytest.mark.parametrize("transfer", [0.0, 0.5])
@pytest.mark.parametrize(
    "work", [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)]
)
def test_a_stage_that_takes_no_time_is_no_obstacle(
    work: tuple[float, ...], transfer: float
) -> None:
    links = (LinkTimes(busy=(transfer,)),) * (len(work) - 1)
    times = PipelineTimes(forward=work, backward=work, activations=links, gradients=links)
    recipe = PlannedSchedules().choose(times, num_microbatches=4, most=(4,) * len(work))
    assert takes(recipe, times, 4) <= takes("gpipe", times, 4) * 1.01


def test_equal_stages_without_transfers_run_1f1b() -> None:
    recipe = PlannedSchedules().choose(even_times(4, 0.0), num_microbatches=16, most=(16,) * 4)
    assert recipe == "1f1b"


def test_one_stage_runs_one_microbatch_after_another() -> None:
    recipe = PlannedSchedules().choose(even_times(1, 0.0), num_microbatches=5, most=(5,))
    assert recipe == "1f1b"


def test_far_stages_get_more_in_flight() -> None:
    """With 20 forwards of latency each way 1F1B would wait; a long list tells as much as a few."""
    far = LinkTimes(busy=(0.1,), latency=20.0)
    times = PipelineTimes(
        forward=(1.0,) * 2, backward=(2.0,) * 2, activations=(far,), gradients=(far,)
    )
    recipe = PlannedSchedules().choose(times, num_microbatches=1000, most=(1000, 1000))
    assert takes(recipe, times, 1000) < 1.05 * (3000 + 43.2)
    assert takes("1f1b", times, 1000) > 5 * 3000
    schedule = PlannedSchedules().build(recipe, num_stages=2, num_microbatches=1000)
    assert peak_in_flight(schedule[0]) < 40


def test_a_recipe_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule 'zigzag'"):
        PlannedSchedules().build("zigzag", num_stages=2, num_microbatches=2)
