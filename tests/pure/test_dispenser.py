"""The dispenser: every position is used once, whoever takes, repeats, dies, comes back or saves."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.dispenser import Dispenser, Range, Ranges, Supply, merged

PIPELINES = 3


def positions(ranges: Ranges) -> list[int]:
    return [position for start, end in ranges for position in range(start, end)]


def test_chunks_are_dealt_in_order_of_asking_and_end_with_the_limit() -> None:
    dispenser = Dispenser(Supply(limit=10))
    assert dispenser.take(0, 0, 4) == ((0, 4),)
    assert dispenser.take(1, 0, 4) == ((4, 8),)
    assert dispenser.take(0, 0, 4) == ((0, 4),)  # another stage asks
    assert dispenser.take(0, 1, 4) == ((8, 10),)
    assert dispenser.take(1, 1, 4) == ()
    assert not dispenser.is_over(1)
    assert dispenser.done(0, 1)
    assert dispenser.done(0, 0)
    assert not dispenser.done(0, 0)
    assert dispenser.is_over(1)  # what it has itself does not count
    assert not dispenser.is_over(0)


def test_what_a_lost_pipeline_had_comes_first_and_in_order() -> None:
    dispenser = Dispenser(Supply(limit=100))
    for number in range(3):
        dispenser.take(0, number, 4)
        dispenser.take(1, number, 2)
    dispenser.done(0, 1)  # 6 to 10
    dispenser.lost(0)  # 0 to 4, 12 to 16
    assert dispenser.state() == Supply(
        limit=100, next=18, pool=((0, 4), (12, 16)), outstanding=((4, 6), (10, 12), (16, 18))
    )
    assert dispenser.take(0, 0, 3) == ((0, 3),)  # in its next life
    assert dispenser.take(1, 3, 4) == ((3, 4), (12, 15))
    assert dispenser.take(2, 0, 3) == ((15, 16), (18, 20))
    dispenser.lost(2)
    assert dispenser.take(2, 0, 2) == ((15, 16), (18, 19))


def test_until_holds_back_what_comes_after() -> None:
    dispenser = Dispenser(Supply(limit=100, next=20, pool=((3, 5), (12, 16))))
    assert dispenser.take(0, 0, 8, until=14) == ((3, 5), (12, 14))
    assert dispenser.take(0, 1, 8, until=14) == ()
    assert dispenser.is_over(0, until=14)
    assert not dispenser.is_over(1, until=14)
    assert dispenser.take(0, 1, 8, until=22) == ((14, 16), (20, 22))
    assert dispenser.take(0, 2, 2, until=1000) == ((22, 24),)


@pytest.mark.parametrize("number", [1, 7])
def test_a_chunk_out_of_order_is_refused(number: int) -> None:
    dispenser = Dispenser(Supply())
    with pytest.raises(PolicyError, match=f"chunk {number} of pipeline 2, which has taken 0"):
        dispenser.take(2, number, 4)
    dispenser.take(2, 0, 4)
    dispenser.done(2, 0)
    with pytest.raises(PolicyError, match="chunk 0 of pipeline 2, which has taken 1"):
        dispenser.take(2, 0, 4)


@pytest.mark.parametrize(
    "supply",
    [
        {"limit": -1},
        {"next": -1},
        {"next": 5, "pool": ((4, 6),)},
        {"next": 5, "pool": ((2, 2),)},
        {"next": 5, "pool": ((-1, 2),)},
        {"next": 9, "pool": ((1, 3),), "outstanding": ((2, 4),)},
    ],
)
def test_a_supply_that_cannot_be_is_refused(supply: dict) -> None:
    with pytest.raises(PolicyError, match="ranges"):
        Supply(**supply)


def test_a_supply_says_what_was_used() -> None:
    supply = Supply(next=20, pool=((7, 9),), outstanding=((3, 5), (18, 20)))
    assert (supply.num_used, supply.unused) == (14, 3)
    assert (Supply(next=4).num_used, Supply(next=4).unused) == (4, 4)


ranges = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(ranges)
def test_merged_ranges_are_the_same_positions_in_fewer(given_ranges: list[Range]) -> None:
    touching = [(start, middle) for start, end in given_ranges for middle in [(start + end) // 2]]
    touching += [((start + end) // 2, end) for start, end in given_ranges]
    parts = [(start, end) for start, end in touching if start < end]
    assert positions(merged(parts)) == sorted(positions(tuple(given_ranges)))
    assert len(merged(parts)) <= len(given_ranges)


class Model:
    """What a dispenser should hold, position by position."""

    def __init__(self, limit: int) -> None:
        self.limit, self.dispenser = limit, Dispenser(Supply(limit=limit))
        self.used: list[int] = []
        self.taken: dict[int, dict[int, Ranges]] = {p: {} for p in range(PIPELINES)}
        self.num_taken = [0] * PIPELINES

    def check(self) -> None:
        """Each position below next is used, outstanding with one pipeline, or in the pool."""
        state = self.dispenser.state()
        outstanding = [
            p for chunks in self.taken.values() for r in chunks.values() for p in positions(r)
        ]
        assert sorted(outstanding) == positions(state.outstanding)
        assert sorted([*self.used, *outstanding, *positions(state.pool)]) == list(range(state.next))
        assert state.num_used == len(self.used)
        assert state.next <= self.limit

    def take(self, pipeline: int, count: int, until: int | None = None) -> bool:
        number = self.num_taken[pipeline]
        found = self.dispenser.take(pipeline, number, count, until)
        assert len(positions(found)) <= count
        assert all(position < (until or 99) for position in positions(found))
        if found:
            self.taken[pipeline][number] = found
            self.num_taken[pipeline] += 1
        else:
            rest = [p for p in range(min(until or 99, self.limit)) if p not in self.used]
            mine = [p for r in self.taken[pipeline].values() for p in positions(r)]
            assert self.dispenser.is_over(pipeline, until) == (set(rest) <= set(mine))
        return bool(found)

    def repeat(self, pipeline: int, which: int) -> None:
        for number, found in list(self.taken[pipeline].items())[which % 3 : which % 3 + 1]:
            assert self.dispenser.take(pipeline, number, which + 1) == found

    def done(self, pipeline: int, which: int) -> None:
        if chunks := self.taken[pipeline]:
            number = list(chunks)[which % len(chunks)]
            assert self.dispenser.done(pipeline, number)
            self.used += positions(chunks.pop(number))

    def lost(self, pipeline: int) -> None:
        self.dispenser.lost(pipeline)
        self.taken[pipeline], self.num_taken[pipeline] = {}, 0

    def restore(self) -> None:
        text = json.dumps(msgspec.to_builtins(self.dispenser.state()))
        self.dispenser = Dispenser(msgspec.convert(json.loads(text), Supply))
        for pipeline in range(PIPELINES):
            self.taken[pipeline], self.num_taken[pipeline] = {}, 0


doings = st.tuples(
    st.sampled_from(["take", "take", "take", "until", "repeat", "done", "done", "lost", "restore"]),
    st.integers(0, PIPELINES - 1),
    st.integers(0, 8),
)


@given(st.integers(0, 60), st.lists(doings, max_size=60))
def test_every_position_is_used_once_whatever_happens(
    limit: int, happens: list[tuple[str, int, int]]
) -> None:
    model = Model(limit)
    for what, pipeline, number in happens:
        if what == "take":
            model.take(pipeline, number + 1)
        elif what == "until":
            model.take(pipeline, number + 1, until=number * 8 + 1)
        elif what == "restore":
            model.restore()
        elif what == "lost":
            model.lost(pipeline)
        else:
            getattr(model, what)(pipeline, number)
        model.check()
    for pipeline in range(PIPELINES):
        while model.take(pipeline, 5) or model.taken[pipeline]:
            model.done(pipeline, 0)
    model.check()
    assert sorted(model.used) == list(range(limit))
    assert all(model.dispenser.is_over(pipeline) for pipeline in range(PIPELINES))
