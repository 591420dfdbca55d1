"""One batch on one stage: split into micro-batches in the same way on every stage.

The first stage has the inputs, decides how to split them, and sends a header to the others. Each
stage splits its own arguments: the last one targets, all of them keyword arguments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline.connections import END_OF_DATA, BatchHeader
from polyrhythm.run.pipeline.microbatches import (
    all_on,
    batch_size_of,
    kind_of,
    sizes_by_number,
    sizes_by_size,
    split_microbatches,
)
from polyrhythm.run.pipeline.transport import MicrobatchKind


class EndOfDataError(Exception):
    """Raised by `step` or `eval` of a stage after the first stage has called `end_batches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The arguments of `step` or `eval` on this stage."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any  # or a function that returns it for the first stage's metadata
    loss_kwargs: dict[str, Any]
    keeps_outputs: bool
    training: bool
    metadata: tuple[int, ...] = ()

    def check(self, loss_fn: Callable[..., Tensor] | None, *, is_last: bool) -> None:
        """Refuse to train without a loss, gradients or a target."""
        if not self.training:
            return
        if loss_fn is None or not torch.is_grad_enabled():
            problem = "without a loss_fn" if loss_fn is None else "under torch.no_grad()"
            raise ScheduleError(
                f"step {problem}", expected="a loss and gradients", fix="call eval() to run forward"
            )
        if is_last and self.target is None:
            raise ScheduleError(
                "step on the last stage without a target",
                expected="a target for the loss function to compare the output with",
                fix="call step(target=...) on the last stage",
            )

    def with_target(self, header: BatchHeader) -> "StepInputs":
        """Compute the target of the batch that the header announces, if it is a function."""
        if header == END_OF_DATA:
            raise EndOfDataError
        if not callable(self.target):
            return self
        return replace(self, target=self.target(header.metadata))


@dataclass(slots=True, kw_only=True)
class Batch:
    """The arguments of every micro-batch, and their outputs."""

    step: int
    header: BatchHeader
    arguments: Sequence[tuple[Any, ...]]  # first stage: the model's inputs
    keywords: Sequence[dict[str, Any]]
    targets: Sequence[Any]  # last stage
    loss_kwargs: dict[str, Any]
    loss_weights: Sequence[float]  # last stage: weight of a micro-batch's loss in the gradient
    keeps_outputs: bool
    needs_device_copy: bool  # some tensors are not on the device yet
    first: int = 0  # number of its first micro-batch; not 0 in a pipeline without a flush
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    _kinds: list[MicrobatchKind] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds = self.header.kinds

    @property
    def num_microbatches(self) -> int:
        return len(self._kinds)

    def mean_loss(self) -> float:
        """Return the mean loss, on the last stage after the batch has run."""
        weighted = zip(self.losses, self.header.sizes, strict=False)
        return sum(loss.item() * size for loss, size in weighted) / sum(self.header.sizes)

    def kind(self, microbatch: int) -> MicrobatchKind:
        return self._kinds[microbatch - self.first]


@dataclass(slots=True, kw_only=True)
class BatchSplitter:
    """Splits a batch into `num_microbatches` or, if None, into sizes of `microbatch_size`."""

    num_microbatches: int | None
    microbatch_size: int | None
    sizes_to_try: Sequence[int] = ()  # candidates of the tuner, which compares whole batches
    scale_grads: bool
    device: torch.device

    def make_header(self, step_inputs: StepInputs) -> BatchHeader:
        """Describe how the first stage splits its batch."""
        arguments, training = (step_inputs.args, step_inputs.kwargs), step_inputs.training
        sizes = self._sizes(batch_size_of(arguments, "the model's inputs"))
        kinds = {size: kind_of(arguments, size, training=training) for size in set(sizes)}
        return BatchHeader.of(
            [kinds[size] for size in sizes], sizes, training=training, metadata=step_inputs.metadata
        )

    def batch(
        self,
        step_inputs: StepInputs,
        header: BatchHeader,
        *,
        step: int,
        is_first: bool,
        is_last: bool,
    ) -> Batch:
        """Split this stage's arguments as the header prescribes."""
        if header.training != step_inputs.training:
            calls = {True: "step", False: "eval"}
            here, there = calls[step_inputs.training], calls[header.training]
            raise ScheduleError(
                f"{here} on this stage, {there} on the first stage",
                expected="the same call on every stage",
                fix="call step and eval in the same order in all processes",
            )
        sizes = header.sizes
        return Batch(
            step=step,
            header=header,
            arguments=split_microbatches(step_inputs.args, sizes, "the model's inputs")
            if is_first
            else [],
            keywords=split_microbatches(step_inputs.kwargs, sizes, "keyword arguments"),
            targets=split_microbatches(step_inputs.target, sizes, "targets") if is_last else [],
            loss_kwargs=step_inputs.loss_kwargs,
            loss_weights=[size / sum(sizes) if self.scale_grads else 1.0 for size in sizes],
            keeps_outputs=step_inputs.keeps_outputs and is_last,
            needs_device_copy=not all_on(
                self.device, (step_inputs.args, step_inputs.kwargs, step_inputs.target)
            ),
        )

    def _sizes(self, batch_size: int | None) -> list[int]:
        if batch_size is None:
            raise ScheduleError(
                "the first stage was called without a tensor",
                expected="the model's inputs, with the samples along their first dimension",
                fix="call step(inputs) on the first stage",
            )
        if self.num_microbatches is not None:
            return sizes_by_number(batch_size, self.num_microbatches)
        assert self.microbatch_size is not None, "one of the two is given"
        for size in self.sizes_to_try:
            if batch_size % size:
                raise ScheduleError(
                    f"micro-batches of {size} for a batch of {batch_size}",
                    expected="sizes that divide the batch, so that all are compared on equal work",
                    fix=f"remove {size} from microbatch_sizes, or change the batch",
                )
        return sizes_by_size(batch_size, self.microbatch_size)
