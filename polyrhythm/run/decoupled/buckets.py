"""A bucket: the flat buffer of several parameters, of which each worker owns one shard.

Parameters become views of the buffer, so that the all-gather needs no copy. Gradients are copied
into a second buffer as backward computes them, and leave `.grad`. The optimizer of a worker updates
its shard, split at the boundaries of parameters: each piece has its own state, as if the parameter
were smaller. So a parameter that no worker has used has no gradient, and the optimizer skips it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyrhythm.errors import PolicyError
from polyrhythm.sync.fusion.layers import by_bytes
from polyrhythm.types import Bytes

_ALLOWED_OPS = (torch.ops.aten.detach.default, torch.ops.aten.zero_.default)  # of zero_grad
_ADD_OPS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The piece of one parameter that one worker owns."""

    index: int  # of the parameter, in the optimizer
    start: int  # offset in the parameter, in memory order
    parameter: nn.Parameter  # a view of this piece in the bucket
    gradient: Tensor  # a view of its gradient in the bucket

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


class Bucket:
    """One bucket; with `all_reduce` every worker owns all of it, as with a plain all-reduce."""

    def __init__(
        self,
        number: int,
        parameters: Sequence[tuple[int, nn.Parameter]],
        *,
        rank: int,
        num_workers: int,
        all_reduce: bool,
        late: bool = False,
    ) -> None:
        """Move `parameters`, by index and of one dtype and device, into the buffer.

        `late`: their gradients come in no known order.
        """
        self.number, self.parameters = number, dict(parameters)
        self.is_all_reduce, self.is_late = all_reduce, late
        first = next(iter(self.parameters.values()))
        size = sum(p.numel() for p in self.parameters.values())
        shard_size = -(-size // num_workers)  # rounded up: the last shard is padded
        padded = shard_size * num_workers
        self.weights = torch.zeros(padded, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.weights)
        own_shard = slice(rank * shard_size, min((rank + 1) * shard_size, size))
        self._owned = slice(0, size) if all_reduce else own_shard
        self.offsets: dict[int, int] = {}
        self._filled: set[int] = set()
        self._addresses: dict[int, int] = {}
        offset = 0
        with torch.no_grad():
            for index, parameter in self.parameters.items():
                self.offsets[index] = offset
                view = self.view_of(self.weights, index)
                view.copy_(parameter)
                parameter.data = view
                self._addresses[index] = view.data_ptr()
                offset += parameter.numel()
        self.shards = list(self._make_shards())
        self.owned_gradients = self.gradients[self._owned]  # of all shards, in one piece

    @property
    def is_full(self) -> bool:
        """Whether all gradients are present; frozen parameters have none."""
        return all(i in self._filled or not p.requires_grad for i, p in self.parameters.items())

    def is_filled(self, index: int) -> bool:
        return index in self._filled

    @property
    def missing(self) -> list[int]:
        return [index for index in self.parameters if index not in self._filled]

    def fill(self, index: int) -> None:
        """Copy the gradient of a parameter into the buffer; 0 if it has none."""
        parameter = self.parameters[index]
        view = self.view_of(self.gradients, index)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.layout != torch.strided:
            raise PolicyError(
                f"a sparse gradient of shape {tuple(parameter.shape)}",
                expected="dense gradients, which fit into buckets",
                fix="use nn.Embedding(..., sparse=False)",
            )
        else:
            view.copy_(parameter.grad.detach())
            parameter.grad = InFlightGradient(parameter)
        self._filled.add(index)

    def empty(self) -> None:
        """Forget all gradients, for the next step."""
        self._filled.clear()

    def check_in_place(self, names: Sequence[str]) -> None:
        """Refuse weights that were moved out of the buffer: they would not be updated."""
        for index, parameter in self.parameters.items():
            if parameter.data_ptr() != self._addresses[index]:
                raise PolicyError(
                    f"{names[index]} was moved to other memory",
                    expected="a model that keeps its device and dtype after this optimizer is "
                    "created",
                    fix="call to(), half() and similar methods before creating the optimizer",
                )

    def view_of(self, flat: Tensor, index: int) -> Tensor:
        """View a parameter's range of `flat`, with the parameter's strides if it is dense."""
        parameter, offset = self.parameters[index], self.offsets[index]
        region = flat[offset : offset + parameter.numel()]
        is_dense = torch.ops.aten.is_non_overlapping_and_dense
        if parameter.is_contiguous() or not is_dense(parameter):
            return region.view(parameter.shape)
        return region.as_strided(parameter.shape, parameter.stride(), region.storage_offset())

    def _make_shards(self) -> "list[ParameterShard]":
        shards = []
        for index, parameter in self.parameters.items():
            offset = self.offsets[index]
            start = max(offset, self._owned.start)
            stop = min(offset + parameter.numel(), self._owned.stop)
            if start < stop:
                weights, gradient = self.weights[start:stop], self.gradients[start:stop]
                shards.append(
                    ParameterShard(index, start - offset, nn.Parameter(weights), gradient)
                )
        return shards


class InFlightGradient(Tensor):
    """The placeholder in a parameter's `.grad` while its gradient is averaged: a shape, no numbers.

    The gradient cannot be read then: backward left this worker's own gradient, and only a shard of
    the mean comes back. Code that clips, scales or adds to it gets an error that names the call to
    use instead; with `None`, clipping would silently do nothing.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor) -> Self:
        placeholder: Self = Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        return placeholder

    def __repr__(self) -> str:  # type: ignore[override]
        return f"InFlightGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub declares a function
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        if func in _ALLOWED_OPS:
            return args[0]
        if func in _ADD_OPS:
            raise PolicyError(
                "a backward on top of gradients that are being averaged",
                expected="step() and zero_grad() before the next backward",
                fix="call optimizer.zero_grad() after each step; to accumulate, "
                "with optimizer.no_sync(): loss.backward() for all but the last",
            )
        raise PolicyError(
            f"{func} of a gradient that is being averaged",
            expected="no access to gradients between backward() and step()",
            fix="call optimizer.clip_grad_norm_(max_norm) to clip by the norm of the mean; for an "
            "elementwise operation use the parameters in optimizer.param_groups: their gradients "
            "are this worker's shard of the mean",
        )


def has_gradient(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient that is not being averaged yet."""
    return parameter.grad is not None and not isinstance(parameter.grad, InFlightGradient)


@dataclass(frozen=True, slots=True)
class ParameterOrder:
    """The order in which the forward uses the parameters, by index."""

    indices: tuple[int, ...]  # of all parameters
    late: frozenset[int] = frozenset()  # parameters whose gradients come in no known order

    @classmethod
    def of(cls, seen: Sequence[int], num_parameters: int, late: frozenset[int]) -> "ParameterOrder":
        """Put parameters that the forward has not used last, and mark them late."""
        unseen = frozenset(range(num_parameters)) - set(seen)
        return cls((*seen, *sorted(unseen)), late | unseen)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The parameters of one bucket."""

    indices: tuple[int, ...]
    is_late: bool


def assign_buckets(
    parameters: Sequence[nn.Parameter], order: ParameterOrder, bucket_bytes: Bytes
) -> tuple[BucketSpec, ...]:
    """Fill buckets of about `bucket_bytes`, sorted by the first use of a bucket in the forward.

    A bucket has neighbours in forward order, of one dtype and device. All workers assign the same:
    rank 0 broadcasts the order first.
    """
    kinds: dict[tuple[object, object, bool], list[int]] = {}
    for index in order.indices:
        kind = parameters[index].dtype, parameters[index].device, index in order.late
        kinds.setdefault(kind, []).append(index)
    position = {index: number for number, index in enumerate(order.indices)}
    specs = [
        BucketSpec(tuple(indices[i] for i in run), is_late)
        for (_, _, is_late), indices in kinds.items()
        for run in by_bytes([parameters[i].nbytes for i in indices], bucket_bytes)
    ]
    return tuple(sorted(specs, key=lambda spec: position[spec.indices[0]]))
