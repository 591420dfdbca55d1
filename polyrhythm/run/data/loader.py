"""Load batches, from ranges of positions to collated micro-batches, the next one during training.

    stage_loader = StageLoader(pipeline, SampleLoader(dataset, order))
    microbatches, metadata = stage_loader.of_slice(batch_slice, next_ranges)  # first stage
    microbatches = stage_loader.of_header(header)  # later stages

Each micro-batch is read and collated by itself, with the global random generators seeded by its
position: what a collator draws, and how far it pads, depends neither on the stage that reads it
nor on the number of pipelines. All threads share these generators. So a dataset that draws is read
by the training thread, between steps; one that does not is prefetched, and watched. Processes of
`worker_pool.py` have generators of their own, and read both kinds ahead.

Only the first stage of a pipeline reads. It sends the targets to the last stage, and to all later
ones the inputs that their module takes, too: reading may be costly, or return other items in each
process. What is sent is small beside the activations of the same samples.

The next positions are a prediction: shares may change, training may end early. If other positions
are requested, they are loaded synchronously, and the prefetched batch is dropped with its error, if
any. An error of a prefetched batch is raised when the batch is requested.
"""

import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from polyrhythm.run.checkpoint.encoding import decode_state, encode_state
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.coordinator.client import SampleFuture
from polyrhythm.run.data.order import DataError, SampleOrder
from polyrhythm.run.data.reader import (
    DatasetState,
    IndexedReader,
    ShardedReader,
    StreamState,
    make_reader,
)
from polyrhythm.run.data.worker_pool import (
    CLOSE_TIMEOUT,
    NO_WORKERS,
    WorkerOptions,
    WorkerPool,
    pinned,
)
from polyrhythm.run.pipeline.batch import (
    BatchHeader,
    BatchSlice,
    Microbatch,
    split_ranges,
)
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.pipeline.stage_modules import later_stage_keywords
from polyrhythm.run.random_streams import seeded_draws, watched_draws
from polyrhythm.sync.dispatch import Ranges
from polyrhythm.types import Seconds

_logger = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
ShardState = tuple[int, DatasetState]
PredictedRanges = SampleFuture[Ranges] | Ranges  # positions, or a future of them; () for none
_MAX_DELAYED: Seconds = 5e-3  # a batch that takes longer to read is prefetched at once
_LABELS = ("labels", "label", "label_ids")  # the target in a batch by name
_SPAN = ("start_positions", "end_positions")  # the target of question answering


class CollatedSamples(NamedTuple):
    ranges: Ranges
    inputs: Any
    target: Any


class LoadedBatch(NamedTuple):
    ranges: Ranges
    microbatches: Sequence[Microbatch]

    @property
    def sizes(self) -> list[int]:
        return [microbatch.size for microbatch in self.microbatches]


class MicrobatchReader:
    """Reads and collates micro-batches in one process."""

    def __init__(
        self, reader: IndexedReader | ShardedReader, collate_fn: Collate | None, seed: int
    ) -> None:
        self._reader, self._collate_fn, self._seed = reader, collate_fn, seed

    def read_seeded(self, ranges: Ranges) -> "SeededSamples":
        """Read with seeded generators, from which no other thread may draw meanwhile."""
        states: Sequence[ShardState] = ()
        if isinstance(self._reader, ShardedReader):
            with seeded_draws(self._seed, -1):  # it may start again, and skip samples
                states = self._reader.seek(ranges)
        with seeded_draws(self._seed, ranges[0][0]) as watch:
            collated = self.read(ranges)
        return SeededSamples(collated, watch.has_drawn, states)

    def read_for_parent(self, ranges: Ranges) -> tuple[Any, ...]:
        """Read in a worker process; `SampleLoader.collect` takes what this returns."""
        found = self.read_seeded(ranges)
        states = [(shard, *state.as_json()) for shard, state in found.states]
        return ranges, found.samples.inputs, found.samples.target, states

    def read(self, ranges: Ranges) -> CollatedSamples:
        """Read without seeds."""
        items = list(self._reader.read(ranges))
        where = f"{len(items)} samples at positions {_shown(ranges)}"
        try:
            batch = (self._collate_fn or collate_items)(items)
        except Exception as error:
            why = f"{where} cannot be collated: {type(error).__name__}: {error}"
            if self._collate_fn is not None:
                raise DataError(
                    why,
                    expected="a collate_fn that returns a batch of these items",
                    fix=_collator_fix(str(error), items),
                ) from error
            raise _uncollated(why, items) from error
        inputs, target = inputs_and_target(batch, where)
        return CollatedSamples(ranges, inputs, target)


