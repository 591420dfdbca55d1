"""What processes of a benchmark say: one word of each in order, and who was silent or is gone."""

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.words import next_words, word_of_boss, word_of_each
from polyrhythm.errors import LabError, PeerError
from polyrhythm.processes import Child


class Three(NamedTuple):
    pipes: list[Connection]
    said: list[Connection]  # the other ends
    children: list[Child]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    """Processes that have said nothing, and end with an error."""
    both = [Pipe() for _ in range(3)]
    children = [Child(lambda: 1 / 0, output=tmp_path / str(rank)) for rank in range(3)]
    yield Three([ours for ours, _ in both], [theirs for _, theirs in both], children)
    for child in children:
        assert child.wait(10.0)
    for end in (end for ends in both for end in ends):
        end.close()


def test_words_come_in_the_order_of_ranks(three: Three) -> None:
    for rank in (2, 0, 1):
        three.said[rank].send(f"of {rank}")
    words = word_of_each(three.pipes, three.children, "joining", 10.0)
    assert words == ["of 0", "of 1", "of 2"]


def test_who_was_silent_is_named(three: Three) -> None:
    three.said[1].send("here")
    with pytest.raises(LabError, match=r"joining took more than 0 s; no word from ranks \[0, 1, 2"):
        word_of_each(three.pipes, three.children, "joining", 0.0)
    with pytest.raises(LabError, match=r"no word from ranks \[0, 2\]"):
        word_of_each(three.pipes, three.children, "joining", 0.5)


def test_who_has_ended_is_named_with_the_reason(three: Three) -> None:
    three.said[2].close()
    with pytest.raises(LabError, match=r"rank 2, a step: failed: ZeroDivisionError"):
        word_of_each(three.pipes, three.children, "a step", 10.0)


def test_only_the_silent_are_heard_and_not_for_longer_than_asked(three: Three) -> None:
    three.said[0].send("again")
    assert next_words(three.pipes, three.children, [1, 2], "a step", 0.01) == {}
    three.said[1].send("first")
    assert next_words(three.pipes, three.children, [1, 2], "a step", 10.0) == {1: "first"}


def test_a_worker_does_not_wait_for_ever_for_who_drives_it() -> None:
    boss, worker = Pipe()
    boss.send(3.0)
    assert word_of_boss(worker, "preparing", 10.0) == 3.0
    with pytest.raises(PeerError, match=r"lost the benchmark during preparing .* within 0\.01 s"):
        word_of_boss(worker, "preparing", 0.01)
    boss.close()
    with pytest.raises(PeerError, match="it has ended"):
        word_of_boss(worker, "preparing", 10.0)
    worker.close()
