"""Prefetch: the next batch is loaded while this one is trained on.

    prefetch = Prefetch(samples.load)
    batch = prefetch.load(ranges, then)  # which positions now, and which are likely to come next

A thread loads what comes next, as soon as it is known. That is a guess: shares may change, training
may end early. Who asks for other positions gets those, loaded at once, and the guess is dropped
with whatever went wrong in it. What goes wrong otherwise is raised where its batch is asked for.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from polyrhythm.run.coordinator.sample_requests import SampleFuture
from polyrhythm.run.data.loader import LoadedBatch
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.types import Seconds

PredictedRanges = SampleFuture[Ranges] | Ranges  # positions, or the answer that will tell; none: ()
CLOSE_TIMEOUT: Seconds = 5.0  # for a sample that is being loaded


def resolved_ranges(predicted: PredictedRanges) -> Ranges:
    """The positions, if they can be told by now."""
    if not isinstance(predicted, SampleFuture):
        return predicted
    is_resolved = predicted.is_done and predicted.future.exception() is None
    return predicted.future.result() if is_resolved else ()


class _PrefetchedBatch(NamedTuple):
    predicted: PredictedRanges
    batch: "Future[LoadedBatch]"


class Prefetcher:
    """Of one process; `load` is called by one thread, that of training."""

    def __init__(self, load: Callable[[Ranges], LoadedBatch]) -> None:
        self._load = load
        self._pending: _PrefetchedBatch | None = None
        self._queue: SimpleQueue[_PrefetchedBatch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def load(self, ranges: Ranges, next_ranges: PredictedRanges = ()) -> LoadedBatch:
        """The batch at these positions; from now on the thread loads those that come `next_ranges`."""
        pending, self._pending = self._pending, None
        if pending is not None and resolved_ranges(pending.predicted) == ranges:
            batch = pending.batch.result()
        else:
            if pending is not None:
                pending.batch.cancel()
            batch = self._load(ranges)
        if next_ranges:
            self._begin(next_ranges)
        return batch

    def close(self) -> None:
        """Drop what is ahead, and end the thread."""
        if self._pending is not None:
            self._pending.batch.cancel()
        self._pending = None
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_TIMEOUT)
            self._thread = None

    def _begin(self, predicted: PredictedRanges) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()
        pending = self._pending = _PrefetchedBatch(predicted, Future())
        if isinstance(predicted, SampleFuture):
            predicted.future.add_done_callback(lambda _: self._queue.put(pending))
        else:
            self._queue.put(pending)

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            ranges = resolved_ranges(pending.predicted)
            if not ranges or not pending.batch.set_running_or_notify_cancel():
                continue  # nobody will ask for it
            try:
                pending.batch.set_result(self._load(ranges))
            except BaseException as error:  # for whoever asks for it
                pending.batch.set_exception(error)
