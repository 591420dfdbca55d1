"""Loading: from positions that were dealt to batches.

A stage loads only if it needs what the samples hold.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from polyrhythm.run.data.errors import DataError
from polyrhythm.run.data.order import Order
from polyrhythm.run.data.reading import Bookmark, reader_of
from polyrhythm.sync.dispenser import Ranges

Collate = Callable[[list[Any]], Sequence[Any]]


class Batch(NamedTuple):
    """What a stage does not need is None."""

    ranges: Ranges
    inputs: Any
    target: Any


class Samples:
    """Of one process. Any thread may call it; one at a time reads."""

    def __init__(
        self,
        dataset: Any,
        order: Order | None,
        collate_fn: Collate | None = None,
        *,
        needs_inputs: bool = True,
        needs_target: bool = True,
    ) -> None:
        """`collate_fn` makes (inputs, target) of a list of items; by default as torch does.

        The first stage of a pipeline needs inputs, the last one targets.
        """
        self._reader = reader_of(dataset, order)
        self._collate: Collate = default_collate if collate_fn is None else collate_fn
        self._needs = (needs_inputs, needs_target)
        self._reading = threading.Lock()

    def load(self, ranges: Ranges) -> Batch:
        """At once, in the calling thread."""
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
        return self._reader.bookmark(position)

    def go_on(self, place: Bookmark) -> None:
        """A dataset with its own order is read from there; it is not asked for what lies before."""
        with self._reading:
            self._reader.go_on(place)


def _text(ranges: Ranges) -> str:
    return ", ".join(f"{start} to {end - 1}" for start, end in ranges)
