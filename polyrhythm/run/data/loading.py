"""Loading: from positions that were dealt to batches, one chunk ahead of training.

    samples = Samples(dataset, order_of(dataset, seed=1))
    samples.ahead(sync.take(0, 32))
    number = 0
    while batch := samples.take():
        samples.ahead(sync.take(number + 1, 32))
        ...  # train on batch.inputs and batch.target
        sync.used(number)
        number += 1

A thread loads what is ahead while training computes. What goes wrong there is raised where the
batch is taken. A stage loads only if it needs what the samples hold.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

from torch.utils.data import default_collate

from polyrhythm.run.coordinator.deals import Answer
from polyrhythm.run.data.errors import DataError
from polyrhythm.run.data.order import Order
from polyrhythm.run.data.reading import Bookmark, reader_of
from polyrhythm.sync.dispenser import Ranges
from polyrhythm.types import Seconds

CLOSING: Seconds = 5.0  # for a sample that is being loaded

Collate = Callable[[list[Any]], Sequence[Any]]


class Batch(NamedTuple):
    """What a stage does not need is None."""

    ranges: Ranges
    inputs: Any
    target: Any


class _Chunk(NamedTuple):
    """On its way: positions that will be known, and what is loaded of them."""

    dealt: Answer[Ranges] | Ranges
    loaded: "Future[Batch]"

    @property
    def ranges(self) -> Ranges:
        return self.dealt.wait() if isinstance(self.dealt, Answer) else self.dealt


class Samples:
    """Of one process. `ahead`, `take` and `load` are called by one thread, that of training."""

    def __init__(
        self,
        dataset: Any,
        order: Order | None,
        collate_fn: Collate | None = None,
        *,
        prefetch: int = 1,
        needs_inputs: bool = True,
        needs_target: bool = True,
        start: Bookmark | None = None,
    ) -> None:
        """`collate_fn` makes (inputs, target) of a list of items; by default as torch does.

        `prefetch`: how many chunks may be ahead, at the most. The first stage of a pipeline needs
        inputs, the last one targets. `start`: where a dataset with its own order goes on.
        """
        if prefetch < 1:
            raise DataError(f"prefetch={prefetch}", expected="1 chunk or more", fix="leave it out")
        self._reader = reader_of(dataset, order, start)
        self._collate: Collate = default_collate if collate_fn is None else collate_fn
        self._prefetch, self._needs = prefetch, (needs_inputs, needs_target)
        self._chunks: deque[_Chunk] = deque()
        self._queue: SimpleQueue[_Chunk | None] = SimpleQueue()
        self._reading = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def ahead(self, dealt: Answer[Ranges] | Ranges) -> None:
        """Load these positions next, as soon as they are known; returns at once."""
        if self._is_closed or len(self._chunks) == self._prefetch:
            raise DataError(
                f"a chunk ahead of {len(self._chunks)} others"
                + (", after close()" if self._is_closed else ""),
                expected=f"at most {self._prefetch} at a time, until close()",
                fix="take() one first, or use a larger prefetch",
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
            self._thread.start()
        chunk = _Chunk(dealt, Future())
        self._chunks.append(chunk)
        if isinstance(dealt, Answer):
            dealt.future.add_done_callback(lambda _: self._queue.put(chunk))
        else:
            self._queue.put(chunk)

    def take(self) -> Batch | None:
        """The next chunk that was put ahead, or None if it is empty; raises what went wrong."""
        if not self._chunks:
            raise DataError(
                "a batch of no chunk", expected="ahead() before take()", fix="call ahead() first"
            )
        chunk = self._chunks.popleft()
        return chunk.loaded.result() if chunk.ranges else None

    def load(self, ranges: Ranges) -> Batch:
        """At once, in this thread."""
        if not any(self._needs):
            return Batch(ranges, None, None)
        with self._reading:
            items = list(self._reader.read(ranges))
        try:
            inputs, target = self._collate(items)
        except Exception as error:
            raise DataError(
                f"{len(items)} samples at positions {_text(ranges)} make no batch: "
                f"{type(error).__name__}: {error}",
                expected="(inputs, target) of a list of items",
                fix="give a collate_fn that returns these two",
            ) from error
        return Batch(ranges, inputs if self._needs[0] else None, target if self._needs[1] else None)

    def bookmark(self, position: int) -> Bookmark | None:
        """For a checkpoint: where a dataset with its own order goes on to reach that position."""
        with self._reading:
            return self._reader.bookmark(position)

    def close(self) -> None:
        """Drop what is ahead, and end the thread."""
        self._is_closed = True
        self._chunks.clear()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSING)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while (chunk := self._queue.get()) is not None and not self._is_closed:
            try:
                if chunk.ranges:
                    chunk.loaded.set_result(self.load(chunk.ranges))
            except BaseException as error:  # for whoever takes it
                chunk.loaded.set_exception(error)


def _text(ranges: Ranges) -> str:
    return ", ".join(f"{start} to {end - 1}" for start, end in ranges)
