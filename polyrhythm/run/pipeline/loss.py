"""Losses weighted by labels, whatever the split of a batch; auxiliary losses of modules.

The objective of a step is the mean loss over all labels of the global batch: the sum over
micro-batches of count * mean / N, where `count` is the number of labels that a mean is over and N
the sum of all counts. N is known only after the last loss. So the backwards run with a constant in
its place, the `unit`, and the gradients are divided by N / unit at the end of the step.

A module adds an auxiliary loss, such as the load balancing loss of a mixture of experts, to the
graph of any tensor that it returns. Its gradient has the weight of its micro-batch. That weight is
known when the backward starts, on every stage.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError

Count = float | Tensor  # a tensor only on a GPU, where reading it would block the host
IGNORE_INDEX = -100  # torch's default, and the label of padding in Hugging Face's datasets
NOT_COUNTED = -1.0  # in messages, in place of a count

_PAIR, _MEAN = "a sum and a count", "a mean"
_CROSS_ENTROPY = "a mean over the labels of one cross-entropy"
_LABELS, _SAMPLES = "a mean over the labels of the target", "a mean over samples"


@dataclass(frozen=True, slots=True)
class MicrobatchLoss:
    """The loss of a micro-batch: a mean, or a sum, over `count` labels."""

    value: Tensor
    count: Count | None = None  # None: a mean that is weighted by samples
    is_sum: bool = False

    def mean(self) -> Tensor:
        """Return the mean, detached; 0 without a label."""
        value = self.value.detach()
        if self.count is None:
            return value
        if self.is_sum:
            value = value / self.count if _may_be_positive(self.count) else value
        return where_counted(self.count, value)

    def over_own_count(self) -> "MicrobatchLoss":
        """Return a mean that counts once, for a batch that is not split; or never, if empty."""
        if self.count is None:
            return self
        value = self.value
        if self.is_sum and _may_be_positive(self.count):
            value = value / self.count
        count = self.count
        is_counted = (count > 0).double() if isinstance(count, Tensor) else float(count > 0)
        return MicrobatchLoss(value, is_counted)

    def objective(self, weight: Count, unit: float, output: Any) -> Tensor:
        """Return what the backward starts from; `weight` is that of a mean.

        Without a label it is a 0 that depends on `output`: hooks of a backward still run.
        """
        if self.count is not None and not _may_be_positive(self.count):
            leaves = pytree.tree_leaves(output)
            needing_grad = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
            zero = torch.zeros((), device=self.value.device)
            return sum((y.flatten()[:0].abs().sum() for y in needing_grad), zero)
        weighted = self.value / unit if self.is_sum else self.value * weight
        return weighted if self.count is None else where_counted(self.count, weighted)


def where_counted(count: Count, value: Tensor) -> Tensor:
    """Return `value`, or 0 if there is no label: the mean of nothing is nan."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, value, torch.zeros_like(value))
    return value if count > 0 else torch.zeros_like(value)


def _may_be_positive(count: Count) -> bool:
    return isinstance(count, Tensor) or count > 0


def divide_by(divisor: Count, gradients: Iterable[Tensor]) -> None:
    """Divide by the mean number of labels; 0 leaves the gradients, which are 0, too."""
    tensors = list(gradients)
    if not tensors:
        return
    if isinstance(divisor, Tensor):
        factor = torch.where(divisor > 0, 1 / divisor, 1.0)
        for tensor in tensors:
            tensor.mul_(factor)
    elif divisor > 0 and abs(divisor - 1) > 1e-12:  # it is exact but for the rounding of weights
        torch._foreach_mul_(tensors, 1 / divisor)


