"""A bucket: parameters that travel together, as one flat buffer of which each worker owns a part.

Parameters become views of the buffer, so that what is gathered into it needs no copy. Gradients are
copied into a second one as they come, and leave `.grad`. The part of this worker, cut where its
parameters begin and end, is what its optimizer updates: segments, each with a state of its own, as
if the parameter were smaller. So a parameter that nobody has used has no gradient, and is left out
by the optimizer as ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyrhythm.errors import PolicyError
from polyrhythm.run.decoupled.in_flight_gradient import InFlightGradient


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """What one worker owns of one parameter."""

    index: int  # of the parameter, in the optimizer
    start: int  # in the parameter, as it lies in memory
    parameter: nn.Parameter  # of these numbers alone, in the bucket
    gradient: Tensor  # in the bucket

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


class Bucket:
    """`whole`: every worker owns all of it, as with a plain all-reduce."""

    def __init__(
        self,
        number: int,
        parameters: Sequence[tuple[int, nn.Parameter]],
        *,
        rank: int,
        num_workers: int,
        whole: bool,
        late: bool = False,
    ) -> None:
        """Takes the parameters in: `parameters` are those of one type and device, by index.

        `late`: their gradients come when they like.
        """
        self.number, self.parameters = number, dict(parameters)
        self.is_all_reduce, self.is_late = whole, late
        first = next(iter(self.parameters.values()))
        size = sum(p.numel() for p in self.parameters.values())
        self.shard_size = -(-size // num_workers)  # rounded up: the last part is padded
        padded = self.shard_size * num_workers
        self.weights = torch.zeros(padded, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.weights)
        self.own_shard = slice(rank * self.shard_size, (rank + 1) * self.shard_size)
        self._owned = (
            slice(0, size) if whole else slice(self.own_shard.start, min(self.own_shard.stop, size))
        )
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

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    @property
    def is_full(self) -> bool:
        """All gradients are here that are to come: not those of frozen parameters."""
        return all(i in self._filled or not p.requires_grad for i, p in self.parameters.items())

    def is_filled(self, index: int) -> bool:
        return index in self._filled

    @property
    def missing(self) -> list[int]:
        return [index for index in self.parameters if index not in self._filled]

    def fill(self, index: int) -> None:
        """Take the gradient of a parameter; 0 if it has none."""
        parameter = self.parameters[index]
        view = self.view_of(self.gradients, index)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.layout != torch.strided:
            raise PolicyError(
                f"a sparse gradient of shape {tuple(parameter.shape)}",
                expected="dense ones, which travel in buckets",
                fix="use nn.Embedding(..., sparse=False)",
            )
        else:
            view.copy_(parameter.grad.detach())
            parameter.grad = InFlightGradient(parameter)
        self._filled.add(index)

    def empty(self) -> None:
        """For the next step."""
        self._filled.clear()

    def find_replaced(self) -> int | None:
        """The first parameter that is not a view of the buffer any more."""
        found = (i for i, p in self.parameters.items() if p.data_ptr() != self._addresses[i])
        return next(found, None)

    def view_of(self, flat: Tensor, index: int) -> Tensor:
        """What such a buffer has of a parameter, with its own strides if these leave no holes."""
        parameter, offset = self.parameters[index], self.offsets[index]
        region = flat[offset : offset + parameter.numel()]
        if parameter.is_contiguous() or not _is_dense(parameter):
            return region.view(parameter.shape)
        return region.as_strided(parameter.shape, parameter.stride(), region.storage_offset())

    def _make_shards(self) -> "list[ParameterShard]":
        found = []
        for index, parameter in self.parameters.items():
            offset = self.offsets[index]
            start = max(offset, self._owned.start)
            stop = min(offset + parameter.numel(), self._owned.stop)
            if start < stop:
                weights, gradient = self.weights[start:stop], self.gradients[start:stop]
                found.append(ParameterShard(index, start - offset, nn.Parameter(weights), gradient))
        return found


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers lie next to each other, in whatever order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda d: d[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
