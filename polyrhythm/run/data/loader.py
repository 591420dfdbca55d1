"""Load batches: from ranges of positions to collated samples.

A stage loads only if it needs inputs or targets.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from polyrhythm.run.data.order import DataError, SampleOrder
from polyrhythm.run.data.reader import DatasetState, make_reader
from polyrhythm.sync.dispatch import Ranges

Collate = Callable[[list[Any]], Sequence[Any]]


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
            raise DataError(
                f"{len(items)} samples at positions {_text(ranges)} cannot be collated: "
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


def _text(ranges: Ranges) -> str:
    return ", ".join(f"{start} to {end - 1}" for start, end in ranges)