@dataclass(slots=True)
class LossFunction:
    """Calls the user's loss function and finds the number of labels of its mean.

    It may return (sum, count). With `counts_labels` a mean counts, too: the labels of its only call
    of cross_entropy or nll_loss with reduction="mean"; without such a call the integer labels of
    the target other than -100; without those, or with several calls, samples.
    """

    function: Callable[..., Any]
    counts_labels: bool = False
    _returned: dict[bool, str] = field(default_factory=dict, init=False)  # by training or not
    _labels_per_sample: tuple[float, ...] = field(default=(), init=False)  # of several calls
    _has_warned: bool = field(default=False, init=False)

    def __call__(
        self,
        output: Any,
        target: Any,
        loss_kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        num_samples: int,
        host_target: Any = None,
    ) -> MicrobatchLoss:
        """`host_target`: the target before its copy to a GPU, where counting would wait for it."""
        calls = _MeanReductions() if self.counts_labels else None
        with nullcontext() if calls is None else calls:
            returned = self.function(output, target, **loss_kwargs)
        if isinstance(returned, tuple | list):
            what, loss = _PAIR, MicrobatchLoss(*_checked_pair(returned), is_sum=True)
        elif calls is None:
            what, loss = _MEAN, MicrobatchLoss(_checked_scalar(returned))
        else:
            known = target if host_target is None else host_target
            what, count = self._count(calls.found, known, num_samples)
            loss = MicrobatchLoss(_checked_scalar(returned), count)
        previous = self._returned.setdefault(torch.is_grad_enabled(), what)
        if previous != what:
            raise ScheduleError(
                f"the loss function returned {what}, and earlier {previous}",
                expected="the same for every micro-batch: their weights must be comparable",
                fix="return (sum, count) for every micro-batch",
            )
        return loss

    def _count(
        self, calls: "list[_MeanReduction]", target: Any, num_samples: int
    ) -> tuple[str, Count]:
        if len({call.key for call in calls}) == 1:
            return _CROSS_ENTROPY, calls[0].count()
        if calls:
            self._check_proportional(calls, num_samples)
            return _SAMPLES, float(num_samples)
        labels = _integer_labels(target)
        if labels is None:
            return _SAMPLES, float(num_samples)
        return _LABELS, float((labels != IGNORE_INDEX).sum())  # 0 must be known: see `objective`

    def _check_proportional(self, calls: "list[_MeanReduction]", num_samples: int) -> None:
        """Warn if weights by samples differ from those of one process on the whole batch."""
        if self._has_warned:
            return
        per_sample = tuple(float(call.count()) / num_samples for call in calls)
        if self._labels_per_sample and per_sample != self._labels_per_sample:
            self._has_warned = True
            warnings.warn(
                f"the loss function returned a mean of {len(calls)} cross-entropies, whose numbers "
                "of labels differ between micro-batches: it is weighted by samples; return (sum, "
                "count) from it for the result of one process on the whole batch",
                stacklevel=2,
            )
        self._labels_per_sample = per_sample


