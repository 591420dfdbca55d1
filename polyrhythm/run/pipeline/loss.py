"""Losses weighted by labels, whatever the split of a batch; auxiliary losses of modules.

The objective of a step is the mean loss over all labels of the global batch: the sum over
micro-batches of count * mean / N, where `count` is the number of labels that a mean is over and N
the sum of all counts. N is known only after the last loss. So the backwards run with a constant U
in its place, the `unit`: they start from count / U * mean, and the end of the step divides the
gradients by N / U, which is 1 if U was a good guess.

A module adds an auxiliary loss, such as the load balancing loss of a mixture of experts, to the
graph of any tensor that it returns. Its gradient has the weight of its micro-batch. That weight is
known when the backward starts, on every stage.
"""

import functools
import logging
import operator
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from polyrhythm.errors import ScheduleError
from polyrhythm.run.comm.reduce_scatter import HALF_PRECISION

_logger = logging.getLogger(__name__)

Count = float | Tensor  # a tensor only on a GPU, where reading it would block the host
IGNORE_INDEX = -100  # torch's default, and the label of padding in Hugging Face's datasets
NOT_COUNTED = -1.0  # in messages, in place of a count

_PAIR, _MEAN = "a sum and a count", "a mean"
_CROSS_ENTROPY = "a mean over the labels of one cross-entropy"
_LABELS, _SAMPLES = "a mean over the labels of the target", "a mean over samples"
_SMALL = 16384  # elements
_NUM_CHECKED = 4  # micro-batches whose numbers are read from a GPU, for warnings


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
            value = value / _divisor(self.count)
        return where_counted(self.count, value)

    def over_own_count(self) -> "MicrobatchLoss":
        """Return a mean that counts once, for a batch that is not split; or never, if empty."""
        if self.count is None:
            return self
        count = self.count
        value = self.value / _divisor(count) if self.is_sum else self.value
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
        if self.is_sum:
            weighted = self.value / unit
        else:
            is_one = isinstance(weight, float) and weight == 1.0  # a tensor is on a GPU
            weighted = self.value if is_one else self.value * weight
        return weighted if self.count is None else where_counted(self.count, weighted)


def where_counted(count: Count, value: Tensor) -> Tensor:
    """Return `value`, or 0 if there is no label: the mean of nothing is nan."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, value, torch.zeros_like(value))
    return value if count > 0 else torch.zeros_like(value)


def _divisor(count: Count) -> Count:
    """Return the count, or 1 without a label: a gradient of 0 / 0 is nan."""
    return torch.where(count > 0, count, 1.0) if isinstance(count, Tensor) else count or 1.0


def _may_be_positive(count: Count) -> bool:
    return isinstance(count, Tensor) or count > 0


def divide_by(divisor: Count, gradients: Iterable[Tensor]) -> None:
    """Divide by the mean number of labels; 0 leaves the gradients, which are 0, too."""
    if not isinstance(divisor, Tensor) and (
        divisor <= 0 or abs(divisor - 1) <= 1e-12  # it is exact but for the rounding of weights
    ):
        return
    scale_by(1 / _divisor(divisor), gradients)


def scale_by(factor: Count, tensors: Iterable[Tensor]) -> None:
    """Multiply all tensors in place, those of one type by one kernel."""
    by_type = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for tensor in tensors:
        by_type[tensor.device, tensor.dtype].append(tensor)
    for (device, dtype), some in by_type.items():
        own = factor
        # On a CPU a number would be rounded first, and made a tensor for each of the tensors.
        if isinstance(factor, Tensor) or device.type == "cpu":
            wide = torch.promote_types(dtype, torch.float32)
            own = torch.as_tensor(factor, dtype=wide, device=device)
        torch._foreach_mul_(some, own)


def squared_norm(tensors: Iterable[Tensor]) -> Tensor | float:
    """Return the sum of squares of all tensors; on a GPU as a tensor, without waiting for it."""
    listed, squares = list(tensors), list[Tensor | float]()
    # Usually one kind, found without code of Python for each tensor: a step has hundreds.
    kinds = dict.fromkeys(map(_KIND, listed))
    for kind in kinds:
        some = listed if len(kinds) == 1 else [tensor for tensor in listed if _KIND(tensor) == kind]
        if some[0].is_sparse:
            some = [tensor.coalesce().values() for tensor in some]
        if not isinstance(some[0], DTensor):  # one norm of all small ones takes less time
            small = [tensor for tensor in some if tensor.numel() < _SMALL]
            some = [tensor for tensor in some if tensor.numel() >= _SMALL]
            some += [_flatten_dense_tensors(small)] if small else []
        if some[0].is_cpu:
            squares += _squares_on_cpu(some)
        else:
            norm = torch.linalg.vector_norm(torch.stack(_norms(some)), dtype=torch.float64)
            squares.append(norm.square())
    # To add to a number is an operation of the GPU, too.
    return functools.reduce(operator.add, squares) if squares else 0.0


_KIND = operator.attrgetter("__class__", "dtype", "layout", "is_cpu")


def _squares_on_cpu(tensors: Iterable[Tensor]) -> Iterator[float]:
    others = list[Tensor]()
    for tensor in tensors:
        if _is_plain(tensor):  # a third of the time of a norm, and more exact
            flat = tensor.view(-1)
            yield torch.dot(flat, flat).item()
        else:
            others.append(tensor)
    # A number costs less than an operation on tensors.
    numbers = [norm.item() for norm in _norms(others)] if others else []
    yield sum([number * number for number in numbers])  # ** raises if too large


def _norms(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the norms of tensors of one kind; of sharded ones, those of the whole."""
    dtype = torch.float32 if tensors[0].dtype in HALF_PRECISION else None
    norms = torch._foreach_norm(tensors, 2.0, dtype=dtype)
    if isinstance(tensors[0], DTensor):
        norms = tuple(n.full_tensor() if isinstance(n, DTensor) else n for n in norms)
    return norms


