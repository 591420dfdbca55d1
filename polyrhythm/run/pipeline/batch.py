"""One batch as a stage sees it: cut into micro-batches in the same way on every stage.

The first stage has the inputs and decides how they are cut; the others hear of it. Each stage cuts
what it was given itself: the last one targets, all of them keyword arguments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline.connections import NO_MORE, Cut
from polyrhythm.run.pipeline.microbatches import (
    all_on,
    batch_size_of,
    cut,
    kind_of,
    sizes_by_number,
    sizes_by_size,
)
from polyrhythm.run.pipeline.transport import Kind


class NoMoreBatchesError(Exception):
    """`step` or `eval` of a stage, after the first one has said `end_batches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a stage's process passed to `step` or `eval`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any  # or a function that gives it for the first stage's note
    loss_kwargs: dict[str, Any]
    keeps_outputs: bool
    training: bool
    note: tuple[int, ...] = ()

    def check(self, loss_fn: Callable[..., Tensor] | None, *, is_last: bool) -> None:
        """Refuse to train without what training needs."""
        if not self.training:
            return
        if loss_fn is None or not torch.is_grad_enabled():
            lacks = "without a loss_fn" if loss_fn is None else "under torch.no_grad()"
            raise ScheduleError(
                f"step {lacks}", expected="a loss and gradients", fix="call eval() to run forward"
            )
        if is_last and self.target is None:
            raise ScheduleError(
                "step on the last stage without a target",
                expected="what the loss function compares the output with",
                fix="call step(target=...) on the last stage",
            )

    def completed(self, told: Cut) -> "Given":
        """With the target that goes with the batch that was told of."""
        if told == NO_MORE:
            raise NoMoreBatchesError
        if not callable(self.target):
            return self
        return replace(self, target=self.target(told.note))


@dataclass(slots=True, kw_only=True)
class Batch:
    """What is given per micro-batch, and what came out of it."""

    step: int
    cut: Cut
    arguments: Sequence[tuple[Any, ...]]  # first stage: the model's
    keywords: Sequence[dict[str, Any]]
    targets: Sequence[Any]  # last stage
    loss_kwargs: dict[str, Any]
    loss_weights: Sequence[float]  # last stage: what a micro-batch's loss counts in the gradient
    keeps_outputs: bool
    is_elsewhere: bool  # some of it has yet to be moved to the device
    first: int = 0  # number of its first micro-batch: a pipeline that is not flushed counts on
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    _kinds: list[Kind] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds = self.cut.kinds

    @property
    def num_microbatches(self) -> int:
        return len(self._kinds)

    def mean_loss(self) -> float:
        """On the last stage, once it is over."""
        weighted = zip(self.losses, self.cut.sizes, strict=False)
        return sum(loss.item() * size for loss, size in weighted) / sum(self.cut.sizes)

    def kind(self, microbatch: int) -> Kind:
        return self._kinds[microbatch - self.first]


@dataclass(slots=True, kw_only=True)
class Cutter:
    """`num_microbatches` or, where that is None, micro-batches of `microbatch_size`."""

    num_microbatches: int | None
    microbatch_size: int | None
    sizes_to_try: Sequence[int] = ()  # by the tuner, which compares whole batches
    scale_grads: bool
    device: torch.device

    def decided(self, given: Given) -> Cut:
        """How the first stage cuts what it was given."""
        sizes = self._sizes(batch_size_of((given.args, given.kwargs), "the model's inputs"))
        whole, training = (given.args, given.kwargs), given.training
        kinds = {size: kind_of(whole, size, training=training) for size in set(sizes)}
        return Cut.of([kinds[size] for size in sizes], sizes, training=training, note=given.note)

    def batch(self, given: Given, told: Cut, *, step: int, is_first: bool, is_last: bool) -> Batch:
        """Cut what this stage was given as the first one decided."""
        if told.training != given.training:
            called = {True: "step", False: "eval"}
            raise ScheduleError(
                f"{called[given.training]} here, {called[told.training]} on the first stage",
                expected="the same call on every stage",
                fix="call step and eval in the same order in all processes",
            )
        sizes = told.sizes
        return Batch(
            step=step,
            cut=told,
            arguments=cut(given.args, sizes, "the model's inputs") if is_first else [],
            keywords=cut(given.kwargs, sizes, "keyword arguments"),
            targets=cut(given.target, sizes, "targets") if is_last else [],
            loss_kwargs=given.loss_kwargs,
            loss_weights=[size / sum(sizes) if self.scale_grads else 1.0 for size in sizes],
            keeps_outputs=given.keeps_outputs and is_last,
            is_elsewhere=not all_on(self.device, (given.args, given.kwargs, given.target)),
        )

    def _sizes(self, batch_size: int | None) -> list[int]:
        if batch_size is None:
            raise ScheduleError(
                "the first stage got no tensor",
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
                    expected="sizes that divide the batch, to be compared on the same work",
                    fix=f"leave {size} out of microbatch_sizes, or change the batch",
                )
        return sizes_by_size(batch_size, self.microbatch_size)
