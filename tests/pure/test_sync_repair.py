"""Survivors forward missing parts of an average until all of them have the same values."""

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.sync.repair import plan_transfers
from polyrhythm.types import Worker

NUM_PARTS = 7
parts = st.frozensets(st.integers(0, NUM_PARTS - 1))
survivors = st.dictionaries(st.builds(Worker, st.just(0), st.integers(0, 9)), parts, min_size=2)


@given(survivors)
def test_survivors_end_with_identical_parts(
    has: dict[Worker, frozenset[int]],
) -> None:
    """A value of the average is 0; a worker's own value is its pipeline + 1."""
    values = {
        worker: [0 if part in held else 1 + worker.pipeline for part in range(NUM_PARTS)]
        for worker, held in has.items()
    }
    for part, source, receivers, _ in plan_transfers(has, NUM_PARTS):
        for worker in receivers:
            values[worker][part] = values[source][part]
    first = min(has)
    held_by_any = frozenset().union(*has.values())
    expected = [0 if part in held_by_any else 1 + first.pipeline for part in range(NUM_PARTS)]
    assert all(found == expected for found in values.values())


@given(survivors)
def test_parts_come_from_the_first_holder_and_only_to_those_missing_them(
    has: dict[Worker, frozenset[int]],
) -> None:
    for part, source, receivers, is_lost in plan_transfers(has, NUM_PARTS):
        holders = sorted(worker for worker in has if part in has[worker])
        assert is_lost == (not holders)
        assert source == min(holders or has)
        assert sorted([*receivers, *(holders or [source])]) == sorted(has)


@given(survivors)
def test_no_transfers_when_all_parts_are_present(has: dict[Worker, frozenset[int]]) -> None:
    assert plan_transfers(dict.fromkeys(has, range(NUM_PARTS)), NUM_PARTS) == []
