"""Flatten what is averaged into one buffer: weights or gradients, statistics, optimizer state.

One message instead of one per tensor. The buffer is in CPU memory, from which gloo sends; every
read makes a new one, so that training can continue while the buffer is in flight.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, islice, zip_longest
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.run.coordinator.sessions import TensorShapes
from polyrhythm.run.pipeline.loss import divide_by
from polyrhythm.types import Worker

_DIVISOR_UNIT = 256.0  # both parts of an integer up to 65535 are exact in bfloat16
OptimizerStateMode = Literal["local", "average"]


class FlatBuffer:
    """Tensors that are copied into one flat buffer and back, in place.

    Each of `states` has tensors of one shape that a training step decays or replaces, such as the
    moments of one parameter; they follow the `tensors` that a step adds to.
    """

    def __init__(self, tensors: Sequence[Tensor], states: Sequence[Sequence[Tensor]] = ()) -> None:
        self._num_added, self._num_states = len(tensors), [len(state) for state in states]
        self._tensors = [_local(tensor) for tensor in chain(tensors, *states)]
        self.dtype = _common_dtype([tensor.dtype for tensor in self._tensors])
        self.size = sum(tensor.numel() for tensor in self._tensors)

    def read(self) -> Tensor:
        flat = torch.empty(self.size, dtype=self.dtype, device="cpu")
        for tensor, view in self.views(flat):
            view.copy_(tensor.detach())
        return flat

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        for tensor, view in self.views(flat):
            tensor.copy_(view)

    @torch.no_grad()
    def apply(self, published: Tensor, mean: Tensor) -> None:
        """Apply the mean of what `published` was part of to tensors that have changed since.

        Weights: add the difference, since writing the mean would undo an optimizer step. Of state,
        which decays, the current value holds only a share of the published one: only this share is
        replaced by the mean's. An average of non-negative state is so never negative.
        """
        views = zip(self.views(published), self.views(mean), strict=True)
        triples = [(tensor, before, after) for (tensor, before), (_, after) in views]
        for tensor, before, after in triples[: self._num_added]:
            difference = after - before
            tensor.copy_(tensor + difference.to(tensor.device))  # half precision: rounded once
        rest = iter(triples[self._num_added :])
        for num in self._num_states:
            state = list(islice(rest, num))
            for (tensor, _, _), merged in zip(state, merge_state(state), strict=True):
                tensor.copy_(merged)

    def merge(self, flat: Tensor, published: Tensor, mean: Tensor) -> Tensor:
        """Return `flat`, which was read later than `published`, with the mean applied to it."""
        merged = flat.clone()
        views = iter([view for _, view in self.views(merged)])
        tensors = list(islice(views, self._num_added))
        states = [list(islice(views, num)) for num in self._num_states]
        FlatBuffer(tensors, states).apply(published, mean)
        return merged

    def views(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor with its view into `flat`."""
        views = flat.split([tensor.numel() for tensor in self._tensors])
        for tensor, view in zip(self._tensors, views, strict=True):
            yield tensor, view.view(tensor.shape)


