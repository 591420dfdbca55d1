"""A mean that arrives bucket by bucket, in a separate buffer, while training continues.

One thread fills the buffer from the front, another waits for as much of it as it needs. Weights are
written only from this buffer, so they never come from an average that is not committed.
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
        self._num_filled = 0  # elements, from the front
        self._is_used = False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def wait(self, num: int, timeout: Seconds) -> None:
        """Wait for the first `num` elements; raises the error of `fail`, or PeerError."""
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._num_filled >= num or self._error, timeout)
            if self._num_filled < num:
                raise self._error or PeerError(
                    "another worker",
                    action="all-gathering an average",
                    waited=time.monotonic() - start,
                    cause="it is alive but has not sent its shard",
                )
            self._is_used = True

    def mark_filled(self, num: int) -> None:
        """Mark the first `num` elements as valid."""
        with self._changed:
            self._num_filled = num
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Make current and later waits raise `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def keep_own(self, own: Tensor, missing: Iterable[slice]) -> None:
        """Fill `missing` with the numbers from before the average.

        If training has used none of the average yet, undo all of it instead.
        """
        with self._changed:
            for shard in missing if self._is_used else [slice(None)]:
                self.value[shard] = own[shard]
        self.mark_filled(self.value.numel())