def _is_plain(tensor: Tensor) -> bool:
    is_real = tensor.dtype in (torch.float32, torch.float64)
    return is_real and type(tensor) is Tensor and tensor.is_contiguous()


class NonFiniteWarnings:
    """Warns of a worker's gradients that are not finite: the first, 10th, 100th step in a row."""

    def __init__(self) -> None:
        self._num_steps = 0  # in a row

    def after(self, *, is_finite: bool, step: int, worker: object) -> None:
        """Record the gradients of a step."""
        self._num_steps = 0 if is_finite else self._num_steps + 1
        if self._num_steps == 1:
            _logger.warning(
                "step %d: the gradients of %s are not finite: all replicas skip this step",
                *(step, worker),
            )
        elif self._num_steps and 10 ** (len(str(self._num_steps)) - 1) == self._num_steps:
            _logger.warning(
                "step %d: the gradients of %s are not finite for %d steps in a row: all replicas "
                "skip them, and nothing is trained",
                *(step, worker, self._num_steps),
            )


@dataclass(slots=True)
class LossFunction:
    """Calls the user's loss function and finds the number of labels of its mean.

    It may return (sum, count). With `counts_labels` a mean counts, too: the labels of its only call
    of cross_entropy or nll_loss, with reduction="mean" if there is one; without such a call the
    integer labels of the target other than -100; without those, or with several calls, samples.
    Where that is a guess which may be wrong, it warns once.

    Without a function the model computes the loss itself, as those of Hugging Face do: its forward
    takes the target as labels, and runs in `recorded()`.
    """

    function: Callable[..., Any] | None
    counts_labels: bool = False
    # Gets output, target and number of samples of each micro-batch: metrics of an evaluation.
    observer: Callable[[Any, Any, int], None] | None = field(default=None, init=False)
    _recorded: "list[_Reduction]" = field(default_factory=list, init=False)  # in the forward
    _returned: dict[bool, str] = field(default_factory=dict, init=False)  # by training or not
    _ignore_index: int = field(default=IGNORE_INDEX, init=False)  # of the latest call
    _labels_per_sample: tuple[float, ...] = field(default=(), init=False)  # of calls, or a target
    _num_checked: int = field(default=0, init=False)
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
        if self.function is None:
            calls, self._recorded = self._recorded, []  # which hold the graph
            returned: Any = loss_of(output)
        else:
            reductions = _Reductions()
            with reductions if self.counts_labels else nullcontext():
                returned = self.function(logits_of(output), target, **loss_kwargs)
            calls = reductions.found
        if isinstance(returned, tuple | list):
            what, loss = _PAIR, MicrobatchLoss(*_checked_pair(returned), is_sum=True)
            _check_is_sum(loss.value, calls)
        elif not self.counts_labels:
            what, loss = _MEAN, MicrobatchLoss(_checked_scalar(returned))
        else:
            known = target if host_target is None else host_target
            value = _checked_scalar(returned)
            if known is not target:
                calls = [call.with_target_on_host(target, known) for call in calls]
            what, count = self._count(calls, value, known, num_samples)
            loss = MicrobatchLoss(value, count)
            if not _may_be_positive(count):  # losses often return 0 early, without a label
                return loss
        previous = self._returned.setdefault(torch.is_grad_enabled(), what)
        if previous != what:
            raise ScheduleError(
                f"the loss function returned {what}, and earlier {previous}",
                expected="the same for every micro-batch: their weights must be comparable",
                fix="return (sum, count) for every micro-batch",
            )
        return loss

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Find the losses over labels that the model's own forward computes, in this context.

        Replaces functions of torch.nn.functional meanwhile: a TorchFunctionMode costs 10 us for
        each of the hundreds of functions that a forward calls.
        """
        self._recorded = found = list[_Reduction]()
        thread = threading.get_ident()
        with _recorders_lock:
            before = _recorders.get(thread)
            _recorders[thread] = found
            for name, replacement in _RECORDING.items():
                setattr(functional, name, replacement)
        try:
            yield
        finally:
            with _recorders_lock:
                _recorders.pop(thread)
                if before is not None:
                    _recorders[thread] = before
                for name, replacement in _RECORDING.items() if not _recorders else ():
                    setattr(functional, name, replacement.__wrapped__)

    def _count(
        self, calls: "list[_Reduction]", value: Tensor, target: Any, num_samples: int
    ) -> tuple[str, Count]:
        means = [call for call in calls if call.reduction == "mean"]
        different = means or calls
        if len(different) > 1:
            different = list({call.key: call for call in different}.values())
        if len(different) > 1 and means:
            self._check_proportional(
                lambda: [float(call.count()) / num_samples for call in means],
                f"a mean of {len(means)} cross-entropies, whose numbers of labels differ between "
                "micro-batches: it is weighted by samples",
                is_checked=self._is_checked(*(call.target for call in means)),
            )
            return _SAMPLES, float(num_samples)
        if calls:
            counts = [call.count() for call in different]  # several: parts of the labels
            self._ignore_index = (means or calls)[0].ignore_index
            if means:
                return _CROSS_ENTROPY, counts[0]
            number = float(sum(counts))  # as a division by hand has nan gradients without a label
            if number and self._is_checked(value) and not _is_mean(value, calls, number):
                self._warn(
                    f"a value that is not the sum of its cross-entropy over {number:g} labels, but "
                    "is weighted as a mean over them"
                )
            return _CROSS_ENTROPY, number
        labels = _integer_labels(target)
        if labels is None:
            return _SAMPLES, float(num_samples)
        # 0 must be known: see `objective`.
        number = float(torch.count_nonzero(labels != self._ignore_index))
        if number:
            self._check_proportional(
                lambda: [number / num_samples],
                f"a value that is taken as a mean over the {number:g} labels of its target, whose "
                "number differs between micro-batches",
            )
        return _LABELS, number

    def _check_proportional(
        self, labels_per_sample: Callable[[], list[float]], what: str, *, is_checked: bool = True
    ) -> None:
        """Warn of weights that may differ from those of one process on the whole batch."""
        if self._has_warned or not is_checked:
            return
        per_sample = tuple(labels_per_sample())
        if self._labels_per_sample and per_sample != self._labels_per_sample:
            self._warn(what)
        self._labels_per_sample = per_sample

    def _is_checked(self, *tensors: Tensor) -> bool:
        """Return whether to read tensors; on a GPU, which blocks the host, only the first few."""
        if self._has_warned:
            return False
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return True
        self._num_checked += 1
        return self._num_checked <= _NUM_CHECKED

    def _warn(self, what: str) -> None:
        self._has_warned = True
        warnings.warn(
            f"the loss function returned {what}; return (sum, count) from it for the result of "
            "one process on the whole batch",
            stacklevel=2,
        )


def labels_of(target: Any) -> dict[str, Any]:
    """Return the target as keywords of a model that computes its loss itself."""
    return dict(target) if isinstance(target, Mapping) else {"labels": target}


def logits_of(output: Any) -> Any:
    """Return the logits of a ModelOutput, which later stages return, too; others unchanged."""
    return output["logits"] if isinstance(output, Mapping) and "logits" in output else output


def loss_of(output: Any) -> Tensor:
    """Return the loss in the output of a model that was given labels."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(output, tuple | list):
        scalars = [x for x in output if isinstance(x, Tensor) and not x.dim()]
        found = scalars[0] if len(scalars) == 1 else None
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.reshape(())
    raise ScheduleError(
        f"the model was given labels, and returned a {type(output).__name__} without a loss",
        expected="`loss`, a scalar, in its output, since there is no loss_fn",
        fix="pass loss_fn=..., or return the loss, as models of transformers do",
    )


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


