"""The sample dispatcher: every position is used once, despite repeats, losses and restores."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.dispatch import Range, Ranges, SampleLedger, SamplerState, merge_ranges

PIPELINES = 3


def positions(ranges: Ranges) -> list[int]:
    return [position for start, end in ranges for position in range(start, end)]


def test_chunks_are_acquired_in_request_order_up_to_the_limit() -> None:
    dispatcher = SampleLedger(SamplerState(limit=10))
    assert dispatcher.acquire(0, 0, 4) == ((0, 4),)
    assert dispatcher.acquire(1, 0, 4) == ((4, 8),)
    assert dispatcher.acquire(0, 0, 4) == ((0, 4),)  # requested by another stage
    assert dispatcher.acquire(0, 1, 4) == ((8, 10),)
    assert dispatcher.acquire(1, 1, 4) == ()
    assert not dispatcher.is_exhausted(1)
    assert dispatcher.acknowledge(0, 1)
    assert dispatcher.acknowledge(0, 0)
    assert not dispatcher.acknowledge(0, 0)
    assert dispatcher.is_exhausted(1)  # its own chunk does not count
    assert not dispatcher.is_exhausted(0)


def test_samples_of_a_lost_pipeline_are_dispatched_first() -> None:
    dispatcher = SampleLedger(SamplerState(limit=100))
    for number in range(3):
        dispatcher.acquire(0, number, 4)
        dispatcher.acquire(1, number, 2)
    dispatcher.acknowledge(0, 1)  # 6 to 10
    dispatcher.release(0)  # 0 to 4, 12 to 16
    assert dispatcher.state() == SamplerState(
        limit=100, next=18, pool=((0, 4), (12, 16)), outstanding=((4, 6), (10, 12), (16, 18))
    )
    assert dispatcher.acquire(0, 0, 3) == ((0, 3),)  # in its next incarnation
    assert dispatcher.acquire(1, 3, 4) == ((3, 4), (12, 15))
    assert dispatcher.acquire(2, 0, 3) == ((15, 16), (18, 20))
    dispatcher.release(2)
    assert dispatcher.acquire(2, 0, 2) == ((15, 16), (18, 19))


def test_until_bounds_the_acquired_positions() -> None:
    dispatcher = SampleLedger(SamplerState(limit=100, next=20, pool=((3, 5), (12, 16))))
    assert dispatcher.acquire(0, 0, 8, until=14) == ((3, 5), (12, 14))
    assert dispatcher.acquire(0, 1, 8, until=14) == ()
    assert dispatcher.is_exhausted(0, until=14)
    assert not dispatcher.is_exhausted(1, until=14)
    assert dispatcher.acquire(0, 1, 8, until=22) == ((14, 16), (20, 22))
    assert dispatcher.acquire(0, 2, 2, until=1000) == ((22, 24),)


@pytest.mark.parametrize("number", [1, 7])
def test_a_chunk_out_of_order_is_refused(number: int) -> None:
    dispatcher = SampleLedger(SamplerState())
    with pytest.raises(PolicyError, match=f"chunk {number} of pipeline 2, which has acquired 0"):
        dispatcher.acquire(2, number, 4)
    dispatcher.acquire(2, 0, 4)
    dispatcher.acknowledge(2, 0)
    with pytest.raises(PolicyError, match="chunk 0 of pipeline 2, which has acquired 1"):
        dispatcher.acquire(2, 0, 4)


@pytest.mark.parametrize(
    "sampler_state",
    [
        {"limit": -1},
        {"next": -1},
        {"next": 5, "pool": ((4, 6),)},
        {"next": 5, "pool": ((2, 2),)},
        {"next": 5, "pool": ((-1, 2),)},
        {"next": 9, "pool": ((1, 3),), "outstanding": ((2, 4),)},
    ],
)
def test_invalid_sampler_states_are_refused(sampler_state: dict) -> None:
    with pytest.raises(PolicyError, match="ranges"):
        SamplerState(**sampler_state)


def test_sampler_state_counts_used_positions() -> None:
    sampler_state = SamplerState(next=20, pool=((7, 9),), outstanding=((3, 5), (18, 20)))
    assert (sampler_state.num_used, sampler_state.first_unused) == (14, 3)
    assert (SamplerState(next=4).num_used, SamplerState(next=4).first_unused) == (4, 4)


ranges = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(ranges)
def test_merged_ranges_have_the_same_positions_in_fewer_ranges(given_ranges: list[Range]) -> None:
    touching = [(start, middle) for start, end in given_ranges for middle in [(start + end) // 2]]
    touching += [((start + end) // 2, end) for start, end in given_ranges]
    parts = [(start, end) for start, end in touching if start < end]
    assert positions(merge_ranges(parts)) == sorted(positions(tuple(given_ranges)))
    assert len(merge_ranges(parts)) <= len(given_ranges)


class Model:
    """The expected state of a dispatcher, position by position."""

    def __init__(self, limit: int, *, has_commits: bool) -> None:
        self.limit, self.has_commits = limit, has_commits
        self.dispatcher = SampleLedger(SamplerState(limit=limit), has_commits=has_commits)
        self.used: list[int] = []
        # Of them, those that are lost with a pipeline, before and after it has published its model.
        self.own: list[set[int]] = [set() for _ in range(PIPELINES)]
        self.published: list[set[int]] = [set() for _ in range(PIPELINES)]
        self.acquired: dict[int, dict[int, Ranges]] = {p: {} for p in range(PIPELINES)}
        self.num_acquired = [0] * PIPELINES

    def check(self) -> None:
        """Each position below next is used, outstanding with one pipeline, or in the pool."""
        state = self.dispatcher.state()
        outstanding = [
            p for chunks in self.acquired.values() for r in chunks.values() for p in positions(r)
        ]
        assert sorted(outstanding) == positions(state.outstanding)
        assert sorted([*self.used, *outstanding, *positions(state.pool)]) == list(range(state.next))
        assert state.num_used == len(self.used)
        assert state.next <= self.limit

    def acquire(self, pipeline: int, count: int, until: int | None = None) -> bool:
        number = self.num_acquired[pipeline]
        found = self.dispatcher.acquire(pipeline, number, count, until)
        assert len(positions(found)) <= count
        assert all(position < (until or 99) for position in positions(found))
        if found:
            self.acquired[pipeline][number] = found
            self.num_acquired[pipeline] += 1
        else:
            rest = [p for p in range(min(until or 99, self.limit)) if p not in self.used]
            own = [p for r in self.acquired[pipeline].values() for p in positions(r)]
            assert self.dispatcher.is_exhausted(pipeline, until) == (set(rest) <= set(own))
        return bool(found)

    def repeat(self, pipeline: int, which: int) -> None:
        for number, found in list(self.acquired[pipeline].items())[which % 3 : which % 3 + 1]:
            assert self.dispatcher.acquire(pipeline, number, which + 1) == found

    def acknowledge(self, pipeline: int, which: int) -> None:
        if chunks := self.acquired[pipeline]:
            number = list(chunks)[which % len(chunks)]
            assert self.dispatcher.acknowledge(pipeline, number)
            found = positions(chunks.pop(number))
            self.used += found
            if self.has_commits:
                self.own[pipeline] |= {*found}

    def publish(self, pipeline: int, _: int) -> None:
        self.dispatcher.publish(pipeline)
        self.published[pipeline] |= self.own[pipeline]
        self.own[pipeline] = set()

    def commit(self, pipeline: int, _: int) -> None:
        self.dispatcher.commit(pipeline)
        self.published[pipeline] = set()

    def release(self, pipeline: int, _: int) -> None:
        self.dispatcher.release(pipeline)
        self.acquired[pipeline], self.num_acquired[pipeline] = {}, 0
        lost = self.own[pipeline] | self.published[pipeline]
        self.used = [position for position in self.used if position not in lost]
        self.own[pipeline], self.published[pipeline] = set(), set()

    def restore(self, *_: int) -> None:
        """All have averaged, or a checkpoint has what the first pipeline has."""
        text = json.dumps(msgspec.to_builtins(self.dispatcher.state()))
        state = msgspec.convert(json.loads(text), SamplerState)
        self.dispatcher = SampleLedger(state, has_commits=self.has_commits)
        for pipeline in range(PIPELINES):
            self.acquired[pipeline], self.num_acquired[pipeline] = {}, 0
            self.own[pipeline], self.published[pipeline] = set(), set()


operations = st.tuples(
    st.sampled_from(
        [
            "acquire",
            "acquire",
            "acquire",
            "until",
            "repeat",
            "acknowledge",
            "acknowledge",
            "publish",
            "commit",
            "release",
            "restore",
        ]
    ),
    st.integers(0, PIPELINES - 1),
    st.integers(0, 8),
)


@given(st.integers(0, 60), st.lists(operations, max_size=60), st.booleans())
def test_every_position_is_used_once(
    limit: int, operations_drawn: list[tuple[str, int, int]], has_commits: bool
) -> None:
    model = Model(limit, has_commits=has_commits)
    for operation, pipeline, number in operations_drawn:
        if operation == "acquire":
            model.acquire(pipeline, number + 1)
        elif operation == "until":
            model.acquire(pipeline, number + 1, until=number * 8 + 1)
        else:
            getattr(model, operation)(pipeline, number)
        model.check()
    for pipeline in range(PIPELINES):
        while model.acquire(pipeline, 5) or model.acquired[pipeline]:
            model.acknowledge(pipeline, 0)
    model.check()
    assert sorted(model.used) == list(range(limit))
    assert all(model.dispatcher.is_exhausted(pipeline) for pipeline in range(PIPELINES))
