"""Torch's CSV of a schedule is written and read back; unsupported tables are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import ScheduleError
from polyrhythm.schedule.builders import build
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.schedule.torch_csv import from_csv, to_csv
from tests.pure.schedule_cases import specs


@given(specs, st.integers(1, 8), st.integers(1, 32))
def test_a_schedule_survives_the_csv(
    spec: ScheduleSpec, num_stages: int, num_microbatches: int
) -> None:
    num_stages = num_stages if spec.limits is None else len(spec.limits)
    schedule = spec.build(num_stages=num_stages, num_microbatches=num_microbatches)
    assert from_csv(to_csv(schedule)) == schedule


def test_a_row_is_a_rank_and_a_cell_an_action() -> None:
    text = to_csv(build("1f1b", num_stages=2, num_microbatches=2))
    assert text == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_empty_cells_are_slots_in_which_a_rank_waits() -> None:
    text = "0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n\r\n"
    assert from_csv(text) == build("1f1b", num_stages=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "without rows"),
        ("\n\n", "without rows"),
        ("0F0,0I0,0W0", "row 1, cell 2: '0I0'"),
        ("0F0,1SEND_F0,0B0", "stage 1 on rank 0"),
        ("0UNSHARD,0RESHARD", "stage 0 runs F of micro-batches []"),
        ("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1", "stage 0 runs B of micro-batches [1, 0]"),
        ("0F0,0F1,0F2,0B2,0B0,0B1", "stage 0 runs B of micro-batches [2, 0, 1]"),
        ("0F0,1F0,1B0,0B0", "stage 1 on rank 0"),
        ("1F0,1B0\n0F0,0B0", "stage 1 on rank 0"),
        ("0F0,F1", "'F1'"),
        ("0F0,(1F0;2B0)OVERLAP_F_B", "cell 2"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock"),
        ("0F0,0F1,0B0", "stage 0 runs B of micro-batches [0]"),
        ("0F0,0B0\n\n2F0,2B0", "stage 1 runs F of micro-batches []"),
    ],
)
def test_unsupported_csv_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    assert message in str(caught.value)
