"""The loss of a dataset, without training: each pipeline computes its share."""

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.data.loader import SampleLoader, StageLoader
from polyrhythm.run.pipeline.batch import BatchSlice, EndOfDataError
from polyrhythm.run.pipeline.pipeline import Pipeline


def evaluate(
    pipeline: Pipeline,
    samples: SampleLoader,
    share: range,  # this pipeline's samples
    batch_size: int,
) -> float:
    """Return the mean loss over all pipelines' shares; every worker calls it and gets it."""
    was_training = pipeline.module.training
    pipeline.module.eval()
    try:
        totals = _own_share(pipeline, samples, share, batch_size)
    finally:
        pipeline.module.train(was_training)
    if dist.is_initialized():
        with peer_errors("another worker", "evaluating"):
            dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def _own_share(pipeline: Pipeline, samples: SampleLoader, share: range, batch_size: int) -> Tensor:
    """Return the sum of losses and the number of labels; zeros except on the last stage."""
    totals, stage_loader = torch.zeros(2, dtype=torch.float64), StageLoader(pipeline, samples)

    def count(losses: list[Tensor]) -> None:
        for loss, labels in zip(losses, pipeline.loss_counts if losses else (), strict=True):
            number = float(labels)
            totals.add_(torch.tensor([loss.item() * number, number], dtype=torch.float64))

    for start in range(share.start, share.stop, batch_size) if pipeline.is_first else ():
        bounds, losses = (start, min(start + batch_size, share.stop)), list[Tensor]()
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
