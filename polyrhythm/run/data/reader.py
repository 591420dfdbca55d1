"""Readers: the items at positions of a map-style or an iterable dataset.

A map-style dataset returns any sample by its id, and an order maps positions to ids. An iterable
dataset has no ids: a sample is its position, and the dataset must have `state_dict` and
`load_state_dict`. It is read forward, also over samples of other pipelines, which costs as much as
using them; to go back, the reader loads the nearest earlier state. An iterable dataset should
therefore be cheap to read, or skip efficiently by itself. IterableDataset of Hugging Face datasets
and torchdata's StatefulDataLoader(batch_size=None) have such a state.

A dataset must return the same item each time, in any process that has seeded the global random
generators equally: several stages of a pipeline read the same samples.
"""

import base64
from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from polyrhythm.run.checkpoint.encoding import decode_state, encode_state
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.data.order import DataError, SampleOrder
from polyrhythm.sync.dispatch import Ranges

_MAX_STATES = 64  # remembered, besides the first one


class DatasetState(NamedTuple):
    """The `state_dict` of an iterable dataset before it returns the sample at `position`.

    Encoded, which copies it: states hold tuples (of random generators), tensors and arrays.
    """

    position: int
    encoded: bytes

    @property
    def state(self) -> Any:
        """A copy of the state_dict."""
        return decode_state(self.encoded, "the state of the dataset")

    def as_json(self) -> list[Any]:
        return [self.position, base64.b64encode(self.encoded).decode()]

    @classmethod
    def from_json(cls, table: list[Any]) -> "DatasetState":
        position, encoded = table
        return cls(position, base64.b64decode(encoded))


def make_order(dataset: Any, *, seed: int = 0, shuffle: bool = True) -> SampleOrder | None:
    """Make the order of a map-style dataset; None for an iterable one, which has its own."""
    return SampleOrder(len(dataset), seed, shuffle) if _has_length(dataset) else None


def make_reader(dataset: Any, order: SampleOrder | None) -> "IndexedReader | StreamReader":
    """Make the reader of a dataset; raises DataError if the dataset cannot be used."""
    if _has_length(dataset):
        if order is None or order.num_samples != len(dataset):
            what = "no order" if order is None else f"an order of {order.num_samples:,} samples"
            raise DataError(
                f"{what} for a dataset of {len(dataset):,}",
                expected="an order of all samples",
                fix="use make_order(dataset, seed=...)",
            )
        return IndexedReader(dataset, order)
    if hasattr(dataset, "batch_sampler") and hasattr(dataset, "collate_fn"):
        _check_dataloader(dataset)
    if not all(hasattr(dataset, name) for name in ("__iter__", "state_dict", "load_state_dict")):
        raise DataError(
            f"a dataset of type {type(dataset).__name__}, which has neither a length nor a state",
            expected="__len__ and __getitem__; or __iter__, state_dict and load_state_dict, so "
            "that it can resume",
            fix="define __len__, or make it resumable",
        )
    if order is not None:
        raise DataError(
            f"an order for a {type(dataset).__name__}, which has its own",
            expected="no order: a sample is its position",
            fix="use make_order(dataset), and let the dataset shuffle",
        )
    return StreamReader(dataset)


def _check_dataloader(loader: Any) -> None:
    """Refuse a DataLoader, except for torchdata's stateful one that returns single samples."""
    if loader.batch_sampler is not None or not hasattr(loader, "state_dict"):
        raise DataError(
            f"a {type(loader).__name__} with batch_size={loader.batch_size} as the dataset",
            expected="a dataset of samples: batches are divided among pipelines and micro-batches",
            fix="pass its dataset, Trainer(..., batch_size=..., collate_fn=..., "
            "data=DataConfig(num_workers=...)); or a StatefulDataLoader with batch_size=None",
        )


