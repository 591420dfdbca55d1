"""The loss of a dataset, without training: a pipeline takes the next batch when it is idle.

Fast pipelines so compute more batches, and all end within one batch of the slowest. The sum of the
losses is exact: it does not depend on which pipeline computed which batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from torch import Tensor

from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.run.data.loader import SampleLoader, StageLoader
from polyrhythm.run.pipeline.batch import BatchSlice, EndOfDataError, read_losses
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.dispatch import Range

# Names in the job's store, by the number of the evaluation.
_SETTINGS = "the dataset of evaluation {}".format
_COUNTER = "the next batch of evaluation {}".format
_LOSSES = "the losses of evaluation {}".format
_Exact = Fraction | float  # a sum without rounding; a float if it is not finite


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


def evaluate(pipeline: Pipeline, samples: SampleLoader, dispatcher: BatchDispatcher) -> float:
    """Return the mean loss over all batches; every worker calls it and gets it."""
    was_training, stage_loader = pipeline.module.training, StageLoader(pipeline, samples)
    pipeline.module.eval()
    try:
        total, count = dispatcher.run(partial(_own_batches, pipeline, stage_loader, dispatcher))
    finally:
        stage_loader.close()
        samples.close()  # its worker processes: each evaluation has its own loader
        pipeline.module.train(was_training)
    return float(total / count) if count else math.nan  # a dataset without labels


def _own_batches(
    pipeline: Pipeline,
    stage_loader: StageLoader,
    dispatcher: BatchDispatcher,
    report_progress: Callable[[], None],
) -> list[_Exact]:
    """Return the sum of losses and the number of labels; zeros except on the last stage."""
    totals: list[_Exact] = [Fraction(0), Fraction(0)]

    def count(losses: list[Tensor]) -> None:
        for loss, number in read_losses(losses, pipeline.loss_counts if losses else ()):
            value = loss * number
            totals[0] += Fraction(value) if math.isfinite(value) else value
            totals[1] += Fraction(number)

    for bounds in dispatcher.batches(report_progress) if pipeline.is_first else ():
        losses = list[Tensor]()
        microbatches, metadata = stage_loader.of_slice(BatchSlice(0, (bounds,)))
        pipeline.run_microbatches(microbatches, training=False, losses=losses, metadata=metadata)
        count(losses)
    if pipeline.is_first:
        pipeline.end_batches()
        return totals
    while True:
        losses = []
        try:
            pipeline.run_microbatches(stage_loader.of_header, training=False, losses=losses)
        except EndOfDataError:
            return totals
        count(losses)
        report_progress()


def _from_text(text: str) -> _Exact:
    return float(text) if text in ("nan", "inf", "-inf") else Fraction(text)
