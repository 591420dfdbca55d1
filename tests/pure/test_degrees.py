"""Stages and pipelines without a plan: numbers that follow, and layers within memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PlanError
from polyrhythm.plan.degrees import Degrees
from polyrhythm.plan.partition import StageMemoryLimit, partition_within_memory


@given(st.none() | st.integers(1, 6), st.none() | st.integers(1, 6), st.integers(1, 24))
def test_degrees_use_all_processes_or_say_how_many_would_fit(
    stages: int | None, pipelines: int | None, num_processes: int
) -> None:
    degrees = Degrees(stages=stages, pipelines=pipelines)
    assert Degrees.from_environment(degrees.environment) == degrees
    if not degrees.are_given:
        return
    given_numbers = [number for number in (stages, pipelines) if number is not None]
    fits = num_processes % degrees.num_processes == 0
    if len(given_numbers) == 2:
        fits = num_processes == degrees.num_processes
    if fits:
        num_stages, num_pipelines = degrees.complete(num_processes)
        assert num_stages * num_pipelines == num_processes
        assert stages in (None, num_stages)
        assert pipelines in (None, num_pipelines)
        return
    with pytest.raises(PlanError) as raised:
        degrees.complete(num_processes)
    numbers = [int(word) for word in raised.value.expected.split(" processes")[0].split(" or ")]
    for number in numbers:
        degrees.complete(number)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_invalid_numbers_of_stages_are_refused(value: object) -> None:
    with pytest.raises(PlanError, match="an integer from 1 on"):
        Degrees(stages=value)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="POLYRHYTHM_STAGES"):
        Degrees.from_environment({"POLYRHYTHM_STAGES": "two"})


def limits(*nbytes: int) -> list[StageMemoryLimit]:
    return [StageMemoryLimit(f"gpu{number}", each) for number, each in enumerate(nbytes)]


def needed(sizes: list[int]) -> np.ndarray:
    done = np.concatenate([[0.0], np.cumsum(sizes)])
    inside = done[None, :] - done[:, None]
    return np.where(inside > 0, inside, np.inf)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
)
def test_layers_fit_or_the_error_names_a_stage_that_does_not(
    sizes: list[int], room: list[int]
) -> None:
    if len(room) > len(sizes):
        return
    try:
        counts = partition_within_memory(
            [float(size) for size in sizes], needed(sizes), limits(*room)
        )
    except PlanError as error:
        stage = int(error.wrong.split()[1])
        assert f"'gpu{stage}' has {room[stage]}B" in error.wrong
        assert "stages" in error.fix or max(sizes) > min(room)
        return
    assert sum(counts) == len(sizes)
    start = 0
    for number, limit in zip(counts, room, strict=True):
        assert sum(sizes[start : start + number]) <= limit
        start += number


def test_smaller_devices_get_fewer_layers_only_if_they_must() -> None:
    sizes = [10] * 8
    work = [1.0] * 8
    assert partition_within_memory(work, needed(sizes), limits(80, 80)) == (4, 4)
    assert partition_within_memory(work, needed(sizes), limits(60, 25)) == (6, 2)
    with pytest.raises(PlanError) as raised:
        partition_within_memory(work, needed(sizes), limits(35, 30))
    assert "needs" in raised.value.wrong
    assert raised.value.fix.startswith("use 3 stages")