class IndexedReader:
    """Reads a map-style dataset; it has no state."""

    def __init__(self, dataset: Any, order: SampleOrder) -> None:
        self._dataset, self._order = dataset, order

    def read(self, ranges: Ranges) -> Iterator[Any]:
        read_many = getattr(self._dataset, "__getitems__", None)  # as torch's DataLoader does
        for start, end in ranges:
            samples = self._order.samples(start, end)
            if callable(read_many):
                yield from self._read_many(read_many, samples, start)
                continue
            for position, sample in enumerate(samples, start):
                try:
                    item = self._dataset[sample]
                except Exception as error:
                    raise _sample_error(
                        f"sample {sample}, at position {position}", error
                    ) from error
                yield item

    def _read_many(
        self, read_many: Callable[[list[int]], Any], samples: list[int], start: int
    ) -> list[Any]:
        what = f"samples {samples}, at positions {start} to {start + len(samples) - 1}"
        try:
            items = list(read_many(list(samples)))
        except Exception as error:
            raise _sample_error(what, error) from error
        if len(items) != len(samples):
            raise DataError(
                f"{what}: __getitems__ of the {type(self._dataset).__name__} returned {len(items)}",
                expected=f"a list of {len(samples)} items, in this order",
                fix="correct or remove __getitems__: without it, items are read one by one",
            )
        return items

    def state_at(self, position: int) -> None:
        return None

    def resume_from(self, state: DatasetState) -> None:
        """Do nothing: any sample can be read without a state."""


class StreamReader:
    """Reads an iterable dataset forward, and from remembered states."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._states = [self._capture_state(0)]
        self._items: Iterator[Any] = iter(())
        self._position = -1  # of the next item; -1 if unknown

    def read(self, ranges: Ranges) -> Iterator[Any]:
        for start, end in ranges:
            self._seek(start)
            for _ in range(start, end):
                yield self._next()

    def seek(self, ranges: Ranges) -> DatasetState:
        """Skip to the first position; how many samples that skips depends on the process.

        Returns the newest state up to there, mostly that of the position.
        """
        self._seek(ranges[0][0])
        return self.state_at(ranges[0][0])

    def state_at(self, position: int) -> DatasetState:
        """Return a state from which the position can be reached."""
        before = [state for state in self._states if state.position <= position]
        if not before:
            raise DataError(
                f"position {position} of a {type(self._dataset).__name__} that resumed from "
                f"position {self._states[0].position}",
                expected="a position from there on",
                fix="resume from the state of the first unused position",
            )
        return before[-1]

    def resume_from(self, state: DatasetState) -> None:
        """Read from this state on; earlier positions cannot be read."""
        self._states, self._position = [state], -1

    def _seek(self, position: int) -> None:
        state = self.state_at(position)
        if not state.position <= self._position <= position:
            self._dataset.load_state_dict(state.state)
            self._items, self._position = iter(self._dataset), state.position
        while self._position < position:
            self._next()
        if state.position < position:
            self.remember(self._capture_state(position))

    def remember(self, state: DatasetState) -> None:
        """Add a state, which another process may have captured."""
        if all(known.position != state.position for known in self._states):
            first, *others = sorted([*self._states, state], key=lambda state: state.position)
            self._states = [first, *others[-_MAX_STATES:]]

    def _capture_state(self, position: int) -> DatasetState:
        what = f"the state of a {type(self._dataset).__name__}"
        try:
            return DatasetState(position, encode_state(self._dataset.state_dict(), what))
        except CheckpointError as error:
            raise DataError(error.wrong, expected=error.expected, fix=error.fix) from None
        except Exception as error:  # the user's dataset may raise anything
            raise DataError(
                f"{what} at position {position}: {type(error).__name__}: {error}",
                expected="a state_dict() that returns",
                fix="correct state_dict() of the dataset",
            ) from error

    def _next(self) -> Any:
        position, self._position = self._position, -1
        try:
            item = next(self._items)
        except StopIteration:
            raise DataError(
                f"a {type(self._dataset).__name__} that ended after {position:,} samples",
                expected="as many samples as training uses",
                fix="train for fewer steps, or make it start again at its end",
            ) from None
        except Exception as error:
            raise _sample_error(f"sample {position}", error) from error
        self._position = position + 1
        return item


def _sample_error(what: str, error: Exception) -> DataError:
    return DataError(
        f"{what}: {type(error).__name__}: {error}",
        expected="a dataset that returns each of its samples",
        fix="load that sample alone to see why it fails",
    )


def _has_length(dataset: Any) -> bool:
    """Return whether a dataset is map-style."""
    is_stream = isinstance(dataset, IterableDataset)  # it inherits a __getitem__ that fails
    return isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and not is_stream
