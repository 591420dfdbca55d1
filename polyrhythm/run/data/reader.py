"""Readers: the items at positions of a map-style or an iterable dataset.

A map-style dataset returns any sample by its id, and an order maps positions to ids. An iterable
dataset has no ids: a sample is its position, and the dataset must have `state_dict` and
`load_state_dict`, as IterableDataset of Hugging Face datasets and torchdata's
StatefulDataLoader(batch_size=None) have. It is read forward; to go back, the reader loads the
nearest earlier state.

Samples of other pipelines are skipped by reading them. To read less, an iterable dataset with
`num_shards` and `shard(num_shards, index)` is divided into shards, from which the samples of each
batch are taken in turns: a pipeline opens those that hold its own samples. The number of shards
follows from the dataset and the batch size, so that the order of samples depends neither on the
number of pipelines nor on the plan.
"""

import base64
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from polyrhythm.run.checkpoint.encoding import decode_state, encode_state
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.data.order import DataError, SampleOrder
from polyrhythm.sync.dispatch import Ranges

_MAX_STATES = 64  # remembered, besides the first one
_MIN_DISTANCE = 8  # samples between states of a shard: capturing one costs as much as some samples
_MAX_SHARDS = 16  # by default: each shard of a shuffled dataset has a buffer of its own


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


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Which shard holds the sample at a position: blocks of positions, in turns."""

    num_shards: int = 1
    block: int = 1  # consecutive positions in one shard
    num_sources: int = 1  # `num_shards` of the dataset

    @classmethod
    def of(cls, dataset: Any, batch_size: int, num_shards: int | None) -> "ShardLayout":
        """Choose the layout; raises DataError if the given `num_shards` is impossible."""
        num_sources = getattr(dataset, "num_shards", 1)
        if not (callable(getattr(dataset, "shard", None)) and isinstance(num_sources, int)):
            num_sources = 1
        most = min(num_sources, batch_size)
        if num_shards is None:
            most = min(most, _MAX_SHARDS)
            num_shards = next(n for n in range(most, 0, -1) if batch_size % n == 0)
        elif num_shards > most or batch_size % num_shards:
            raise DataError(
                f"stream_shards={num_shards} for a {type(dataset).__name__} of {num_sources} "
                f"shards and batch_size={batch_size}",
                expected="at most the dataset's num_shards, and a divisor of batch_size",
                fix="omit stream_shards, change batch_size, or divide the dataset into more files",
            )
        return cls(num_shards, batch_size // num_shards, num_sources)

    def num_before(self, shard: int, position: int) -> int:
        """Return the number of samples of a shard before a position."""
        num_cycles, rest = divmod(position, self.num_shards * self.block)
        return num_cycles * self.block + min(max(rest - shard * self.block, 0), self.block)

    def parts(self, ranges: Ranges) -> Iterator[tuple[int, int, int]]:
        """Divide positions into (shard, start, end), counted in the shard."""
        for start, end in ranges:
            if self.num_shards == 1:
                yield 0, start, end
                continue
            while start < end:
                number = start // self.block
                stop = min(end, (number + 1) * self.block)
                shard = number % self.num_shards
                yield shard, self.num_before(shard, start), self.num_before(shard, stop)
                start = stop


class StreamState(NamedTuple):
    """The states of all shards of an iterable dataset, from which a position can be reached."""

    layout: ShardLayout
    shards: tuple[DatasetState, ...]

    def as_json(self) -> list[Any]:
        layout = self.layout
        numbers = [layout.num_shards, layout.block, layout.num_sources]
        return [numbers, [state.as_json() for state in self.shards]]

    @classmethod
    def from_json(cls, table: list[Any]) -> "StreamState":
        numbers, states = table
        if isinstance(numbers, int):  # of a version without shards: the state of the dataset
            return cls(ShardLayout(), (DatasetState.from_json(table),))
        return cls(ShardLayout(*numbers), tuple(map(DatasetState.from_json, states)))


def make_reader(
    dataset: Any,
    order: SampleOrder | None,
    batch_size: int = 1,
    num_shards: int | None = None,
) -> "IndexedReader | ShardedReader":
    """Make the reader of a dataset; raises DataError if the dataset cannot be used.

    `batch_size` and `num_shards` give the shards of an iterable dataset; by default one.
    """
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
    if not _is_resumable(dataset):
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
    return ShardedReader(dataset, ShardLayout.of(dataset, batch_size, num_shards), num_shards)


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

    def resume_from(self, state: StreamState) -> None:
        """Do nothing: any sample can be read without a state."""


class ShardedReader:
    """Reads an iterable dataset; one that cannot be divided is the only shard."""

    def __init__(self, dataset: Any, layout: ShardLayout, num_shards: int | None = None) -> None:
        """`num_shards` is what the user has asked for."""
        self.layout = layout
        self.follows_all = False  # shards of other pipelines are skipped at once, not when needed
        self._dataset, self._num_asked = dataset, num_shards
        self._num_sources = layout.num_sources
        self._readers = dict[int, StreamReader]()  # by shard
        self._reader(0)  # refuses a dataset whose state cannot be saved

    def read(self, ranges: Ranges) -> Iterator[Any]:
        self._follow(ranges)
        for shard, start, end in self.layout.parts(ranges):
            yield from self._reader(shard).read(((start, end),))

    def seek(self, ranges: Ranges) -> list[tuple[int, DatasetState]]:
        """Skip to the first sample of each shard; how many that skips depends on the process.

        Returns the newest state of each shard up to there.
        """
        self._follow(ranges)
        firsts = dict[int, int]()
        for shard, start, _ in self.layout.parts(ranges):
            firsts.setdefault(shard, start)
        return [(shard, self._reader(shard).seek(start)) for shard, start in firsts.items()]

    def state_at(self, position: int) -> StreamState:
        """Return states from which the position, and later ones, can be reached."""
        layout = self.layout
        return StreamState(
            layout,
            tuple(
                self._reader(shard).state_at(layout.num_before(shard, position))
                for shard in range(layout.num_shards)
            ),
        )

    def remember(self, shard: int, state: DatasetState) -> None:
        """Add a state, which another process may have captured."""
        self._reader(shard).remember(state)

    def check_state(self, state: StreamState) -> None:
        """Refuse to resume from the state of a dataset with other shards; raises DataError."""
        saved = state.layout
        if saved.num_shards > 1 and saved.num_sources != self._num_sources:
            raise DataError(
                f"a dataset of {self._num_sources} shards, and the checkpoint has the state of "
                f"{saved.num_sources}",
                expected="the dataset of the checkpoint: samples that were used would be used "
                "again, and others not at all",
                fix="pass the same dataset, or restore(restart_data=True) to read it from its "
                "first sample on",
            )
        if self._num_asked not in (None, saved.num_shards):
            raise DataError(
                f"stream_shards={self._num_asked}, and the checkpoint has {saved.num_shards}",
                expected="the order of samples of the checkpoint",
                fix=f"omit stream_shards, or pass {saved.num_shards}; restore(restart_data=True) "
                "reads the dataset from its first sample on",
            )

    def resume_from(self, state: StreamState) -> None:
        """Read from this state on, in its layout; earlier positions cannot be read."""
        self.check_state(state)
        self.layout = state.layout
        self._readers.clear()
        for shard, found in enumerate(state.shards):
            self._reader(shard).resume_from(found)

    def lane(self, ranges: Ranges) -> int:
        """Number the sets of shards that micro-batches take: one process should read each set."""
        shards = {shard for shard, _, _ in self.layout.parts(ranges)}
        return min(shards) // len(shards)

    def _follow(self, ranges: Ranges) -> None:
        if self.follows_all:
            for shard in range(self.layout.num_shards):
                self._reader(shard).skip_to(self.layout.num_before(shard, ranges[0][0]))

    def _reader(self, shard: int) -> "StreamReader":
        if shard not in self._readers:
            self._readers[shard] = self._open(shard)
        return self._readers[shard]

    def _open(self, shard: int) -> "StreamReader":
        number = self.layout.num_shards
        if number == 1:
            return StreamReader(self._dataset)
        what = f"shard {shard} of {number} of a {type(self._dataset).__name__}"
        try:
            dataset = self._dataset.shard(num_shards=number, index=shard)
        except Exception as error:  # the user's dataset may raise anything
            raise DataError(
                f"{what}: {type(error).__name__}: {error}",
                expected="shard(num_shards, index) that returns a part of the dataset",
                fix="correct shard(), or pass DataConfig(stream_shards=1)",
            ) from error
        if dataset is self._dataset or not _is_resumable(dataset):
            raise DataError(
                f"{what} is a {type(dataset).__name__}",
                expected="another dataset with __iter__, state_dict and load_state_dict",
                fix="correct shard(), or pass DataConfig(stream_shards=1)",
            )
        return StreamReader(dataset, what, _MIN_DISTANCE)


class StreamReader:
    """Reads an iterable dataset, or a shard of it, forward and from remembered states."""

    def __init__(self, dataset: Any, what: str = "", min_distance: int = 1) -> None:
        """`min_distance`: samples between two states that are captured."""
        self._dataset, self._min_distance = dataset, min_distance
        self._what, self._of = what or f"a {type(dataset).__name__}", what and f" of {what}"
        self._states = [self._capture_state(0)]
        self._items: Iterator[Any] = iter(())
        self._position = -1  # of the next item; -1 if unknown

    def read(self, ranges: Ranges) -> Iterator[Any]:
        for start, end in ranges:
            self._seek(start)
            for _ in range(start, end):
                yield self._next()

    def seek(self, position: int) -> DatasetState:
        """Skip to a position; return the newest state up to there, mostly that of the position."""
        self._seek(position)
        return self.state_at(position)

    def skip_to(self, position: int) -> None:
        """Skip to a position unless the reader has passed it."""
        if self._position < position:
            self._seek(position)

    def state_at(self, position: int) -> DatasetState:
        """Return a state from which the position can be reached."""
        before = [state for state in self._states if state.position <= position]
        if not before:
            raise DataError(
                f"position {position} of {self._what} that resumed from "
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
        if state.position + self._min_distance <= position:
            self.remember(self._capture_state(position))

    def remember(self, state: DatasetState) -> None:
        """Add a state, which another process may have captured."""
        if all(known.position != state.position for known in self._states):
            first, *others = sorted([*self._states, state], key=lambda state: state.position)
            self._states = [first, *others[-_MAX_STATES:]]

    def _capture_state(self, position: int) -> DatasetState:
        what = f"the state of {self._what}"
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
                f"{self._what} that ended after {position:,} samples",
                expected="as many samples as training uses, equally many in each shard",
                fix="train for fewer steps, or make it start again at its end, as "
                "dataset.repeat(None) of Hugging Face datasets does",
            ) from None
        except Exception as error:
            raise _sample_error(f"sample {position}{self._of}", error) from error
        self._position = position + 1
        return item


def _sample_error(what: str, error: Exception) -> DataError:
    return DataError(
        f"{what}: {type(error).__name__}: {error}",
        expected="a dataset that returns each of its samples",
        fix="load that sample alone to see why it fails",
    )


def _is_resumable(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("__iter__", "state_dict", "load_state_dict"))


def _has_length(dataset: Any) -> bool:
    """Return whether a dataset is map-style."""
    is_stream = isinstance(dataset, IterableDataset)  # it inherits a __getitem__ that fails
    return isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and not is_stream
