"""The loss of a dataset, without training: each pipeline computes its share."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.data.loader import LoadedBatch
from polyrhythm.run.pipeline.batch import EndOfDataError
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.sync.dispatch import Ranges


def evaluate(
    pipeline: Pipeline,
    load: Callable[[Ranges], LoadedBatch],
    share: range,  # this pipeline's samples
    batch_size: int,
) -> float:
    """Return the mean loss over all pipelines' shares; every worker calls it and gets it."""
    was_training = pipeline.module.training
    pipeline.module.eval()
    try:
        totals = _own_share(pipeline, load, share, batch_size)
    finally:
        pipeline.module.train(was_training)
    if dist.is_initialized():
        with peer_errors("another worker", "evaluating"):
            dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def _own_share(
    pipeline: Pipeline, load: Callable[[Ranges], LoadedBatch], share: range, batch_size: int
) -> Tensor:
    """Return the sum of losses and the number of labels; zeros except on the last stage."""
    totals = torch.zeros(2, dtype=torch.float64)

    def count(losses: list[Tensor]) -> None:
        for loss, labels in zip(losses, pipeline.loss_counts if losses else (), strict=True):
            number = float(labels)
            totals.add_(torch.tensor([loss.item() * number, number], dtype=torch.float64))

    def target(metadata: tuple[int, ...]) -> Any:
        return load(((metadata[0], metadata[1]),)).target

    for start in range(share.start, share.stop, batch_size) if pipeline.is_first else ():
        bounds, losses = (start, min(start + batch_size, share.stop)), list[Tensor]()
        batch = load((bounds,))
        arguments, keywords = as_arguments(batch.inputs)
        pipeline.eval(
            *arguments,
            target=batch.target,
            losses=losses,
            return_outputs=False,
            metadata=bounds,
            **keywords,
        )
        count(losses)
    if pipeline.is_first:
        pipeline.end_batches()
        return totals
    while True:
        losses = []
        try:
            pipeline.eval(
                target=target if pipeline.is_last else None, losses=losses, return_outputs=False
            )
        except EndOfDataError:
            return totals
        count(losses)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn a dataset's inputs (one tensor, several, or several by name) into arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
