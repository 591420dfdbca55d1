"""Gradients that concern several stages: of tied parameters, and the norm that clipping needs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Parameter

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import all_reduce, receive, send
from polyrhythm.run.pipeline.connections import Connections
from polyrhythm.run.pipeline.partition import TiedParameter
from polyrhythm.run.pipeline.wrappers import local

_TAG = 2**22 + 2  # apart from those that briefings and clocks use


class TiedGradients:
    """Parameters that several stages hold: each holder gets the sum of all their gradients.

    The first holder adds them up, so that all have the same to the bit.
    """

    def __init__(
        self, module: nn.Module, tied: Sequence[TiedParameter], connections: Connections
    ) -> None:
        self._module, self._tied, self._connections = module, tied, connections

    @contextmanager
    def sum_gradients(self) -> Iterator[None]:
        """Sum what this block adds; gradients that were there before have been summed already."""
        trained = [(tie, p) for tie, p in self._parameters() if p.requires_grad]
        before = [parameter.grad for _, parameter in trained]
        for _, parameter in trained:
            parameter.grad = None
        yield
        for (tie, parameter), old in zip(trained, before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            with peer_errors("another stage", f"summing the gradient of {tie.key}"):
                gradient.copy_(self._total(gradient.cpu().contiguous(), tie))
            if old is not None:
                parameter.grad += old

    def _parameters(self) -> list[tuple[TiedParameter, Parameter]]:
        """As they are now: sharding a module replaces them."""
        return [(tie, self._module.get_parameter(tie.name)) for tie in self._tied]

    def _total(self, mine: Tensor, tie: TiedParameter) -> Tensor:
        control = self._connections.control
        first, *others = tie.stages
        if self._connections.stage != first:
            send(control, mine, first, tag=_TAG)
            receive(control, mine, first, tag=_TAG)
            return mine
        theirs = torch.empty_like(mine)
        total = mine.clone()
        for other in others:
            receive(control, theirs, other, tag=_TAG)
            total += theirs
        for other in others:
            send(control, total, other, tag=_TAG)
        return total

    def parameters(self) -> set[Parameter]:
        return {parameter for _, parameter in self._parameters()}

    def not_owned(self) -> set[Parameter]:
        """Those of our parameters that an earlier stage counts as its own."""
        return {p for tie, p in self._parameters() if tie.stages[0] != self._connections.stage}


def clip_grad_norm(
    parameters: Iterable[Parameter],
    max_norm: float,
    *,
    norm_type: float,
    not_counted: set[Parameter],
    control: dist.ProcessGroup | None,
) -> Tensor:
    """Scale the gradients of all stages as if they were one model's; returns their norm before."""
    with_gradient = [p for p in parameters if p.grad is not None]
    counted = [p.grad for p in with_gradient if p not in not_counted and p.grad is not None]
    # In double precision: the sum of squares of a whole model may not fit float32.
    total = torch.tensor(0.0, dtype=torch.float64)
    if counted:
        norms = torch.stack([_norm(gradient, norm_type) for gradient in counted])
        total = norms.max() if norm_type == float("inf") else (norms**norm_type).sum()
    norm = norm_over_stages(total, norm_type, control)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for parameter in with_gradient:
        assert parameter.grad is not None, "chosen for it"
        parameter.grad.mul_(scale)
    return norm.float()


def norm_over_stages(total: Tensor, norm_type: float, control: dist.ProcessGroup | None) -> Tensor:
    """Of all, given this stage's sum of powers, or its largest number."""
    is_largest = norm_type == float("inf")
    if control is not None:
        operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        with peer_errors("another stage", "agreeing on the norm of the gradients"):
            all_reduce(control, total, operation)
    return total if is_largest else total ** (1.0 / norm_type)


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Of a gradient of which other processes hold pieces, that of the whole."""
    norm = torch.linalg.vector_norm(gradient, norm_type)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().cpu()