class SeededSamples(NamedTuple):
    samples: CollatedSamples
    has_drawn: bool  # random numbers
    states: Sequence[ShardState]  # of an iterable dataset, before these samples


class SampleLoader:
    """Loads batches in one process. Any thread may call it; one at a time reads a micro-batch."""

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder | None,
        collate_fn: Collate | None = None,
        *,
        seed: int = 0,
        workers: WorkerOptions = NO_WORKERS,
        batch_size: int = 1,
        num_shards: int | None = None,
    ) -> None:
        """`collate_fn` turns a list of items into a batch; the default is `collate_items`.

        A batch is (inputs, target), or a Mapping: its `labels` are the target, the rest inputs.
        `batch_size` and `num_shards` give the shards of an iterable dataset; by default one.
        """
        self.num_samples = None if order is None else order.num_samples  # None: iterable
        self._dataset = dataset
        self._reader = make_reader(dataset, order, batch_size, num_shards)
        self._microbatches = MicrobatchReader(self._reader, collate_fn, seed)
        if workers.pin_memory and not torch.accelerator.is_available():
            warnings.warn("pin_memory has no effect: there is no accelerator", stacklevel=2)
            workers = replace(workers, pin_memory=False)
        self._asked_workers, self.workers = workers, workers
        self._limit_workers()
        self._pool: WorkerPool | None = None
        self._read_lock = threading.Lock()
        self._draws = False  # the dataset or `collate_fn` has drawn random numbers
        self._may_draw = False  # in the prefetch thread; another thread may have drawn them

    @property
    def num_shards(self) -> int:
        """The number of shards of an iterable dataset."""
        return self._reader.layout.num_shards if isinstance(self._reader, ShardedReader) else 1

    def follow_all(self, follows_all: bool) -> None:
        """Say whether any pipeline may get any samples, and must follow all shards."""
        if isinstance(self._reader, ShardedReader) and self._reader.follows_all != follows_all:
            self.close()  # the worker processes have readers of their own
            self._reader.follows_all = follows_all
            self._limit_workers()

    def _limit_workers(self) -> None:
        """A shard is read forward, by one process; as many micro-batches are read ahead."""
        if self._asked_workers.num_workers and isinstance(self._reader, ShardedReader):
            most = 1 if self._reader.follows_all else self.num_shards
            number = min(self._asked_workers.num_workers, most)
            factor = -(-self._asked_workers.num_ahead // number)
            self.workers = replace(self._asked_workers, num_workers=number, prefetch_factor=factor)

    def load(self, ranges: Ranges) -> CollatedSamples:
        """Load and collate samples in the calling thread, with seeded random generators."""
        with self._read_lock:
            found = self._microbatches.read_seeded(ranges)
        if found.has_drawn and not self._draws and self._may_draw:
            _logger.warning(
                "samples at positions %s draw random numbers and earlier ones did not: dropout "
                "masks of the last step may differ from those on another number of processes",
                _shown(ranges),
            )
        if found.has_drawn and not self._draws:
            self._draws = True
            _logger.info(
                "the dataset or collate_fn draws from global random generators: it is read between "
                "steps, not prefetched; to prefetch, draw from a generator that is seeded with the "
                "sample's index, or use DataConfig(num_workers=...)"
            )
        return found.samples

    def load_microbatches(self, ranges: Ranges, sizes: Sequence[int]) -> LoadedBatch:
        """Load a batch in the training thread; no other thread may draw random numbers."""
        return self.batch(ranges, [self.load(part) for part in split_ranges(ranges, sizes)])

    def prefetch_microbatches(self, ranges: Ranges, sizes: Sequence[int]) -> LoadedBatch | None:
        """Load a batch in another thread, without seeds; None if it draws random numbers."""
        parts = list[CollatedSamples]()
        for part in split_ranges(ranges, sizes):
            if self._draws:
                return None
            with self._read_lock, watched_draws() as watch:
                parts.append(self._microbatches.read(part))
            if watch.has_drawn:
                if not self._may_draw:
                    _logger.info(
                        "a prefetched batch is read again: random numbers were drawn meanwhile, by "
                        "the dataset or by another thread, which should use its own generator"
                    )
                self._may_draw = True
                return None
        return self.batch(ranges, parts)

    def submit(self, ranges: Ranges) -> "Future[Any]":
        """Read a micro-batch in a worker process."""
        stream = self._reader if isinstance(self._reader, ShardedReader) else None
        if self._pool is None:
            self._pool = WorkerPool(
                self._microbatches.read_for_parent,
                self._dataset,
                self.workers,
                is_stream=stream is not None,
            )
        lane = None if stream is None else stream.lane(ranges)
        return self._pool.submit(ranges, lane)

    def collect(self, future: "Future[Any]") -> CollatedSamples:
        """Wait for a micro-batch of `submit`."""
        ranges, inputs, target, states = future.result()
        for shard, *state in states:
            assert isinstance(self._reader, ShardedReader), "others have no state"
            self._reader.remember(shard, DatasetState.from_json(state))
        return CollatedSamples(ranges, inputs, target)

    def batch(self, ranges: Ranges, parts: Sequence[CollatedSamples]) -> LoadedBatch:
        """Return a batch of collated micro-batches."""
        microbatches = list[Microbatch]()
        for part in parts:
            if self.workers.pin_memory and not self.workers.num_workers:
                part = pinned(part)
            args, kwargs = as_arguments(part.inputs)
            size = num_positions(part.ranges)
            microbatches.append(Microbatch(size=size, args=args, kwargs=kwargs, target=part.target))
        return LoadedBatch(ranges, microbatches)

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def state_at(self, position: int) -> StreamState | None:
        """Return the state from which an iterable dataset reaches a position; else None."""
        with self._read_lock:
            return self._reader.state_at(position)

    def remember(self, state: StreamState) -> None:
        """Add the states of shards that another pipeline has read."""
        assert isinstance(self._reader, ShardedReader), "others have no state"
        with self._read_lock:
            for shard, found in enumerate(state.shards):
                self._reader.remember(shard, found)

    def check_state(self, state: StreamState) -> None:
        """Refuse to resume from the state of another dataset; raises DataError."""
        if isinstance(self._reader, ShardedReader):
            self._reader.check_state(state)

    def resume_from(self, state: StreamState) -> None:
        """Read an iterable dataset from this state on; earlier positions cannot be read."""
        self.close()  # the worker processes have readers of their own
        with self._read_lock:
            self._reader.resume_from(state)
            self._limit_workers()


def collate_items(items: list[Any]) -> Any:
    """Collate as torch does; the lists of numbers in items by name, tokens mostly, are tensors."""
    named = [_by_name(item) for item in items]
    if all(item is not None for item in named):
        items = [{k: _as_tensor(v) for k, v in item.items()} for item in named if item is not None]
    return default_collate(items)


def inputs_and_target(batch: Any, where: str) -> tuple[Any, Any]:
    """Divide a batch: a pair, or a Mapping whose `labels` are the target; raises DataError."""
    if (named := _by_name(batch)) is not None:
        label = next((key for key in _LABELS if named.get(key) is not None), None)
        if label is not None:
            return {key: value for key, value in named.items() if key != label}, named[label]
        if all(key in named for key in _SPAN):
            target = {key: named.pop(key) for key in _SPAN}
            return named, target
        raise DataError(
            f"the batch of {where} has no labels, but {', '.join(map(repr, named)) or 'nothing'}",
            expected="the target of the loss under the name `labels` or `label`",
            fix="add labels to the items or in collate_fn (DataCollatorForLanguageModeling does); "
            "for a loss without a target let collate_fn return (inputs, None)",
        )
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    found = (
        f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
    )
    raise DataError(
        f"the batch of {where} is {'nothing (None)' if batch is None else found}",
        expected="(inputs, target), or a dict with `labels`",
        fix="let collate_fn return the batch"
        if batch is None
        else "pass items or a collate_fn with these two; several inputs: ((a, b), target)",
    )


def _by_name(batch: Any) -> dict[str, Any] | None:
    """Return the parts of a dict, BatchEncoding, ModelOutput or dataclass; None of others."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        found = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return {name: value for name, value in found.items() if value is not None}
    return None


def _as_tensor(value: Any) -> Any:
    """Turn a list of numbers, maybe nested, into a tensor: torch would transpose a batch of it."""
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    is_numbers = isinstance(value, list | tuple) and isinstance(first, int | float | list | tuple)
    return torch.tensor(value) if is_numbers else value


def _collator_fix(why: str, items: list[Any]) -> str:
    """Say how to put right what collators of transformers complain about most."""
    texts = [key for key, value in (_by_name(items[0]) or {}).items() if isinstance(value, str)]
    if texts:
        return f"remove columns of text, which no model takes: dataset.remove_columns({texts})"
    if "pad_token" in why or "padding token" in why:
        return "give the tokenizer one before training: tokenizer.pad_token = tokenizer.eos_token"
    if "`labels`" in why:
        return "use a collator that pads labels, too, such as DataCollatorForSeq2Seq(tokenizer)"
    return "correct the collate_fn or what it uses; its own error is the cause above"


def _uncollated(why: str, items: list[Any]) -> DataError:
    """Name a part of items, such as tokens, whose lengths differ."""
    shapes = [_shapes(item) for item in items]
    for path, shape in shapes[0].items():
        others = (found.get(path) for found in shapes)
        if (other := next((x for x in others if x != shape), None)) is not None:
            what = f"item{path} has shapes {shape} and {other}"
            return DataError(
                f"{why}; {what}",
                expected="items of equal shape, or a collate_fn that pads them",
                fix="pass one of transformers: DataCollatorForLanguageModeling(tokenizer, "
                "mlm=False) for text, or DataCollatorWithPadding(tokenizer), which pads no labels",
            )
    return DataError(
        why,
        expected="items of tensors, arrays, numbers and strings, in tuples, lists and dicts",
        fix="pass a collate_fn that returns (inputs, target), or a dict with `labels`",
    )


def _shapes(item: Any) -> dict[str, tuple[int, ...]]:
    leaves, _ = pytree.tree_flatten_with_path(
        _by_name(item) or item, is_leaf=lambda value: isinstance(value, list)
    )
    return {
        pytree.keystr(path): tuple(leaf.shape) if hasattr(leaf, "shape") else (len(leaf),)
        for path, leaf in leaves
        if hasattr(leaf, "shape") or isinstance(leaf, list)
    }


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn a dataset's inputs (one tensor, several, or several by name) into arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def num_positions(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def encode_microbatches(microbatches: Sequence[Microbatch]) -> bytes:
    """Encode keywords and targets for another stage; raises DataError for other than plain data."""
    parts = [(dict(m.kwargs), m.target) for m in microbatches]
    parts = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), parts)
    try:
        return encode_state(parts, "the batch")
    except CheckpointError as error:
        raise DataError(
            error.wrong,
            expected="numbers, strings, tensors and arrays, in lists, tuples and dicts, which the "
            "first stage sends to the others",
            fix="let collate_fn return these, or use one stage",
        ) from None


def decode_microbatches(encoded: bytes, sizes: Sequence[int]) -> list[Microbatch]:
    parts = decode_state(encoded, "the batch")
    return [
        Microbatch(size=size, kwargs=kwargs, target=target)
        for size, (kwargs, target) in zip(sizes, parts, strict=True)
    ]


def _shown(ranges: Ranges) -> str:
    return ", ".join(f"{start} to {end - 1}" for start, end in ranges)


def resolved_ranges(predicted: PredictedRanges) -> Ranges:
    """Return the positions; () if they are not known yet."""
    if not isinstance(predicted, SampleFuture):
        return predicted
    is_resolved = predicted.is_done and predicted.future.exception() is None
    return predicted.future.result() if is_resolved else ()


class _PrefetchedBatch(NamedTuple):
    predicted: PredictedRanges
    batch: "Future[LoadedBatch | None]"


class Prefetcher:
    """Prefetches batches in one process; only the training thread calls `load` and `start`.

    Two threads that run Python take the interpreter lock from each other. So a batch that is read
    quickly is read only after `start`, when the training thread needs the lock least.
    """

    def __init__(
        self,
        load: Callable[[Ranges], LoadedBatch],
        prefetch: Callable[[Ranges], LoadedBatch | None] | None = None,
    ) -> None:
        """`prefetch` loads in the thread; if it returns None, the training thread must load."""
        self._load, self._prefetch = load, prefetch or load
        self._pending: _PrefetchedBatch | None = None
        self._is_started = False  # the pending one
        self._duration: Seconds = math.inf  # of the last prefetch
        self._was_late = False  # the training thread had to wait for the last one
        self._queue: SimpleQueue[_PrefetchedBatch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def load(self, ranges: Ranges, next_ranges: PredictedRanges = ()) -> LoadedBatch:
        """Return the batch at `ranges`, and prefetch `next_ranges`, now or after `start`."""
        pending, self._pending = self._pending, None
        batch: LoadedBatch | None = None
        if (
            pending is not None
            and self._is_started
            and resolved_ranges(pending.predicted) == ranges
        ):
            self._was_late = not pending.batch.done()
            batch = pending.batch.result()
        elif pending is not None:
            pending.batch.cancel()
        if batch is None:
            batch = self._load(ranges)
        self._is_started = False
        if next_ranges:
            self._pending = _PrefetchedBatch(next_ranges, Future())
            if self._duration > _MAX_DELAYED or self._was_late:
                self.start()
        return batch

    def start(self) -> None:
        """Start to prefetch what `load` was given, if that has not started yet."""
        pending = self._pending
        if pending is None or self._is_started:
            return
        self._is_started = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()
        if isinstance(pending.predicted, SampleFuture):
            pending.predicted.future.add_done_callback(lambda _: self._queue.put(pending))
        else:
            self._queue.put(pending)

    def wait(self) -> None:
        """Wait until the thread has read what it was given; `load` raises its error."""
        pending = self._pending
        if pending is not None and self._is_started and resolved_ranges(pending.predicted):
            wait([pending.batch])

    def close(self) -> None:
        """Drop the prefetched batch, and end the thread."""
        if self._pending is not None:
            self._pending.batch.cancel()
        self._pending = None
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_TIMEOUT)
            self._thread = None

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            ranges = resolved_ranges(pending.predicted)
            if not ranges or not pending.batch.set_running_or_notify_cancel():
                continue  # no samples are left, or the batch was dropped
            start = time.perf_counter()
            try:
                batch = self._prefetch(ranges)
                self._duration = time.perf_counter() - start
                pending.batch.set_result(batch)
            except BaseException as error:  # `load` raises it
                pending.batch.set_exception(error)


class WorkerPrefetcher:
    """Reads predicted batches in worker processes; only the training thread calls `load`."""

    def __init__(self, samples: SampleLoader, sizes: Callable[[Ranges], list[int]]) -> None:
        """`sizes` divides a batch into micro-batches."""
        self._samples, self._sizes = samples, sizes
        self._futures = dict[Ranges, Future[Any]]()  # by micro-batch
        self._lock = threading.Lock()
        self._is_closed = False

    def load(
        self, ranges: Ranges, sizes: Sequence[int], predicted: Sequence[PredictedRanges] = ()
    ) -> LoadedBatch:
        """Return the batch at `ranges`; read the predicted ones of the next steps meanwhile."""
        parts, known = (
            split_ranges(ranges, sizes),
            [self._split(resolved_ranges(x)) for x in predicted],
        )
        self._is_closed = False
        with self._lock:
            before, self._futures = self._futures, {}
            for part in chain(parts, *known):
                future = before.pop(part, None)
                if future is None or future.cancelled():
                    future = self._samples.submit(part)
                self._futures[part] = future
            futures = [self._futures.pop(part) for part in parts]
        for stale in before.values():
            stale.cancel()
        for found, prediction in zip(known, predicted, strict=True):
            if not found and isinstance(prediction, SampleFuture):
                prediction.future.add_done_callback(partial(self._submit, prediction))
        return self._samples.batch(ranges, [self._samples.collect(future) for future in futures])

    def close(self) -> None:
        """Drop what was read ahead; end the processes unless they are persistent."""
        self._is_closed = True
        with self._lock:
            for future in self._futures.values():
                future.cancel()
            self._futures.clear()
        if not self._samples.workers.persistent_workers:
            self._samples.close()

    def _submit(self, prediction: SampleFuture[Ranges], _: object) -> None:
        """Read positions that have become known, in any thread."""
        with self._lock:
            for part in self._split(resolved_ranges(prediction)):
                if not self._is_closed and part not in self._futures:
                    self._futures[part] = self._samples.submit(part)

    def _split(self, ranges: Ranges) -> list[Ranges]:
        sizes = self._sizes(ranges) if ranges else []
        return split_ranges(ranges, sizes) if len(sizes) != 1 else [ranges]


class StageLoader:
    """Loads what a stage of a pipeline takes: inputs, keywords of its module, targets."""

    def __init__(self, pipeline: Pipeline, samples: SampleLoader) -> None:
        self._pipeline, self._samples = pipeline, samples
        self._workers: WorkerPrefetcher | None = None
        if samples.workers.num_workers:
            self._workers = WorkerPrefetcher(samples, self._sizes)
        self._prefetcher = Prefetcher(
            lambda ranges: samples.load_microbatches(ranges, self._sizes(ranges)),
            lambda ranges: samples.prefetch_microbatches(ranges, self._sizes(ranges)),
        )

    def of_slice(
        self,
        batch_slice: BatchSlice,
        next_ranges: PredictedRanges = (),
        peek_ahead: Callable[[int], tuple[Ranges, ...]] = lambda num_steps: (),
    ) -> tuple[Sequence[Microbatch], BatchSlice]:
        """Load a batch on the first stage; return it, and what the other stages need to know.

        `peek_ahead(n)` returns the positions of n steps after those of `next_ranges`.
        """
        sizes = self._sizes(batch_slice.ranges)
        num_steps = -(-self._samples.workers.num_ahead // len(sizes))
        later_ranges = peek_ahead(num_steps - 1) if num_steps > 1 else ()
        batch = self._load(batch_slice.ranges, sizes, next_ranges, later_ranges)
        if self._pipeline.num_stages == 1:
            return batch.microbatches, batch_slice
        payloads = self._payloads(batch.microbatches)
        self._pipeline.send_data(payloads)  # before the header, after which it is expected
        return batch.microbatches, structs.replace(
            batch_slice, data_bytes=tuple(map(len, payloads))
        )

    def of_header(self, header: BatchHeader) -> Sequence[Microbatch]:
        """Receive what a later stage takes of the batch that the header announces."""
        batch_slice, sizes = header.metadata, header.sizes
        assert isinstance(batch_slice, BatchSlice), "the first stage passes it"
        nbytes = batch_slice.data_bytes[self._pipeline.stage - 1]
        if not nbytes:
            return [Microbatch(size=size) for size in sizes]
        microbatches = decode_microbatches(self._pipeline.receive_data(nbytes), sizes)
        if self._samples.workers.pin_memory:
            microbatches = [
                replace(m, kwargs=pinned(m.kwargs), target=pinned(m.target)) for m in microbatches
            ]
        return microbatches

    def _payloads(self, microbatches: Sequence[Microbatch]) -> list[bytes]:
        """Return what each later stage takes of a batch."""
        module = self._pipeline.module
        last = [
            replace(m, args=(), kwargs=later_stage_keywords(module, m.args, m.kwargs))
            for m in microbatches
        ]
        middle = b""
        if self._pipeline.num_stages > 2 and any(m.kwargs for m in last):
            middle = encode_microbatches([replace(m, target=None) for m in last])
        return [middle] * (self._pipeline.num_stages - 2) + [encode_microbatches(last)]

    def start_prefetch(self) -> None:
        """Start to read the next batch in this process, if `of_slice` has not done so."""
        self._prefetcher.start()

    def wait(self) -> None:
        """Wait until no thread reads ahead: it would notice draws from the random generators."""
        self._prefetcher.wait()

    def close(self) -> None:
        """Drop the prefetched batches, and end thread and processes."""
        self._prefetcher.close()
        if self._workers is not None:
            self._workers.close()

    def _sizes(self, ranges: Ranges) -> list[int]:
        return self._pipeline.split_sizes(num_positions(ranges))

    def _load(
        self,
        ranges: Ranges,
        sizes: Sequence[int],
        next_ranges: PredictedRanges,
        later_ranges: Sequence[Ranges],
    ) -> LoadedBatch:
        if self._workers is not None:
            return self._workers.load(ranges, sizes, (next_ranges, *later_ranges))
        batch = self._prefetcher.load(ranges, next_ranges)
        if batch.sizes != sizes:  # the schedule tuner has changed them since the prefetch
            batch = self._samples.load_microbatches(ranges, sizes)
        return batch
