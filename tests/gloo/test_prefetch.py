"""The next batch is loaded during training, and a wrong prediction does no harm."""

import threading
from collections.abc import Iterator

import pytest

from polyrhythm.errors import PeerError
from polyrhythm.run.coordinator.client import SampleFuture, SampleRequests
from polyrhythm.run.data.loader import LoadedBatch, Prefetcher, resolved_ranges
from polyrhythm.run.data.order import DataError
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.sync.protocol import Acquire, Acquired
from polyrhythm.types import Worker

WORKER = Worker(0, 0)
FIRST, SECOND, THIRD = ((0, 2),), ((2, 4),), ((4, 6),)


class Loader:
    """Records what is loaded and by which thread; `may_load` blocks it."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Ranges, str]] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.fails: set[Ranges] = set()
        self.started = threading.Event()

    def __call__(self, ranges: Ranges) -> LoadedBatch:
        self.started.set()
        assert self.may_load.wait(20)
        self.loaded.append((ranges, threading.current_thread().name))
        if ranges in self.fails:
            raise DataError(f"{ranges} is torn", expected="samples", fix="repair them")
        return LoadedBatch(ranges, ranges)  # the ranges stand for micro-batches


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def prefetch(loader: Loader) -> Iterator[Prefetcher]:
    made = Prefetcher(loader)
    yield made
    loader.may_load.set()
    made.close()


def pending_request(
    requests: SampleRequests, number: int, timeout: float = 20.0
) -> SampleFuture[Ranges]:
    return requests.submit(Acquire(WORKER, number, 2), timeout)


def test_predicted_batch_is_prefetched_once(loader: Loader, prefetch: Prefetcher) -> None:
    assert prefetch.load(FIRST, SECOND).microbatches == FIRST
    for ranges, next_ranges in ((SECOND, THIRD), (THIRD, ())):
        assert prefetch.load(ranges, next_ranges).microbatches == ranges
        prefetch.start()
    assert loader.loaded == [(FIRST, "MainThread"), (SECOND, "prefetch"), (THIRD, "prefetch")]


def test_batch_that_is_read_quickly_waits_for_the_start(
    loader: Loader, prefetch: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrhythm.run.data.loader._MAX_DELAYED", 1e3)  # any machine is quick
    prefetch.load(FIRST, SECOND)  # how long the next takes is not known yet: read at once
    prefetch.wait()
    prefetch.load(SECOND, THIRD)
    prefetch.wait()
    assert prefetch.load(THIRD, FIRST).microbatches == THIRD
    names = [name for _, name in loader.loaded]
    assert names == ["MainThread", "prefetch", "MainThread"]  # `start` was not called
    prefetch.start()
    assert prefetch.load(FIRST).microbatches == FIRST
    assert loader.loaded[3] == (FIRST, "prefetch")


@pytest.mark.parametrize("max_delayed", [0.0, 1e3])
def test_batch_that_takes_long_or_was_late_is_prefetched_at_once(
    loader: Loader, prefetch: Prefetcher, monkeypatch: pytest.MonkeyPatch, max_delayed: float
) -> None:
    monkeypatch.setattr("polyrhythm.run.data.loader._MAX_DELAYED", max_delayed)
    prefetch.load(FIRST, SECOND)
    prefetch.wait()
    if max_delayed:
        loader.may_load.clear()
        prefetch.load(SECOND, THIRD)
        prefetch.start()
        threading.Timer(0.1, loader.may_load.set).start()
    else:
        prefetch.load(SECOND, THIRD)
        prefetch.wait()
    prefetch.load(THIRD, FIRST)  # which may wait for it
    prefetch.load(FIRST)
    assert loader.loaded[3] == (FIRST, "prefetch")


def test_load_does_not_wait_for_the_prefetch(loader: Loader, prefetch: Prefetcher) -> None:
    requests = SampleRequests()
    prefetch.load(FIRST, pending_request(requests, 0))
    loader.started.clear()
    loader.may_load.clear()
    requests.on_receive(Acquired(WORKER, 0, None, SECOND))  # the prefetch starts, and blocks
    assert loader.started.wait(20)  # before `load` is called for it
    assert loader.loaded == [(FIRST, "MainThread")]
    loader.may_load.set()
    assert prefetch.load(SECOND).microbatches == SECOND
    assert len(loader.loaded) == 2


def test_wrong_prediction_is_discarded_with_its_error(loader: Loader, prefetch: Prefetcher) -> None:
    loader.fails = {SECOND}
    prefetch.load(FIRST, SECOND)
    assert prefetch.load(THIRD, FIRST).microbatches == THIRD
    assert prefetch.load(FIRST).microbatches == FIRST
    assert loader.loaded[-1] == (FIRST, "prefetch")
    with pytest.raises(DataError, match="is torn"):  # now it is requested
        prefetch.load(SECOND, THIRD)


def test_prefetch_error_is_raised_when_its_batch_is_loaded(
    loader: Loader, prefetch: Prefetcher
) -> None:
    loader.fails = {SECOND}
    assert prefetch.load(FIRST, SECOND).microbatches == FIRST
    with pytest.raises(DataError, match="is torn"):
        prefetch.load(SECOND, THIRD)
    assert prefetch.load(THIRD).microbatches == THIRD  # still usable


def test_unresolved_positions_are_not_prefetched(loader: Loader, prefetch: Prefetcher) -> None:
    requests = SampleRequests()
    empty, lost = pending_request(requests, 0), pending_request(requests, 1)
    prefetch.load(FIRST, empty)
    requests.on_receive(Acquired(WORKER, 0, None, ()))
    assert prefetch.load(SECOND, lost).microbatches == SECOND
    requests.fail(PeerError("the coordinator", action="training", waited=1.0, cause="gone"))
    assert prefetch.load(THIRD).microbatches == THIRD
    assert {thread for _, thread in loader.loaded} == {"MainThread"}
    assert (
        resolved_ranges(empty)
        == resolved_ranges(lost)
        == resolved_ranges(SampleRequests().submit(Acquire(WORKER, 0, 2), 1.0))
        == ()
    )


def test_close_stops_the_thread_while_positions_are_pending(prefetch: Prefetcher) -> None:
    prefetch.load(FIRST, SECOND)
    prefetch.load(SECOND, pending_request(SampleRequests(), 0, 600.0))
    prefetch.close()
    prefetch.close()
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
    assert prefetch.load(FIRST, SECOND).microbatches == FIRST  # another fit may start
    assert prefetch.load(SECOND).microbatches == SECOND
