"""Readers: the items at positions, from a dataset that can be asked for any, or only for the next.

A dataset with a length gives any sample by its id, and an order says which id comes when. One that
only gives the next has no ids: a sample is its position, and the dataset must be able to say where
it is, and to go on from there. It is read forward, also over what others take, which costs as much
as if it was used; to go back it goes on from the nearest place that was kept. So a stream should be
cheap to read, or know how to skip by itself.

A dataset must give the same item each time it is asked, in any process: the first stage of a
pipeline reads the inputs, and the last one the targets.
"""

import base64
import pickle
from collections.abc import Iterator, Sized
from typing import Any, NamedTuple, Protocol

from torch.utils.data import IterableDataset

from polyrhythm.run.data.errors import DataError
from polyrhythm.run.data.order import SampleOrder
from polyrhythm.sync.dispatch import Ranges

_MAX_STATES = 64  # places to go back to, besides the first one


class DatasetState(NamedTuple):
    """Where to go on with a dataset: its `state_dict` before it gives the sample at `position`.

    Pickled, which copies it: states hold tuples (of random generators), tensors and arrays.
    """

    position: int
    packed: bytes

    @property
    def state(self) -> Any:
        """A copy of it."""
        return pickle.loads(self.packed)

    def as_json(self) -> list[Any]:
        return [self.position, base64.b64encode(self.packed).decode()]

    @classmethod
    def from_json(cls, kept: list[Any]) -> "DatasetState":
        position, packed = kept
        return cls(position, base64.b64decode(packed))


class Reader(Protocol):
    def read(self, ranges: Ranges) -> Iterator[Any]:
        """The items at these positions, in order."""

    def state_at(self, position: int) -> DatasetState | None:
        """From where that position can be reached; None if from anywhere."""

    def resume_from(self, state: DatasetState) -> None:
        """Read from there on, and nothing before."""


def make_order(dataset: Any, *, seed: int = 0, shuffle: bool = True) -> SampleOrder | None:
    """The order of a dataset's samples; None if it has one of its own."""
    return SampleOrder(len(dataset), seed, shuffle) if _has_length(dataset) else None


def make_reader(dataset: Any, order: SampleOrder | None) -> Reader:
    """Refuses what cannot be dealt out."""
    if _has_length(dataset):
        if order is None or order.num_samples != len(dataset):
            what = "no order" if order is None else f"an order of {order.num_samples:,} samples"
            raise DataError(
                f"{what} for a dataset of {len(dataset):,}",
                expected="an order of all samples",
                fix="use order_of(dataset, seed=...)",
            )
        return _IndexedReader(dataset, order)
    if not all(hasattr(dataset, name) for name in ("__iter__", "state_dict", "load_state_dict")):
        raise DataError(
            f"a dataset of type {type(dataset).__name__}, which has neither a length nor a state",
            expected="__len__ and __getitem__; or __iter__, state_dict and load_state_dict, so "
            "that it can go on where it was",
            fix="give it a length, or make it resumable",
        )
    if order is not None:
        raise DataError(
            f"an order for a {type(dataset).__name__}, which has its own",
            expected="no order: each sample is its position",
            fix="use order_of(dataset), and let the dataset shuffle",
        )
    return _StreamReader(dataset)


class _IndexedReader:
    def __init__(self, dataset: Any, order: SampleOrder) -> None:
        self._dataset, self._order = dataset, order

    def read(self, ranges: Ranges) -> Iterator[Any]:
        for start, end in ranges:
            for position, sample in enumerate(self._order.ids(start, end).tolist(), start):
                try:
                    item = self._dataset[sample]
                except Exception as error:
                    raise _sample_error(
                        f"sample {sample}, at position {position}", error
                    ) from error
                yield item

    def state_at(self, position: int) -> None:
        return None

    def resume_from(self, state: DatasetState) -> None:
        """It gives any sample, from wherever others went on."""


class _StreamReader:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._states = [self._capture_state(0)]
        self._items: Iterator[Any] = iter(())
        self._position = -1  # of the next item; -1 if that is not known

    def read(self, ranges: Ranges) -> Iterator[Any]:
        for start, end in ranges:
            self._seek(start)
            for _ in range(start, end):
                yield self._next()

    def state_at(self, position: int) -> DatasetState:
        before = [state for state in self._states if state.position <= position]
        if not before:
            raise DataError(
                f"position {position} of a {type(self._dataset).__name__} that goes on from "
                f"{self._states[0].position}",
                expected="no position before the place where it began",
                fix="begin with the bookmark of the first position that was not used",
            )
        return before[-1]

    def resume_from(self, state: DatasetState) -> None:
        self._states, self._position = [state], -1

    def _seek(self, position: int) -> None:
        state = self.state_at(position)
        if not state.position <= self._position <= position:
            self._dataset.load_state_dict(state.state)
            self._items, self._position = iter(self._dataset), state.position
        while self._position < position:
            self._next()
        if state.position < position:
            self._remember(self._capture_state(position))

    def _capture_state(self, position: int) -> DatasetState:
        try:
            return DatasetState(position, pickle.dumps(self._dataset.state_dict()))
        except Exception as error:
            raise DataError(
                f"the state of a {type(self._dataset).__name__} cannot be kept: "
                f"{type(error).__name__}: {error}",
                expected="a state_dict() of numbers, texts, tensors, and lists of them",
                fix="leave out of it what is open: files, locks, generators",
            ) from error

    def _remember(self, state: DatasetState) -> None:
        first, *others = sorted([*self._states, state], key=lambda state: state.position)
        self._states = [first, *others[-_MAX_STATES:]]

    def _next(self) -> Any:
        position, self._position = self._position, -1
        try:
            item = next(self._items)
        except StopIteration:
            raise DataError(
                f"a {type(self._dataset).__name__} that ended after {position:,} samples",
                expected="as many samples as training takes",
                fix="train for fewer steps, or make it begin again when it ends",
            ) from None
        except Exception as error:
            raise _sample_error(f"sample {position}", error) from error
        self._position = position + 1
        return item


def _sample_error(what: str, error: Exception) -> DataError:
    return DataError(
        f"{what}: {type(error).__name__}: {error}",
        expected="a dataset that gives each of its samples",
        fix="load that one by itself to see why it fails",
    )


def _has_length(dataset: Any) -> bool:
    """Whether it gives any sample by its number."""
    is_stream = isinstance(dataset, IterableDataset)  # which inherits a __getitem__ that fails
    return isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and not is_stream