def _check_is_sum(value: Tensor, calls: "Sequence[_Reduction]") -> None:
    """Refuse a mean in place of the sum, as in (mean, accuracy)."""
    node = value.grad_fn
    is_mean = node is not None and (
        getattr(node, "_saved_reduction", None) == 1  # torch's number of reduction="mean"
        or node.name().startswith("MeanBackward")
    )
    if is_mean or any(call.result is value and call.reduction == "mean" for call in calls):
        raise ScheduleError(
            "the loss function returned a pair, and the first value is a mean",
            expected="a pair (sum, count): the sum of losses, and the number of their labels",
            fix="use reduction='sum', or return (mean * count, count); metrics go elsewhere",
        )


def as_count(count: Any) -> Count:
    """Return a number, or, of a tensor on a GPU, a float64 tensor without dimensions."""
    if isinstance(count, DTensor):
        count = count.full_tensor()
    if not isinstance(count, Tensor):
        return float(count)
    return float(count.item()) if count.is_cpu else count.detach().reshape(()).double()


def _integer_labels(target: Any) -> Tensor | None:
    """Return the labels of a target: its only tensor of integers, or the one named `labels`."""
    if isinstance(target, Mapping) and isinstance(target.get("labels"), Tensor):
        target = target["labels"]
    leaves = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
    labels = [t for t in leaves if not (t.is_floating_point() or t.is_complex())]
    return labels[0] if len(labels) == 1 and labels[0].dtype != torch.bool else None


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A call of a loss of torch.nn.functional."""

    reduction: str
    result: Tensor
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

    def with_target_on_host(self, target: Any, host_target: Any) -> "_Reduction":
        """Count labels on the host, if they are all that were copied to the GPU, and unchanged."""
        found, copied = _integer_labels(host_target), _integer_labels(target)
        if self.weight is not None or found is None or copied is None:
            return self
        if copied.is_inference() or copied._version:  # changed, or nobody knows
            return self
        is_same = self.target.data_ptr() == copied.data_ptr() and copied.is_contiguous()
        is_whole = self.target.numel() == copied.numel() and self.target.is_contiguous()
        return replace(self, target=found) if is_same and is_whole else self

    def count(self) -> Count:
        """Return the number by which a mean divides the sum of losses."""
        if self.target.is_floating_point():
            return self.num_predictions
        is_counted = self.target != self.ignore_index
        if self.weight is None:
            return as_count(is_counted.sum())
        labels = torch.where(is_counted, self.target, 0).flatten()
        return as_count((self.weight.detach().double()[labels] * is_counted.flatten()).sum())


def _is_mean(value: Tensor, calls: Sequence[_Reduction], count: float) -> bool:
    """Return whether `value` is the sum of losses over `count`, but for rounding; or nan."""
    total = sum(float(as_count(call.result.detach().double().sum())) for call in calls)
    mean, tolerance = total / count, max(1e-4, 8 * torch.finfo(value.dtype).eps)
    return not abs(float(as_count(value)) - mean) > tolerance * abs(mean)


def _cross_entropy(
    result: Tensor,
    input: Tensor,  # noqa: A002  # torch's name, by which it may be passed
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> _Reduction | None:
    if size_average is not None or reduce is not None:
        return None
    num_predictions = input.numel() / input.shape[1 if input.dim() > 1 else 0]
    return _Reduction(reduction, result, target, num_predictions, weight, ignore_index)


def _linear_cross_entropy(
    result: Tensor,
    input: Tensor,  # noqa: A002  # torch's name, by which it may be passed
    linear_weight: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    **_: Any,
) -> _Reduction | None:
    num_predictions = input.numel() / input.shape[-1]
    ignored = IGNORE_INDEX if ignore_index is None else ignore_index
    return _Reduction(reduction, result, target, num_predictions, weight, ignored)


_READERS: dict[str, Callable[..., _Reduction | None]] = {
    "cross_entropy": _cross_entropy,
    "nll_loss": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,  # not before torch 2.13
}


class _Reductions(TorchFunctionMode):
    """Finds the losses over labels that run in its context."""

    _READERS: ClassVar[dict[Any, Callable[..., _Reduction | None]]] = {
        getattr(functional, name): reader
        for name, reader in _READERS.items()
        if hasattr(functional, name)
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Reduction] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        reader = self._READERS.get(func)
        if reader is not None and (found := reader(result, *args, **(kwargs or {}))) is not None:
            self.found.append(found)
        return result


_recorders: dict[int, list[_Reduction]] = {}  # of LossFunction.recorded, by thread
_recorders_lock = threading.Lock()


def _recording(function: Callable[..., Any], reader: Callable[..., _Reduction | None]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _record(reader, result, args, kwargs)
        return result

    return call


@torch.compiler.disable  # a recorded tensor is that of a run, not of a trace
def _record(
    reader: Callable[..., _Reduction | None],
    result: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    calls = _recorders.get(threading.get_ident())
    if calls is not None and (found := reader(result, *args, **kwargs)) is not None:
        calls.append(found)


# Made once: torch.compile would compile again for each new function.
_RECORDING = {
    name: _recording(getattr(functional, name), reader)
    for name, reader in _READERS.items()
    if hasattr(functional, name)
}


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
    reports. Evaluation leaves it out. Outside a Pipeline only the gradient is added. A GradScaler
    does not scale it, there or in a `loss_fn`: multiply `loss` by its `get_scale()`, too.
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