def _checked_scalar(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise ScheduleError(
        f"the loss function returned {shown}",
        expected="a scalar tensor, the mean over the micro-batch, or a pair (sum, count)",
        fix="use a loss with reduction='mean'; or return its sum and the number of its labels",
    )


def _checked_pair(returned: tuple[Any, ...] | list[Any]) -> tuple[Tensor, Count]:
    total, count = returned if len(returned) == 2 else (None, None)
    is_scalar = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
    if not isinstance(total, Tensor) or total.numel() != 1 or not is_scalar:
        shown = ", ".join(
            f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            for x in returned
        )
        raise ScheduleError(
            f"the loss function returned ({shown})",
            expected="a scalar tensor, the mean over the micro-batch, or a pair (sum, count)",
            fix="return the sum of the losses, a scalar tensor, and the number of their labels",
        )
    number = as_count(count)
    if not isinstance(number, Tensor) and not 0 <= number < float("inf"):
        raise ScheduleError(
            f"the loss function returned a count of {number}",
            expected="the number of labels that the sum is over, 0 or more",
            fix="return (sum, count), in this order",
        )
    return total, number


def as_count(count: Any) -> Count:
    """Return a number, or, of a tensor on a GPU, a float64 tensor without dimensions."""
    if isinstance(count, DTensor):
        count = count.full_tensor()
    if not isinstance(count, Tensor):
        return float(count)
    count = count.detach().reshape(())
    return float(count.item()) if count.device.type == "cpu" else count.double()


def _integer_labels(target: Any) -> Tensor | None:
    """Return the labels of a target: its only tensor of integers, or the one named `labels`."""
    if isinstance(target, Mapping) and isinstance(target.get("labels"), Tensor):
        target = target["labels"]
    leaves = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
    labels = [t for t in leaves if not (t.is_floating_point() or t.is_complex())]
    return labels[0] if len(labels) == 1 and labels[0].dtype != torch.bool else None


@dataclass(frozen=True, slots=True)
class _MeanReduction:
    """A call of a loss of torch.nn.functional with reduction="mean"."""

    target: Tensor  # integer labels, or probabilities
    num_predictions: float
    weight: Tensor | None = None
    ignore_index: int = IGNORE_INDEX

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for calls that divide by the same number."""
        target = self.target
        place = target.data_ptr(), target.shape, target.stride(), target.dtype
        return *place, id(self.weight), self.ignore_index, self.num_predictions

    def count(self) -> Count:
        """Return the number by which the call has divided the sum of losses."""
        if self.target.is_floating_point():
            return self.num_predictions
        is_counted = self.target != self.ignore_index
        if self.weight is None:
            return as_count(is_counted.sum())
        labels = torch.where(is_counted, self.target, 0).flatten()
        return as_count((self.weight.detach().double()[labels] * is_counted.flatten()).sum())


def _cross_entropy(
    input: Tensor,  # noqa: A002  # torch's name, by which it may be passed
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> _MeanReduction | None:
    if reduction != "mean" or size_average is not None or reduce is not None:
        return None
    num_predictions = input.numel() / input.shape[1 if input.dim() > 1 else 0]
    return _MeanReduction(target, num_predictions, weight, ignore_index)


def _linear_cross_entropy(
    input: Tensor,  # noqa: A002  # torch's name, by which it may be passed
    linear_weight: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    **_: Any,
) -> _MeanReduction | None:
    if reduction != "mean":
        return None
    num_predictions = input.numel() / input.shape[-1]
    ignored = IGNORE_INDEX if ignore_index is None else ignore_index
    return _MeanReduction(target, num_predictions, weight, ignored)


class _MeanReductions(TorchFunctionMode):
    """Finds the mean reductions that run in its context."""

    _READERS: ClassVar[dict[Any, Callable[..., _MeanReduction | None]]] = {
        functional.cross_entropy: _cross_entropy,
        functional.nll_loss: _cross_entropy,
        getattr(
            functional, "linear_cross_entropy", None
        ): _linear_cross_entropy,  # not before torch 2.13
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_MeanReduction] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        reader = self._READERS.get(func)
        if reader is not None and (found := reader(*args, **(kwargs or {}))) is not None:
            self.found.append(found)
        return result


class AuxiliaryLosses:
    """The auxiliary losses of a micro-batch on one stage; a context for its forward or backward."""

    # Of the process, not of a thread: autograd runs the backwards of a GPU in its own thread, and
    # activation checkpointing runs forwards again in there.
    _active: "AuxiliaryLosses | None" = None

    def __init__(self) -> None:
        self.weight: Count = 1.0  # of the micro-batch in the objective; set before its backward
        self.value: Count = 0.0  # their sum, including those of earlier stages
        self.is_forward = True  # a forward that a backward repeats must not add them again

    @staticmethod
    def active() -> "AuxiliaryLosses | None":
        return AuxiliaryLosses._active

    def add(self, loss: Tensor) -> None:
        value = as_count(loss.detach())
        self.value = value + self.value  # a tensor on a GPU, if one of them is

    def __enter__(self) -> None:
        AuxiliaryLosses._active = self

    def __exit__(self, *_: object) -> None:
        AuxiliaryLosses._active = None


class _AddAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, active: AuxiliaryLosses | None) -> Tensor:
        ctx.active, ctx.loss = active, (loss.shape, loss.dtype, loss.device)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, dtype, device = ctx.loss
        weight = 1.0 if ctx.active is None else ctx.active.weight
        ones = torch.ones(shape, dtype=dtype, device=device)
        return gradient, (ones * weight).to(dtype), None


@torch.compiler.disable
def add_auxiliary_loss(hidden: Tensor, loss: Tensor) -> Tensor:
    """Return `hidden` unchanged; its backward adds the gradient of `loss`, a scalar.

    Any module of any stage may call it, on a tensor that its output depends on. The result is that
    of adding `loss` to the loss of the micro-batch: in the gradient, and in the loss that a step
    reports. Evaluation leaves it out. Outside a Pipeline only the gradient is added, as if to a
    loss that `backward()` is called on unscaled.
    """
    is_float = isinstance(hidden, Tensor) and (hidden.is_floating_point() or hidden.is_complex())
    if not is_float or not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = ", ".join(
            f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            for x in (hidden, loss)
        )
        raise ScheduleError(
            f"add_auxiliary_loss({shown.replace('torch.', '')})",
            expected="a tensor of floats that the output depends on, and a scalar tensor",
            fix="hidden = add_auxiliary_loss(hidden, loss), with the mean or the sum of the loss",
        )
    active = AuxiliaryLosses.active()
    if active is not None and active.is_forward:
        active.add(loss)
    result: Tensor = _AddAuxiliaryLoss.apply(hidden, loss, active)
    return result
