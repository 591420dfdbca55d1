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

from polyrhythm.run.coordinator.deals import Answer
from polyrhythm.run.data.loading import Batch
from polyrhythm.sync.dispenser import Ranges
from polyrhythm.types import Seconds

Guess = Answer[Ranges] | Ranges  # positions, or the answer that will tell; none: ()
CLOSING: Seconds = 5.0  # for a sample that is being loaded


def known(guess: Guess) -> Ranges:
    """The positions, if they can be told by now."""
    if not isinstance(guess, Answer):
        return guess
    is_told = guess.is_here and guess.future.exception() is None
    return guess.future.result() if is_told else ()


class _Ahead(NamedTuple):
    guess: Guess
    batch: "Future[Batch]"


class Prefetch:
    """Of one process; `load` is called by one thread, that of training."""

    def __init__(self, load: Callable[[Ranges], Batch]) -> None:
        self._load = load
        self._ahead: _Ahead | None = None
        self._queue: SimpleQueue[_Ahead | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def load(self, ranges: Ranges, then: Guess = ()) -> Batch:
        """The batch at these positions; from now on the thread loads those that come `then`."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and known(ahead.guess) == ranges:
            batch = ahead.batch.result()
        else:
            if ahead is not None:
                ahead.batch.cancel()
            batch = self._load(ranges)
        if then:
            self._begin(then)
        return batch

    def close(self) -> None:
        """Drop what is ahead, and end the thread."""
        if self._ahead is not None:
            self._ahead.batch.cancel()
        self._ahead = None
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSING)
            self._thread = None

    def _begin(self, guess: Guess) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()
        ahead = self._ahead = _Ahead(guess, Future())
        if isinstance(guess, Answer):
            guess.future.add_done_callback(lambda _: self._queue.put(ahead))
        else:
            self._queue.put(ahead)

    def _run(self) -> None:
        while (ahead := self._queue.get()) is not None:
            ranges = known(ahead.guess)
            if not ranges or not ahead.batch.set_running_or_notify_cancel():
                continue  # nobody will ask for it
            try:
                ahead.batch.set_result(self._load(ranges))
            except BaseException as error:  # for whoever asks for it
                ahead.batch.set_exception(error)
