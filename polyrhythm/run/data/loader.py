"""Load batches, from ranges of positions to collated samples, the next one during training.

    samples = SampleLoader(dataset, order)  # reads only the inputs or targets that a stage needs
    prefetcher = Prefetcher(samples.load)
    batch = prefetcher.load(ranges, next_ranges)  # the positions now, and probably next

The next positions are a prediction: shares may change, training may end early. If other positions
are requested, they are loaded synchronously, and the prefetched batch is dropped with its error, if
any. An error of a prefetched batch is raised when the batch is requested.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from polyrhythm.run.coordinator.client import SampleFuture
from polyrhythm.run.data.order import DataError, SampleOrder
from polyrhythm.run.data.reader import DatasetState, make_reader
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.types import Seconds

Collate = Callable[[list[Any]], Sequence[Any]]
PredictedRanges = SampleFuture[Ranges] | Ranges  # positions, or a future of them; () for none
CLOSE_TIMEOUT: Seconds = 5.0  # for the sample that the thread is loading


class LoadedBatch(NamedTuple):
    """Collated samples; inputs or target that the stage does not need are None."""

    ranges: Ranges
    inputs: Any
    target: Any


class SampleLoader:
    """Loads batches in one process. Any thread may call it; one at a time reads."""

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder | None,
        collate_fn: Collate | None = None,
        *,
        needs_inputs: bool = True,
        needs_target: bool = True,
    ) -> None:
        """`collate_fn` turns a list of items into (inputs, target); the default is torch's.

        The first stage of a pipeline needs inputs, the last one targets.
        """
        self.num_samples = None if order is None else order.num_samples  # None: iterable
        self._reader = make_reader(dataset, order)
        self._collate: Collate = default_collate if collate_fn is None else collate_fn
        self._needs = (needs_inputs, needs_target)
        self._read_lock = threading.Lock()

    def load(self, ranges: Ranges) -> LoadedBatch:
        """Load a batch synchronously, in the calling thread."""
        if not any(self._needs):
            return LoadedBatch(ranges, None, None)
        with self._read_lock:
            items = list(self._reader.read(ranges))
        try:
            inputs, target = self._collate(items)
        except Exception as error:
            positions = ", ".join(f"{start} to {end - 1}" for start, end in ranges)
            raise DataError(
                f"{len(items)} samples at positions {positions} cannot be collated: "
                f"{type(error).__name__}: {error}",
                expected="a list of items that collates to (inputs, target)",
                fix="pass a collate_fn that returns these two",
            ) from error
        return LoadedBatch(
            ranges, inputs if self._needs[0] else None, target if self._needs[1] else None
        )

    def state_at(self, position: int) -> DatasetState | None:
        """Return the state from which an iterable dataset reaches a position; else None."""
        return self._reader.state_at(position)

    def resume_from(self, state: DatasetState) -> None:
        """Read an iterable dataset from this state on; earlier positions cannot be read."""
        with self._read_lock:
            self._reader.resume_from(state)


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
