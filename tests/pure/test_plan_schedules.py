"""The planner's schedules: near the best of the shortlist, within memory, and deterministic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, length
from polyrhythm.schedule.builders import Schedule
from polyrhythm.schedule.candidates import shortlist
from polyrhythm.schedule.plan_schedules import choose_schedule
from polyrhythm.schedule.spec import ScheduleSpec
from tests.grids import num_examples
from tests.pure.schedule_cases import even_times, measured
from tests.pure.step_cases import seeds


def unequal(rng: np.random.Generator) -> tuple[PipelineTimes, int]:
    """Return 2 to 8 stages with links from fast to three forwards per message, near or far."""
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


def built(spec: ScheduleSpec | str, num_stages: int, num_microbatches: int) -> Schedule:
    parsed = ScheduleSpec.parse(str(spec))
    return parsed.build(num_stages=num_stages, num_microbatches=num_microbatches)


def takes(spec: ScheduleSpec | str, times: PipelineTimes, num_microbatches: int) -> float:
    return length(built(spec, times.num_stages, num_microbatches), times)


@pytest.mark.parametrize("tight", [False, True])
def test_planned_schedule_is_nearly_as_short_as_the_best_of_the_shortlist(
    tight: bool,
) -> None:
    """With tight memory, stages far from the last one must not starve those after them."""
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(60):
        times, count = unequal(rng)
        max_in_flight = (
            rng.integers(1, count + 1, times.num_stages) if tight else [count] * len(times.forward)
        )
        max_in_flight = [int(room) for room in max_in_flight]
        spec = choose_schedule(times, count, tuple(max_in_flight))
        closer = shortlist(
            times, num_microbatches=count, max_in_flight=max_in_flight, tolerance=0.01
        )
        shares.append(takes(spec, times, count) / min(closer.values()))
    assert max(shares) < 1.1
    assert np.mean(shares) < 1.01
    assert np.quantile(shares, 0.95) < 1.04


@settings(max_examples=num_examples(50))
@given(measured(), st.integers(1, 20), st.data())
def test_no_stage_holds_more_than_fits(
    times: PipelineTimes, num_microbatches: int, data: st.DataObject
) -> None:
    size = times.num_stages
    max_in_flight = data.draw(st.lists(st.integers(1, 24), min_size=size, max_size=size))
    spec = choose_schedule(times, num_microbatches, tuple(max_in_flight))
    schedule = built(spec, size, num_microbatches)
    held = list(map(peak_in_flight, schedule))
    assert all(peak <= room for peak, room in zip(held, max_in_flight, strict=True))
    assert all(len(actions) == 2 * num_microbatches for actions in schedule)


@given(seeds)
def test_equal_pipelines_get_equal_schedules(seed: int) -> None:
    times, count = unequal(np.random.default_rng(seed))
    room = (count,) * times.num_stages
    first = choose_schedule(times, count, room)
    choose_schedule.cache_clear()
    assert choose_schedule(times, count, room) == first


@pytest.mark.parametrize("transfer", [0.0, 0.5])
@pytest.mark.parametrize(
    "work", [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)]
)
def test_stage_that_takes_no_time_is_planned(work: tuple[float, ...], transfer: float) -> None:
    links = (LinkTimes(busy=(transfer,)),) * (len(work) - 1)
    times = PipelineTimes(forward=work, backward=work, activations=links, gradients=links)
    spec = choose_schedule(times, 4, (4,) * len(work))
    assert takes(spec, times, 4) <= takes("gpipe", times, 4) * 1.01


def test_equal_stages_without_transfers_run_1f1b() -> None:
    spec = choose_schedule(even_times(4, 0.0), 16, (16,) * 4)
    assert str(spec) == "1f1b"


def test_one_stage_runs_one_microbatch_after_another() -> None:
    spec = choose_schedule(even_times(1, 0.0), 5, (5,))
    assert str(spec) == "1f1b"


def test_slow_links_get_more_in_flight() -> None:
    """With 20 forwards of latency each way 1F1B would wait, also with many micro-batches."""
    far = LinkTimes(busy=(0.1,), latency=20.0)
    times = PipelineTimes(
        forward=(1.0,) * 2, backward=(2.0,) * 2, activations=(far,), gradients=(far,)
    )
    spec = choose_schedule(times, 1000, (1000, 1000))
    assert takes(spec, times, 1000) < 1.05 * (3000 + 43.2)
    assert takes("1f1b", times, 1000) > 5 * 3000
    schedule = built(spec, 2, 1000)
    assert peak_in_flight(schedule[0]) < 40
