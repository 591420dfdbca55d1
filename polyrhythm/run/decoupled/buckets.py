"""A bucket: the flat buffer of several parameters, of which each worker owns one shard.

Parameters become views of the buffer, so that the all-gather needs no copy. Gradients leave `.grad`
as backward computes them, and are copied into a second buffer, several at a time. The optimizer of
a worker updates its shard, split at the boundaries of parameters: each piece has its own state, as
if the parameter were smaller. So a parameter that no worker has used has no gradient, and the
optimizer skips it.

With buddies a worker also updates a copy of the previous worker's shard, from the same gradients:
one lost worker loses no state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyrhythm.errors import PolicyError
from polyrhythm.sync.fusion.layers import by_bytes
from polyrhythm.types import Bytes

_ALLOWED_OPS = (torch.ops.aten.detach.default, torch.ops.aten.zero_.default)  # of zero_grad
_ADD_OPS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
# Smaller gradients wait for each other: on a GPU the start of a kernel takes longer than its copy.
_MAX_WAITING: Bytes = 1_000_000
STRIDED = torch.strided


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The piece of one parameter that one worker owns, or of which it has the copy, as a buddy."""

    index: int  # of the parameter, in the optimizer
    start: int  # offsets in the parameter, in memory order
    stop: int
    parameter: nn.Parameter  # a view of this piece in the bucket, the key of its state
    gradient: Tensor  # a view of its gradient in the bucket
    is_own: bool = True


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a flat parameter of which a worker holds weights and the whole state."""

    index: int  # of the parameter, in the optimizer
    start: int  # offsets in the parameter, in memory order
    stop: int
    weights: Tensor
    state: Mapping[str, Any]  # flat tensors, and scalars
    is_own: bool  # False for the copy of another worker's shard


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
        buddy: bool = False,
    ) -> None:
        """Move `parameters`, by index and of one dtype and device, into the buffer.

        `late`: their gradients come in no known order. `buddy`: hold a copy of the previous shard.
        """
        self.number, self.parameters = number, dict(parameters)
        self.is_all_reduce, self.is_late = all_reduce, late
        first = next(iter(self.parameters.values()))
        size = sum(p.numel() for p in self.parameters.values())
        shard_size = -(-size // num_workers)  # rounded up: the last shard is padded
        self.size, self.device = shard_size * num_workers, first.device
        self.weights = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        own_shard = slice(rank * shard_size, min((rank + 1) * shard_size, size))
        self._owned = slice(0, size) if all_reduce else own_shard
        previous = (rank - 1) % num_workers * shard_size
        has_copy = buddy and not all_reduce and num_workers > 1
        self._copied = slice(min(previous, size), min(previous + shard_size * has_copy, size))
        self.offsets: dict[int, int] = {}
        offset = 0
        for index, parameter in self.parameters.items():
            self.offsets[index] = offset
            offset += parameter.numel()
        self._move_weights()
        self.gradients = torch.zeros_like(self.weights)
        self.shards = list(self._make_shards(self._owned, self.weights[self._owned], is_own=True))
        # Weights that no all-gather overwrites: the owner may send its new ones at any time.
        self.buddy_weights = self.weights[self._copied].clone()
        self.buddy_shards = list(self._make_shards(self._copied, self.buddy_weights, is_own=False))
        # Of all shards, and of all copies, in one piece each.
        self.owned_gradients = self.gradients[self._owned]
        self.copied_gradients = self.gradients[self._copied]
        self._gradient_of = {i: self.view_of(self.gradients, i) for i in self.parameters}
        self._nbytes_of = {i: p.nbytes for i, p in self.parameters.items()}
        self.filled: set[int] = set()  # parameters whose gradients are in the buffer or waiting
        self.expected: set[int] = set()  # parameters whose gradients are still to come
        self._waiting: list[tuple[int, Tensor]] = []  # gradients that are not copied yet
        self._waiting_bytes: Bytes = 0
        self._num_left = len(self.parameters)

    @property
    def held_shards(self) -> list[ParameterShard]:
        """The own shards and the copies."""
        return self.shards + self.buddy_shards

    @torch.no_grad()
    def copy_buddy_weights(self) -> None:
        """Before an update: begin with the weights of this worker's model, which are complete."""
        self.buddy_weights.copy_(self.weights[self._copied])

    def expect_gradients(self) -> None:
        """Before a backward: expect the gradients of all parameters that are not frozen."""
        self.expected = {i for i, p in self.parameters.items() if p.requires_grad}

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Take the gradient of a parameter; copy those that wait if they are large or complete."""
        self.filled.add(index)
        self.expected.discard(index)
        self._waiting.append((index, gradient))
        self._waiting_bytes += self._nbytes_of[index]
        if self._waiting_bytes >= _MAX_WAITING or not self.expected:
            self.copy_gradients()

    def copy_gradients(self) -> None:
        """Copy the gradients that wait into the buffer, by one kernel on a GPU."""
        if self._waiting:
            into = [self._gradient_of[index] for index, _ in self._waiting]
            with torch.no_grad():
                torch._foreach_copy_(into, [gradient for _, gradient in self._waiting])
            self._waiting.clear()
            self._waiting_bytes = 0

    @property
    def missing(self) -> list[int]:
        return [index for index in self.parameters if index not in self.filled]

    def fill_zeros(self) -> None:
        """Complete the buffer: gradients that are missing are 0."""
        if missing := self.missing:
            torch._foreach_zero_([self._gradient_of[index] for index in missing])
            self.filled.update(missing)
        self.copy_gradients()

    def empty(self) -> None:
        """Forget all gradients, for the next step."""
        self.filled.clear()
        self._waiting.clear()
        self._waiting_bytes = 0

    def release_gradients(self) -> None:
        """Free the gradients, before other buckets replace this one."""
        empty = self.gradients.new_empty(0)
        self.gradients = self.owned_gradients = self.copied_gradients = empty
        self.shards = [replace(shard, gradient=empty) for shard in self.shards]
        self.buddy_shards = [replace(shard, gradient=empty) for shard in self.buddy_shards]
        self._gradient_of.clear()

    def release_parameter(self) -> None:
        """Count a parameter that has moved to another bucket; free the weights after the last.

        What is left is who owns which state.
        """
        self._num_left -= 1
        if not self._num_left:
            self.weights = self.buddy_weights = self.weights.new_empty(0)
            for shard in self.held_shards:
                shard.parameter.data = self.weights

    def view_of(self, flat: Tensor, index: int) -> Tensor:
        """View a parameter's range of `flat`, with the parameter's strides if it is dense."""
        parameter, offset = self.parameters[index], self.offsets[index]
        return view_as_parameter(flat[offset : offset + parameter.numel()], parameter)

    @torch.no_grad()
    def _move_weights(self) -> None:
        views = [self.view_of(self.weights, index) for index in self.parameters]
        torch._foreach_copy_(views, list(self.parameters.values()))
        for parameter, view in zip(self.parameters.values(), views, strict=True):
            parameter.data = view

    def _make_shards(
        self, region: slice, weights: Tensor, *, is_own: bool
    ) -> Iterator[ParameterShard]:
        """Split a region, which has these weights, at the boundaries of parameters."""
        for index, parameter in self.parameters.items():
            offset = self.offsets[index]
            start = max(offset, region.start)
            stop = min(offset + parameter.numel(), region.stop)
            if start < stop:
                piece = weights[start - region.start : stop - region.start]
                gradient = self.gradients[start:stop]
                yield ParameterShard(
                    *(index, start - offset, stop - offset, nn.Parameter(piece), gradient),
                    is_own=is_own,
                )


def view_as_parameter(flat: Tensor, parameter: Tensor) -> Tensor:
    """View numbers in memory order as the parameter, with its strides if it is dense."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense
    if parameter.is_contiguous() or not is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def flat_view(parameter: Tensor) -> Tensor:
    """View a dense parameter flat, in memory order; copy another one."""
    flat = parameter.detach()
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.reshape(-1)
    return flat.as_strided((parameter.numel(),), (1,), parameter.storage_offset())


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


def sparse_error(gradient: Tensor) -> PolicyError:
    return PolicyError(
        f"a sparse gradient of shape {tuple(gradient.shape)}",
        expected="dense gradients, which fit into buckets",
        fix="use nn.Embedding(..., sparse=False)",
    )


def has_gradient(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient that is not being averaged yet."""
    return parameter.grad is not None and not isinstance(parameter.grad, InFlightGradient)


@dataclass(frozen=True, slots=True)
class ParameterOrder:
    """The order in which the forward uses the parameters, by index."""

    indices: tuple[int, ...]  # of all parameters
    late: frozenset[int] = frozenset()  # parameters whose gradients come in no known order
    num_unseen: int = 0  # the last ones, which the forward has not used

    @classmethod
    def of(cls, seen: Sequence[int], num_parameters: int, late: frozenset[int]) -> "ParameterOrder":
        """Put parameters that the forward has not used last, and mark them late."""
        unseen = frozenset(range(num_parameters)) - set(seen)
        return cls((*seen, *sorted(unseen)), late | unseen, len(unseen))

    @property
    def unseen(self) -> tuple[int, ...]:
        """Parameters for which no forward hook waits."""
        return self.indices[len(self.indices) - self.num_unseen :]


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
