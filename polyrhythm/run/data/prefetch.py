"""Prefetch: load the next batch in a thread while training uses this one.

    prefetcher = Prefetcher(samples.load)
    batch = prefetcher.load(ranges, next_ranges)  # the positions now, and probably next

The next positions are a prediction: shares may change, training may end early. If other positions
are requested, they are loaded synchronously, and the prefetched batch is dropped with its error, if
any. An error of a prefetched batch is raised when the batch is requested.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from polyrhythm.run.coordinator.client import SampleFuture
from polyrhythm.run.data.loader import LoadedBatch
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.types import Seconds

PredictedRanges = SampleFuture[Ranges] | Ranges  # positions, or a future of them; () for none
CLOSE_TIMEOUT: Seconds = 5.0  # for the sample that the thread is loading


def resolved_ranges(predicted: PredictedRanges) -> Ranges:
    """Return the positions; () if they are not known yet."""
    if not isinstance(predicted, SampleFuture):
        return predicted
    is_resolved = predicted.is_done and predicted.future.exception() is None
    return predicted.future.result() if is_resolved else ()


class _PrefetchedBatch(NamedTuple):
    predicted: PredictedRanges
    batch: "Future[LoadedBatch]"


class Prefetcher:
    """Prefetches batches in one process; only the training thread calls `load`."""

    def __init__(self, load: Callable[[Ranges], LoadedBatch]) -> None:
        self._load = load
        self._pending: _PrefetchedBatch | None = None
        self._queue: SimpleQueue[_PrefetchedBatch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def load(self, ranges: Ranges, next_ranges: PredictedRanges = ()) -> LoadedBatch:
        """Return the batch at `ranges`, and start to prefetch `next_ranges`."""
        pending, self._pending = self._pending, None
        if pending is not None and resolved_ranges(pending.predicted) == ranges:
            batch = pending.batch.result()
        else:
            if pending is not None:
                pending.batch.cancel()
            batch = self._load(ranges)
        if next_ranges:
            self._start(next_ranges)
        return batch

    def close(self) -> None:
        """Drop the prefetched batch, and end the thread."""
        if self._pending is not None:
            self._pending.batch.cancel()
        self._pending = None
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_TIMEOUT)
            self._thread = None

    def _start(self, predicted: PredictedRanges) -> None:
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
                continue  # no samples are left, or the batch was dropped
            try:
                pending.batch.set_result(self._load(ranges))
            except BaseException as error:  # `load` raises it
                pending.batch.set_exception(error)