@dataclass(slots=True)
class ReplicaState:
    """The trainable weights, running statistics and, with state="average", optimizer state."""

    module: nn.Module
    optimizer: Optimizer
    state: OptimizerStateMode = "local"
    decoupled: bool = False  # averages arrive during the forward
    order: list[int] = field(default_factory=list, init=False)  # of tensors in the buffer
    _trainable: list[nn.Parameter] = field(init=False)
    _last_flat: FlatBuffer = field(init=False)

    def __post_init__(self) -> None:
        if self.state not in ("local", "average"):
            raise PolicyError(
                f"state={self.state!r}",
                expected='"local" or "average"',
                fix='use state="average" to average momentum and other state, else "local"',
            )
        self._trainable = trainable_parameters(self.module)

    @property
    def num_weights(self) -> int:
        """Number of trained elements; they are first in the buffer, unless `order` is set."""
        return sum(_local(p).numel() for p in self._trainable)

    def flat(self) -> FlatBuffer:
        """Return the buffer; call it after the optimizer's first step, which creates its state."""
        if any(
            p is not q for p, q in zip_longest(trainable_parameters(self.module), self._trainable)
        ):
            raise PolicyError(
                "the trainable parameters have changed since the GroupSync was created",
                expected="the same trainable parameters throughout",
                fix="create a new GroupSync when parameters are frozen or unfrozen",
            )
        tensors, states = self.averaged_tensors(), list[list[Tensor]]()
        if self.order:  # averages arrive in the forward: none is applied later
            tensors = [tensors[number] for number in self.order]
        else:
            num = len(self._trainable)
            tensors, states = tensors[:num], [[statistics] for statistics in tensors[num:]]
        if self.state == "average":
            states += optimizer_state(self.optimizer, self._trainable)
        self._last_flat = FlatBuffer(tensors, states)
        return self._last_flat

    def merge(self, flat: Tensor, published: Tensor, mean: Tensor) -> Tensor:
        """Return `flat` with an average of an earlier buffer applied; safe in another thread."""
        return self._last_flat.merge(flat, published, mean)

    def averaged_tensors(self) -> list[Tensor]:
        """Return the weights, then the running statistics."""
        return [*self._trainable, *running_statistics(self.module)]

    def all_tensors(self) -> list[FlatBuffer]:
        """Return one FlatBuffer per dtype, parameters first; includes what is never averaged.

        Buffers differ more often: each replica has counts and statistics of its own samples.
        """
        buffers = []
        for kind in (self.module.parameters(), self.module.buffers()):
            tensors = [tensor for tensor in kind if tensor.numel()]
            types = dict.fromkeys(tensor.dtype for tensor in tensors)
            buffers += [FlatBuffer([t for t in tensors if t.dtype == dtype]) for dtype in types]
        return buffers

    def shape(self) -> TensorShapes:
        """Describe all tensors; the description must be equal in all workers of a stage."""
        named: list[tuple[str, Tensor]] = [
            (name if p.requires_grad else f"{name} (frozen)", p)
            for name, p in self.module.named_parameters()
        ]
        named += self.module.named_buffers()
        shape = [
            (f"{name}: {str(t.dtype).removeprefix('torch.')}", tuple(_local(t).shape))
            for name, t in named
        ]
        if self.state == "average":
            shape.append((f"state of {type(self.optimizer).__name__}", ()))
        if self.decoupled:
            shape.append(("an all-gather during the forward (decoupled=True)", ()))
        return tuple(shape)


@dataclass(slots=True)
class GradientBuffer:
    """The gradients, and which parameters have one; a gradient that no worker has stays None."""

    module: nn.Module

    def read(self, divisor: float = 1.0) -> Tensor:
        """Return gradients, running statistics, per parameter a 1 if it has a gradient, `divisor`.

        The divisor is two numbers: in half precision one would overflow, or be rounded.
        """
        parameters = trainable_parameters(self.module)
        flat = FlatBuffer([*self._gradients(parameters), *running_statistics(self.module)]).read()
        rest = [*(float(p.grad is not None) for p in parameters), *divmod(divisor, _DIVISOR_UNIT)]
        return torch.cat([flat, torch.tensor(rest, dtype=flat.dtype, device="cpu")])

    @torch.no_grad()
    def write(self, flat: Tensor, *, divides: bool) -> None:
        """Write back the average of what `read` returned; divide gradients by the divisor."""
        parameters = trainable_parameters(self.module)
        divisor = _DIVISOR_UNIT * float(flat[-2].real) + float(flat[-1].real)
        flat = flat[:-2]
        any_has_grad = flat[-len(parameters) :].real > 0
        for parameter, has in zip(parameters, any_has_grad.tolist(), strict=True):
            if has and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = flat[: -len(parameters)]
        if divides:
            divide_by(divisor, [flat[: sum(_local(p).numel() for p in parameters)]])
        tensors = self._gradients(parameters)  # a missing one is a zero that is thrown away
        FlatBuffer([*tensors, *running_statistics(self.module)]).write(flat)

    def _gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        if any(p.grad is not None and p.grad.layout != torch.strided for p in parameters):
            raise PolicyError(
                "a sparse gradient",
                expected="dense gradients, which can be averaged as one buffer",
                fix="use nn.Embedding(..., sparse=False), or a policy that averages models",
            )
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def is_finite(flat: Tensor) -> bool:
    """Whether a buffer has neither nan nor inf; a look at the sum is enough if it is finite."""
    return bool(flat.sum().isfinite()) or bool(flat.isfinite().all())


