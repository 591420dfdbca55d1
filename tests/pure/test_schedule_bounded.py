"""In-flight limits: one per stage, held exactly, and 1F1B and GPipe as special cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import bounded, build, gpipe, kfkb, one_f_one_b
from polyrhythm.schedule.check import check, forwards_before_backward
from polyrhythm.schedule.limits import limits_for, one_f_one_b_limits
from polyrhythm.types import Action, Op

num_stages_s = st.integers(1, 8)
num_microbatches_s = st.integers(1, 32)


@st.composite
def limits_s(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(sorted(draw(st.lists(st.integers(1, 40), min_size=1, max_size=8)), reverse=True))


@given(limits_s(), num_microbatches_s)
def test_bounded_is_complete_in_order_and_free_of_deadlock(
    limits: tuple[int, ...], num_microbatches: int
) -> None:
    schedule = build(
        "bounded", num_stages=len(limits), num_microbatches=num_microbatches, limits=limits
    )
    check(schedule, num_microbatches=num_microbatches)


@given(limits_s(), num_microbatches_s)
def test_a_stage_holds_its_limit_and_never_more(
    limits: tuple[int, ...], num_microbatches: int
) -> None:
    for stage, limit in enumerate(limits):
        order = bounded(
            stage=stage,
            num_stages=len(limits),
            num_microbatches=num_microbatches,
            limits=limits,
        )
        assert peak_in_flight(order) == min(limit, num_microbatches)
        # No forward is delayed: before every backward the stage has run all that it may hold.
        assert forwards_before_backward(order) == [
            min(limit + m, num_microbatches) for m in range(num_microbatches)
        ]


@given(num_stages_s, num_microbatches_s, st.integers(0, 5))
def test_bounded_equals_1f1b_and_gpipe_for_their_limits(
    num_stages: int, num_microbatches: int, more: int
) -> None:
    for stage in range(num_stages):
        shape = {"stage": stage, "num_stages": num_stages, "num_microbatches": num_microbatches}
        limits = one_f_one_b_limits(num_stages)
        everything = (num_microbatches + more,) * num_stages
        assert bounded(**shape, limits=limits) == one_f_one_b(**shape)
        assert bounded(**shape, limits=everything) == gpipe(**shape)


@given(num_stages_s, num_microbatches_s)
def test_1f1b_warms_up_alternates_and_drains(num_stages: int, num_microbatches: int) -> None:
    """Compare with the usual loop of 1F1B."""
    for stage in range(num_stages):
        warmup = min(num_stages - 1 - stage, num_microbatches)
        expected = [Action(Op.F, m) for m in range(warmup)]
        for m in range(warmup, num_microbatches):
            expected += [Action(Op.F, m), Action(Op.B, m - warmup)]
        expected += [Action(Op.B, m) for m in range(num_microbatches - warmup, num_microbatches)]
        shape = {"stage": stage, "num_stages": num_stages, "num_microbatches": num_microbatches}
        assert one_f_one_b(**shape) == expected


@given(num_stages_s, num_microbatches_s, st.integers(1, 40))
def test_kfkb_is_k_copies_of_1f1b_merged(num_stages: int, num_microbatches: int, k: int) -> None:
    """Copy j of 1F1B runs micro-batches j, j+k, ...; the copies take turns, action by action."""
    num_groups = -(-num_microbatches // k)
    for stage in range(num_stages):
        shape = {"stage": stage, "num_stages": num_stages}
        copy = one_f_one_b(**shape, num_microbatches=num_groups)
        merged = [Action(op, group * k + j) for op, group in copy for j in range(k)]
        expected = [action for action in merged if action.microbatch < num_microbatches]
        assert kfkb(**shape, num_microbatches=num_microbatches, k=k) == expected


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((2, 1), "limits 2,1 for 3 stages"),
        ((), "limits () for 3 stages"),
        ((2, 1, 0), "limits 2,1,0"),
        ((3, 1, 2), "stage 1 may hold 1, stage 2 2"),
        (None, "bounded with limits=None"),
    ],
)
def test_limits_that_cannot_work_are_refused(limits: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build("bounded", num_stages=3, num_microbatches=4, limits=limits)
    assert message in str(caught.value)
    assert "fix:" in str(caught.value)


def test_only_bounded_takes_limits() -> None:
    with pytest.raises(ScheduleError, match="1f1b with limits"):
        build("1f1b", num_stages=2, num_microbatches=4, limits=(2, 1))


@given(st.lists(st.just(0.0), max_size=7), st.floats(0.001, 1000))
def test_free_transfers_need_no_slack(transfers: list[float], period: float) -> None:
    limits = limits_for(period=period, transfers=transfers)
    assert limits == one_f_one_b_limits(len(transfers) + 1)


@pytest.mark.parametrize(
    ("period", "transfers", "limits"),
    [
        (3.0, [0.5] * 3, (7, 5, 3, 1)),
        (3.0, [1.5] * 3, (7, 5, 3, 1)),  # both ways exactly one period
        (0.3, [0.15] * 3, (7, 5, 3, 1)),  # the same in numbers that are not exact
        (3.0, [2.0] * 3, (10, 7, 4, 1)),
        (3.0, [0.0, 1.0, 0.0], (5, 4, 2, 1)),  # one slow link
        (3.0, [], (1,)),
    ],
)
def test_a_slow_link_gets_a_micro_batch_more_per_period(
    period: float, transfers: list[float], limits: tuple[int, ...]
) -> None:
    assert limits_for(period=period, transfers=transfers) == limits


@given(st.lists(st.floats(0, 100), max_size=7), st.floats(0.01, 100), st.integers(-20, 20))
def test_limits_do_not_depend_on_the_time_unit(
    transfers: list[float], period: float, power: int
) -> None:
    scaled = [transfer * 2.0**power for transfer in transfers]
    assert limits_for(period=period, transfers=transfers) == limits_for(
        period=period * 2.0**power, transfers=scaled
    )


@pytest.mark.parametrize(("period", "transfer"), [(0.0, 1.0), (1.0, -1.0), (1.0, float("nan"))])
def test_invalid_times_are_refused(period: float, transfer: float) -> None:
    with pytest.raises(ScheduleError, match="measure"):
        limits_for(period=period, transfers=[transfer])
