"""Parts of an average that members lack are handed on until all who are left have the same."""

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.sync.repair import plan_transfers
from polyrhythm.types import Worker

NUM_PARTS = 7
parts = st.frozensets(st.integers(0, NUM_PARTS - 1))
left = st.dictionaries(st.builds(Worker, st.just(0), st.integers(0, 9)), parts, min_size=2)


@given(left)
def test_survivors_end_with_identical_parts(
    has: dict[Worker, frozenset[int]],
) -> None:
    """A number that the average has is 0; a worker's own is its pipeline, from 1 on."""
    numbers = {
        worker: [0 if part in of else 1 + worker.pipeline for part in range(NUM_PARTS)]
        for worker, of in has.items()
    }
    for part, source, receivers, _ in plan_transfers(has, NUM_PARTS):
        for worker in receivers:
            numbers[worker][part] = numbers[source][part]
    first = min(has)
    anybody_has = frozenset().union(*has.values())
    expected = [0 if part in anybody_has else 1 + first.pipeline for part in range(NUM_PARTS)]
    assert all(found == expected for found in numbers.values())


@given(left)
def test_parts_come_from_the_first_holder_and_only_to_those_missing_them(
    has: dict[Worker, frozenset[int]],
) -> None:
    for part, source, receivers, is_lost in plan_transfers(has, NUM_PARTS):
        holders = sorted(worker for worker in has if part in has[worker])
        assert is_lost == (not holders)
        assert source == min(holders or has)
        assert sorted([*receivers, *(holders or [source])]) == sorted(has)


@given(left)
def test_no_transfers_when_all_parts_are_present(has: dict[Worker, frozenset[int]]) -> None:
    assert plan_transfers(dict.fromkeys(has, range(NUM_PARTS)), NUM_PARTS) == []
