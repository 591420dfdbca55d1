"""A mean that comes bucket by bucket, into a buffer of its own, while training goes on.

One thread fills it from the front, another one waits for as much of it as it needs. Weights are
written from here alone, so they are never those of an average that has not been committed.
"""

import threading
import time
from collections.abc import Iterable

from torch import Tensor

from polyrhythm.errors import PeerError
from polyrhythm.types import Seconds


class StreamingBuffer:
    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._num_filled = 0  # so many numbers, from the front
        self._is_used = False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def wait(self, num: int, timeout: Seconds) -> None:
        """Until the first `num` numbers are there; raises why they will not be."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._num_filled >= num or self._error, timeout)
            if self._num_filled < num:
                raise self._error or PeerError(
                    "another worker",
                    action="gathering an average",
                    waited=time.monotonic() - began,
                    cause="it is alive, but has not sent its part",
                )
            self._is_used = True

    def mark_filled(self, num: int) -> None:
        """The first `num` numbers are there."""
        with self._changed:
            self._num_filled = num
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """No more will come."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def keep_own(self, own: Tensor, missing: Iterable[slice]) -> None:
        """Nobody gives what is missing: it is as it was here before the average.

        All of it is, as if there had been none, unless training uses some already.
        """
        with self._changed:
            for shard in missing if self._is_used else [slice(None)]:
                self.value[shard] = own[shard]
        self.mark_filled(self.value.numel())