def check_finite(flat: Tensor, worker: Worker) -> None:
    """Refuse to average weights that are not finite: the average would spread them."""
    if not is_finite(flat):
        raise PolicyError(
            f"the weights of {worker} are not finite, and are not averaged",
            expected="finite weights, statistics and averaged optimizer state",
            fix="use a lower learning rate or clip gradients, and restore this worker from a "
            "checkpoint; the others keep finite weights",
        )


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return running means and variances of normalisation layers; counts are not averaged."""
    layers = (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    buffers = (buffer for layer in layers for buffer in layer.buffers(recurse=False))
    return [buffer for buffer in buffers if buffer.is_floating_point()]


def optimizer_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> list[list[Tensor]]:
    """Return the optimizer's tensors of each parameter's shape, such as momentum, by parameter.

    All workers need the same lists: a missing tensor is a zero that is thrown away.
    """
    states = [(p, optimizer.state.get(p, {})) for p in parameters]
    dtypes = {
        key: value.dtype
        for p, state in states
        for key, value in state.items()
        if _is_like(value, p)
    }
    for key, dtype in dtypes.items():
        if not (dtype.is_floating_point or dtype.is_complex):
            raise PolicyError(
                f"the state {key!r} of {type(optimizer).__name__} holds {dtype}",
                expected="floating-point state: codes, masks and counts have no mean",
                fix='use GroupSync(..., state="local")',
            )
    keys = sorted(dtypes)
    return [
        [state[key] if _is_like(state.get(key), p) else torch.zeros_like(p) for key in keys]
        for p, state in states
    ]


def merge_state(state: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Replace what the current state still holds of the published one by as much of the mean.

    `state` has the current, the published and the mean tensor of each kind, such as Adam's two
    moments. Names and decays of an optimizer are unknown, so the share is measured. Of an element
    that is never negative it is at most current / published, exact if it has only decayed; signed
    tensors such as momentum take at most the same share of each element, so that a step from Adam's
    first moment stays in proportion to its second, and at most their projection on the published
    tensor: a difference that they have forgotten would otherwise add up from average to average.
    """
    wide = [tuple(_to_real(tensor, triple[0]) for tensor in triple) for triple in state]
    share = torch.ones((), device=state[0][0].device)
    is_signed = [any(bool((tensor < 0).any()) for tensor in triple) for triple in wide]
    for (current, published, _), signed in zip(wide, is_signed, strict=True):
        if not signed:
            share = torch.minimum(share, (current / published).nan_to_num_(1.0))  # 0 / 0: all
    merged = []
    for (current, published, mean), signed in zip(wide, is_signed, strict=True):
        kept = share
        if signed and (largest := published.abs().max()) > 0:
            unit = published / largest  # its square neither overflows nor underflows
            projection = (current / largest * unit).sum() / unit.square().sum()
            kept = share.clamp_max(projection.nan_to_num(0.0).clamp(0.0, 1.0))
        rest = torch.addcmul(current, kept, published, value=-1)
        merged.append((rest if signed else rest.clamp_min_(0.0)).addcmul_(kept, mean))
    merged = _keep_variances(wide, merged, is_signed)
    return [
        torch.view_as_complex(tensor) if current.is_complex() else tensor
        for tensor, (current, _, _) in zip(merged, state, strict=True)
    ]


def _keep_variances(
    state: Sequence[tuple[Tensor, ...]], merged: Sequence[Tensor], is_signed: Sequence[bool]
) -> list[Tensor]:
    """Keep current elements where a second moment would become less than a squared first one.

    An optimizer may take the root of their difference, as RMSprop(centered=True). Shares that are
    measured may be too large; where a difference was negative before, no optimizer needs it.
    """
    moments = list(zip(state, merged, is_signed, strict=True))
    is_lost = torch.zeros((), dtype=torch.bool, device=merged[0].device)
    for firsts, first, _ in (moment for moment in moments if moment[2]):
        for seconds, second, _ in (moment for moment in moments if not moment[2]):
            broken = first.square() > second
            for before, square in zip(firsts, seconds, strict=True):
                broken &= before.square() <= square
            is_lost = is_lost | broken
    return [torch.where(is_lost, current, new) for (current, *_), new, _ in moments]


def _to_real(tensor: Tensor, current: Tensor) -> Tensor:
    """Return real numbers of single precision or more, where `current` is; a complex one is two."""
    wide = torch.promote_types(current.dtype, torch.float32)
    real = tensor.detach().to(current.device, wide)
    return torch.view_as_real(real) if real.is_complex() else real


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0


def _local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor: replicas of a stage are sharded in the same way."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _common_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype to which all `dtypes` promote."""
    return reduce(torch.promote_types, dtypes)
