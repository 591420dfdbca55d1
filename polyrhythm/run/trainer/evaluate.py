"""Loss and metrics of a dataset, without training: a pipeline takes the next batch when it is idle.

Fast pipelines so compute more batches, and all end within one batch of the slowest. Sums are exact:
they do not depend on which pipeline computed which batch. The state of a torchmetrics.Metric is
merged over the last stages of all pipelines, as torchmetrics does, but with means weighted.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import LaunchError
from polyrhythm.run.checkpoint.encoding import decode_state, encode_state
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.data.loader import SampleLoader, StageLoader
from polyrhythm.run.pipeline.batch import BatchSlice, EndOfDataError, read_losses
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.random_streams import seeded_draws
from polyrhythm.sync.dispatch import Range

EVAL_LOSS = "eval_loss"  # the name of the mean loss among the metrics
# Names in the job's store, by the number of the evaluation.
_SETTINGS = "the dataset of evaluation {}".format
_COUNTER = "the next batch of evaluation {}".format
_LOSSES = "the losses of evaluation {}".format
_STATES = "part {1} of the metric states of evaluation {0}".format
_COMPUTED = "the metrics of evaluation {}".format
_PART_BYTES = 4 * 1024 * 1024  # of metric states: a value in the store is limited
_Exact = Fraction | float  # a sum without rounding; a float if it is not finite


def check_metrics(metrics: object) -> None:
    """Refuse what is neither a function nor a torchmetrics.Metric; raises LaunchError."""
    fix = (
        'metrics={"accuracy": lambda output, target: (output.argmax(-1) == target).float().mean()}'
    )
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        expected = "a dict of functions or torchmetrics.Metric objects by name"
        raise LaunchError(f"metrics={metrics!r}", expected=expected, fix=fix)
    for name, metric in metrics.items():
        is_known = callable(metric) and not isinstance(metric, type)
        if _has_state(metric) and not hasattr(metric, "_reductions"):
            expected = "single torchmetrics.Metric objects: a collection has several values"
            fix = "pass its metrics: metrics=dict(collection.items())"
            is_known = False
        else:
            expected = "a function of (output, target), or a torchmetrics.Metric object"
        if not is_known or name == EVAL_LOSS:
            expected = "another name: this is the mean loss" if name == EVAL_LOSS else expected
            raise LaunchError(f"metric {name!r}: {metric!r}", expected=expected, fix=fix)


def _has_state(metric: object) -> bool:
    """Whether it is a torchmetrics.Metric, or like one."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


