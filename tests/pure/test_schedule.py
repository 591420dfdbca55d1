"""Schedules are complete, in order, free of deadlock, and hold the expected micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import Schedule, build, gpipe, kfkb, one_f_one_b
from polyrhythm.schedule.check import check
from polyrhythm.types import Action, Op
from tests.pure.schedule_cases import ordered_schedules, parse

num_stages_s = st.integers(1, 8)
num_microbatches_s = st.integers(1, 32)


def finishes(schedule: Schedule) -> bool:
    """Execute the lists: a stage runs its next action as soon as its input is available."""
    done: list[set[Action]] = [set() for _ in schedule]
    position = [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                source = stage - 1 if action.op is Op.F else stage + 1
                if 0 <= source < len(schedule) and action not in done[source]:
                    break
                done[stage].add(action)
                position[stage] += 1
                moved = True
    return all(p == len(actions) for p, actions in zip(position, schedule, strict=True))


@given(num_stages_s, num_microbatches_s, st.integers(1, 40))
def test_every_built_schedule_passes_the_check_and_finishes(
    num_stages: int, num_microbatches: int, k: int
) -> None:
    shape = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    for schedule in (build("1f1b", **shape), build("gpipe", **shape), build("kfkb", **shape, k=k)):
        check(schedule, num_microbatches=num_microbatches)
        assert finishes(schedule)


@given(num_stages_s, num_microbatches_s, st.integers(1, 40))
def test_kfkb_holds_k_micro_batches_per_remaining_stage(
    num_stages: int, num_microbatches: int, k: int
) -> None:
    for stage in range(num_stages):
        order = kfkb(stage=stage, num_stages=num_stages, num_microbatches=num_microbatches, k=k)
        assert peak_in_flight(order) == min(num_microbatches, k * (num_stages - stage))


@given(num_stages_s, num_microbatches_s, st.integers(0, 8))
def test_kfkb_equals_1f1b_for_k_1_and_gpipe_for_large_k(
    num_stages: int, num_microbatches: int, more: int
) -> None:
    for stage in range(num_stages):
        shape = {"stage": stage, "num_stages": num_stages, "num_microbatches": num_microbatches}
        assert kfkb(**shape, k=1) == one_f_one_b(**shape)
        assert kfkb(**shape, k=num_microbatches + more) == gpipe(**shape)


def test_1f1b_of_four_stages_is_the_known_table() -> None:
    table = [" ".join(map(str, row)) for row in build("1f1b", num_stages=4, num_microbatches=5)]
    assert table == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


@given(ordered_schedules())
def test_the_inequality_holds_exactly_when_the_lists_finish(case: tuple[Schedule, int]) -> None:
    schedule, num_microbatches = case
    try:
        check(schedule, num_microbatches=num_microbatches)
    except ScheduleError as error:
        assert "deadlock" in str(error)
        assert not finishes(schedule)
    else:
        assert finishes(schedule)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["F0 B0"], "stage 0 runs F of micro-batches [0]"),
        (["F0 F1 B0 B1 B1"], "runs B of micro-batches [0, 1, 1]"),
        (["F1 F0 B0 B1"], "runs F of micro-batches [1, 0]"),
        (["F0 B0 B1 F1"], "stage 0 runs B1 before F1"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "stage 0 runs 1 forwards before B0, stage 1 runs 2"),
        ([], "0 stages"),
    ],
)
def test_a_defect_is_named(rows: list[str], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(parse(*rows), num_microbatches=2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("kfkb", {"k": 0}, "k=0"),
        ("kfkb", {"k": -2}, "k=-2"),
        ("kfkb", {}, "k=None"),
        ("1f1b", {"k": 2}, "1f1b with k=2"),
        ("2f2b", {}, "'2f2b'"),
        ("1f1b", {"num_stages": 0}, "num_stages=0"),
        ("gpipe", {"num_microbatches": 0}, "num_microbatches=0"),
    ],
)
def test_an_impossible_schedule_is_refused(name: str, shape: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(name, **{"num_stages": 2, "num_microbatches": 4, **shape})
    assert message in str(caught.value)
    assert "fix:" in str(caught.value)


def test_a_stage_outside_the_pipeline_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 2 of 2"):
        one_f_one_b(stage=2, num_stages=2, num_microbatches=4)
