"""The next batch is loaded while this one is trained on, and a wrong guess does no harm."""

import threading
import time
from collections.abc import Iterator

import pytest

from polyrhythm.errors import PeerError
from polyrhythm.run.coordinator.deals import Answer, Deals
from polyrhythm.run.data.errors import DataError
from polyrhythm.run.data.loading import Batch
from polyrhythm.run.data.prefetch import Prefetch, known
from polyrhythm.sync.dispenser import Ranges
from polyrhythm.sync.messages import Dealt, Take
from polyrhythm.types import Worker

ME = Worker(0, 0)
FIRST, SECOND, THIRD = ((0, 2),), ((2, 4),), ((4, 6),)


class Loader:
    """Notes what was loaded, and by which thread; waits where it is told to."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Ranges, str]] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.fails: set[Ranges] = set()
        self.began = threading.Event()

    def __call__(self, ranges: Ranges) -> Batch:
        self.began.set()
        assert self.may_load.wait(20)
        self.loaded.append((ranges, threading.current_thread().name))
        if ranges in self.fails:
            raise DataError(f"{ranges} is torn", expected="samples", fix="mend them")
        return Batch(ranges, ranges, None)


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def prefetch(loader: Loader) -> Iterator[Prefetch]:
    made = Prefetch(loader)
    yield made
    loader.may_load.set()
    made.close()


def asked(deals: Deals, number: int, timeout: float = 20.0) -> Answer[Ranges]:
    return deals.ask(Take(ME, number, 2), timeout)


def test_what_comes_next_is_loaded_meanwhile_and_once(loader: Loader, prefetch: Prefetch) -> None:
    assert prefetch.load(FIRST, SECOND).inputs == FIRST
    for ranges, then in ((SECOND, THIRD), (THIRD, ())):
        assert prefetch.load(ranges, then).inputs == ranges
    assert loader.loaded == [(FIRST, "MainThread"), (SECOND, "prefetch"), (THIRD, "prefetch")]


def test_training_does_not_wait_for_what_comes_next(loader: Loader, prefetch: Prefetch) -> None:
    deals = Deals()
    prefetch.load(FIRST, asked(deals, 0))
    loader.began.clear()
    loader.may_load.clear()
    deals.hear(Dealt(ME, 0, None, SECOND))  # from now on it can be loaded, and is not
    assert loader.began.wait(20)  # though nobody has asked for it
    assert loader.loaded == [(FIRST, "MainThread")]
    loader.may_load.set()
    assert prefetch.load(SECOND).inputs == SECOND
    assert len(loader.loaded) == 2


def test_a_wrong_guess_is_dropped_with_its_errors(loader: Loader, prefetch: Prefetch) -> None:
    loader.fails = {SECOND}
    prefetch.load(FIRST, SECOND)
    assert prefetch.load(THIRD, FIRST).inputs == THIRD
    assert prefetch.load(FIRST).inputs == FIRST
    assert loader.loaded[-1] == (FIRST, "prefetch")
    with pytest.raises(DataError, match="is torn"):  # as it was asked for by somebody
        prefetch.load(SECOND, THIRD)


def test_what_goes_wrong_is_raised_where_its_batch_is_asked_for(
    loader: Loader, prefetch: Prefetch
) -> None:
    loader.fails = {SECOND}
    assert prefetch.load(FIRST, SECOND).inputs == FIRST
    with pytest.raises(DataError, match="is torn"):
        prefetch.load(SECOND, THIRD)
    assert prefetch.load(THIRD).inputs == THIRD  # and it goes on


def test_positions_that_never_come_are_no_guess(loader: Loader, prefetch: Prefetch) -> None:
    deals = Deals()
    empty, lost = asked(deals, 0), asked(deals, 1)
    prefetch.load(FIRST, empty)
    deals.hear(Dealt(ME, 0, None, ()))
    assert prefetch.load(SECOND, lost).inputs == SECOND
    deals.fail(PeerError("the coordinator", action="training", waited=1.0, cause="gone"))
    assert prefetch.load(THIRD).inputs == THIRD
    assert {thread for _, thread in loader.loaded} == {"MainThread"}
    assert known(empty) == known(lost) == known(Deals().ask(Take(ME, 0, 2), 1.0)) == ()


def test_closing_ends_the_thread_though_positions_are_still_to_come(prefetch: Prefetch) -> None:
    before = threading.active_count()
    prefetch.load(FIRST, SECOND)
    prefetch.load(SECOND, asked(Deals(), 0, 600.0))
    began = time.monotonic()
    prefetch.close()
    prefetch.close()
    assert time.monotonic() - began < 4
    assert threading.active_count() == before
    assert prefetch.load(FIRST, SECOND).inputs == FIRST  # another fit may begin
    assert prefetch.load(SECOND).inputs == SECOND