@dataclass(frozen=True, slots=True)
class BatchDispatcher:
    """Gives the batches of one evaluation to pipelines on request, and adds up their results."""

    number: int  # of the evaluation in the job, from 1
    store: JobStore
    members: Members
    num_samples: int
    batch_size: int

    def batches(self, report_progress: Callable[[], None]) -> Iterator[Range]:
        """Yield the positions of the batches of this pipeline, on its first stage."""
        while True:
            start = self.store.next_number(_COUNTER(self.number), self.members) * self.batch_size
            if start >= self.num_samples:
                return
            yield start, min(start + self.batch_size, self.num_samples)
            report_progress()

    def run(self, function: Callable[[Callable[[], None]], Sequence[_Exact]]) -> list[_Exact]:
        """Call `function` and return the sums of its results over all workers.

        Waits for a worker as long as its heartbeats arrive; raises its error.
        """
        store, members, settings = self.store, self.members, {"samples": self.num_samples}
        store.check_consistent(_SETTINGS(self.number), settings, members)
        name = _LOSSES(self.number)
        try:
            with store.heartbeats(name, members) as report_progress:
                own = function(report_progress)
        except Exception as error:
            store.fail(name, error, members)
            raise
        found = store.all_gather_object(name, [str(value) for value in own], members)
        for used in (_SETTINGS(self.number), _COUNTER(self.number), _LOSSES(self.number - 1)):
            store.delete(used, members)  # all are here: nobody reads it again
        return [sum(map(_from_text, column)) for column in zip(*found, strict=True)]

    def last_stages(self, num_stages: int) -> Members:
        ranks = self.members.ranks[num_stages - 1 :: num_stages]
        return Members(ranks, self.members.epoch)


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Evaluates one dataset, once or several times; all workers have one."""

    pipeline: Pipeline
    samples: SampleLoader
    metrics: Mapping[str, Any] = field(default_factory=dict)
    precision: Callable[[torch.device], AbstractContextManager[object]]
    is_stop_requested: Callable[[], bool] = lambda: False  # ends an evaluation without a result
    _stage_loader: StageLoader = field(init=False)
    _totals: list[_Exact] = field(default_factory=list, init=False)

    def run(self, dispatcher: BatchDispatcher) -> dict[str, float] | None:
        """Return the mean loss and the metrics; all workers call it, and get the same.

        None if any of them has ended it. Random generators stay as they are.
        """
        pipeline, was_training = self.pipeline, self.pipeline.module.training
        self._stage_loader = StageLoader(pipeline, self.samples)
        self._totals = [Fraction(0)] * (3 + 2 * len(self._functions))
        for metric in self._metrics_with_state.values():
            for each in _parts(metric).values():
                each.reset()
        if self.metrics:
            pipeline.observe_outputs(self._update_metrics)
        pipeline.module.eval()
        devices = [pipeline.device] if pipeline.device.type == "cuda" else []
        try:
            with (
                torch.random.fork_rng(devices),
                seeded_draws(0, dispatcher.number),
                self.precision(pipeline.device),
            ):
                sums = dispatcher.run(partial(self._run_batches, dispatcher))
                num_ended, (loss, *means) = sums[0], _means(sums[1:])
                if num_ended:
                    return None
                values = {EVAL_LOSS: loss} | dict(zip(self._functions, means, strict=True))
                if self._metrics_with_state:
                    values |= self._compute(dispatcher)
        finally:
            self._stage_loader.close()
            pipeline.observe_outputs(None)
            pipeline.module.train(was_training)
        return {name: values[name] for name in (EVAL_LOSS, *self.metrics)}

    def close(self) -> None:
        """End its worker processes, if there are any."""
        self.samples.close()

    @property
    def _functions(self) -> dict[str, Callable[[Any, Any], Any]]:
        return {name: each for name, each in self.metrics.items() if not _has_state(each)}

    @property
    def _metrics_with_state(self) -> dict[str, Any]:
        return {name: each for name, each in self.metrics.items() if _has_state(each)}

    def _run_batches(
        self, dispatcher: BatchDispatcher, report_progress: Callable[[], None]
    ) -> list[_Exact]:
        """Return whether this worker has ended it, and the sums and counts of its last stage."""
        pipeline, stage_loader = self.pipeline, self._stage_loader
        for bounds in dispatcher.batches(report_progress) if pipeline.is_first else ():
            if self.is_stop_requested():
                self._totals[0] = Fraction(1)
                break
            losses = list[Tensor]()
            microbatches, metadata = stage_loader.of_slice(BatchSlice(0, (bounds,)))
            pipeline.run_microbatches(
                microbatches, training=False, losses=losses, metadata=metadata
            )
            self._add_losses(losses)
        if pipeline.is_first:
            pipeline.end_batches()
            return self._totals
        while True:
            losses = []
            try:
                pipeline.run_microbatches(stage_loader.of_header, training=False, losses=losses)
            except EndOfDataError:
                return self._totals
            self._add_losses(losses)
            report_progress()

    def _add_losses(self, losses: list[Tensor]) -> None:
        counts = self.pipeline.loss_counts if losses else ()
        for loss, number in read_losses(losses, counts):
            self._add(0, loss * number, number)

    def _add(self, index: int, value: float, count: float) -> None:
        """Add to the sum and the count of the loss, or of a function after it."""
        self._totals[1 + 2 * index] += Fraction(value) if math.isfinite(value) else value
        self._totals[2 + 2 * index] += Fraction(count)

    def _update_metrics(self, output: Any, target: Any, num_samples: int) -> None:
        """On the last stage, for each micro-batch."""
        for index, (name, function) in enumerate(self._functions.items(), 1):
            found = function(output, target)
            try:
                if isinstance(found, tuple):
                    value, count = map(float, found)
                else:
                    value, count = float(found) * num_samples, num_samples
            except (TypeError, ValueError, RuntimeError):  # of tensors with several elements
                raise LaunchError(
                    f"metric {name!r} returned {_shown(found)}",
                    expected="a number, the mean over the samples, or a pair (sum, count)",
                    fix="return the mean over the micro-batch, such as (...).float().mean()",
                ) from None
            self._add(index, value, count)
        for metric in self._metrics_with_state.values():
            if hasattr(metric, "to"):
                metric.to(self.pipeline.device)
            metric.update(output, target)

    def _compute(self, dispatcher: BatchDispatcher) -> dict[str, float]:
        """Merge the states of all last stages on the first of them, and return its results."""
        store, number = dispatcher.store, dispatcher.number
        last_stages = dispatcher.last_stages(self.pipeline.num_stages)
        is_merging = store.rank == last_stages.leader
        if self.pipeline.is_last and not is_merging:
            states = {name: _state_of(each) for name, each in self._metrics_with_state.items()}
            _publish(states, number, store, last_stages)

        def compute() -> dict[str, float]:
            others = [_receive(number, rank, store, last_stages) for rank in last_stages.ranks[1:]]
            found = dict[str, float]()
            for name, metric in self._metrics_with_state.items():
                if others:
                    _merge(metric, [_state_of(metric), *(states[name] for states in others)])
                found[name] = _computed(name, metric)
            return found

        rest = (rank for rank in dispatcher.members.ranks if rank != last_stages.leader)
        members = Members((last_stages.leader, *rest), last_stages.epoch)
        values: dict[str, float] = store.run_on_leader(_COMPUTED(number), compute, members)
        if is_merging:
            store.delete(_COMPUTED(number - 1), members)
        return values


def _means(sums: Sequence[_Exact]) -> list[float]:
    """Return sum / count of each pair; nan without a label or a sample."""
    return [float(s / n) if n else math.nan for s, n in zip(sums[::2], sums[1::2], strict=True)]


def _from_text(text: str) -> _Exact:
    return float(text) if text in ("nan", "inf", "-inf") else Fraction(text)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _parts(metric: Any) -> dict[str, Any]:
    """Return the metric itself and those inside, such as the metric of a wrapper, by name."""
    return {name: each for name, each in metric.named_modules() if hasattr(each, "_reductions")}


def _state_of(metric: Any) -> dict[str, Any]:
    """Return its state, and that of each metric inside, with the number of updates."""
    return {
        name: {
            "updates": each._update_count,
            "values": {key: getattr(each, key) for key in each._reductions},
        }
        for name, each in _parts(metric).items()
    }


def _merge(metric: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Give `metric` the state after the updates of all; one without any has nothing to add."""
    for name, each in _parts(metric).items():
        found = [state[name] for state in states if state[name]["updates"]]
        if not found:
            continue
        updates = [state["updates"] for state in found]
        for key, reduction in each._reductions.items():
            values = [state["values"][key] for state in found]
            if isinstance(values[0], list):
                merged: Any = [item.to(each.device) for value in values for item in value]
            elif len(values) == 1:
                merged = values[0].to(each.device)
            else:
                stacked = torch.stack([value.to(each.device) for value in values])
                merged = stacked if reduction is None else reduction(stacked)
                if getattr(reduction, "__name__", "") == "dim_zero_mean":
                    weights = torch.tensor(updates, device=each.device)
                    merged = torch.tensordot(weights.to(stacked.dtype), stacked, 1) / sum(updates)
            setattr(each, key, merged)
        each._update_count, each._computed = sum(updates), None


def _computed(name: str, metric: Any) -> float:
    """Compute a metric in this process alone, although others exist."""
    for each in _parts(metric).values():
        each._to_sync = each.sync_on_compute = False
    value = metric.compute()
    is_number = isinstance(value, int | float)
    if not is_number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise LaunchError(
            f"metric {name!r} computed {_shown(value)}",
            expected="a single number",
            fix="use an average over classes, or a function that computes the number",
        )
    return float(value)


def _publish(states: Any, number: int, store: JobStore, members: Members) -> None:
    """Publish states of any size for the first of the members; it deletes them."""
    encoded = encode_state(states, "the state of a metric")
    parts = [encoded[i : i + _PART_BYTES] for i in range(0, len(encoded), _PART_BYTES)]
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        store.publish(_STATES(number, index), (is_last, part), members)


def _receive(number: int, rank: int, store: JobStore, members: Members) -> Any:
    parts, is_last = list[bytes](), False
    while not is_last:
        name = _STATES(number, len(parts))
        is_last, part = store.receive(name, rank, members)
        parts.append(part)
        store.delete(name, members, rank=rank)
    return decode_state(b"".join(parts), "the state of a metric")
