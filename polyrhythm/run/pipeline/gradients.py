"""Gradients across stages: the sum over tied parameters, and the norm for clipping."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Parameter

from polyrhythm.run.comm.peer_errors import peer_errors
from polyrhythm.run.comm.process_groups import all_reduce, receive, send
from polyrhythm.run.pipeline.partition import TiedParameter
from polyrhythm.run.pipeline.transport import Connections
from polyrhythm.run.pipeline.wrappers import local

_TAG = 2**22 + 2  # differs from the tags of batch headers and clocks


class TiedGradients:
    """Parameters that several stages hold: each holder gets the sum of all their gradients.

    The first holder adds them up, so that all holders have bit-identical sums.
    """

    def __init__(
        self, module: nn.Module, tied: Sequence[TiedParameter], connections: Connections
    ) -> None:
        self._module, self._tied, self._connections = module, tied, connections

    @contextmanager
    def sum_gradients(self) -> Iterator[None]:
        """Sum the gradients of this block; gradients from before it are already summed."""
        trained = [(tie, p) for tie, p in self._parameters() if p.requires_grad]
        before = [parameter.grad for _, parameter in trained]
        for _, parameter in trained:
            parameter.grad = None
        yield
        for (tie, parameter), previous in zip(trained, before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            with peer_errors("another stage", f"summing the gradient of {tie.key}"):
                gradient.copy_(self._total(gradient.cpu().contiguous(), tie))
            if previous is not None:
                parameter.grad += previous

    def _parameters(self) -> list[tuple[TiedParameter, Parameter]]:
        """Return the current parameters: sharding a module replaces them."""
        return [(tie, self._module.get_parameter(tie.name)) for tie in self._tied]

    def _total(self, gradient: Tensor, tie: TiedParameter) -> Tensor:
        control = self._connections.control
        first, *others = tie.stages
        if self._connections.stage != first:
            send(control, gradient, first, tag=_TAG)
            receive(control, gradient, first, tag=_TAG)
            return gradient
        received = torch.empty_like(gradient)
        total = gradient.clone()
        for other in others:
            receive(control, received, other, tag=_TAG)
            total += received
        for other in others:
            send(control, total, other, tag=_TAG)
        return total

    def parameters(self) -> set[Parameter]:
        return {parameter for _, parameter in self._parameters()}

    def not_owned(self) -> set[Parameter]:
        """Return this stage's tied parameters that an earlier stage owns."""
        return {p for tie, p in self._parameters() if tie.stages[0] != self._connections.stage}


def clip_grad_norm(
    parameters: Iterable[Parameter],
    max_norm: float,
    *,
    norm_type: float,
    not_counted: set[Parameter],
    control: dist.ProcessGroup | None,
) -> Tensor:
    """Scale the gradients of all stages as those of one model; return their norm before."""
    with_gradient = [p for p in parameters if p.grad is not None]
    counted = [p.grad for p in with_gradient if p not in not_counted and p.grad is not None]
    # In double precision: the sum of squares of a whole model may overflow float32.
    total = torch.tensor(0.0, dtype=torch.float64)
    if counted:
        norms = torch.stack([_norm(gradient, norm_type) for gradient in counted])
        total = norms.max() if norm_type == float("inf") else (norms**norm_type).sum()
    norm = norm_over_stages(total, norm_type, control)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for parameter in with_gradient:
        assert parameter.grad is not None, "selected because it has one"
        parameter.grad.mul_(scale)
    return norm.float()


def norm_over_stages(total: Tensor, norm_type: float, control: dist.ProcessGroup | None) -> Tensor:
    """Combine each stage's sum of powers, or its largest number, into the norm of all stages."""
    is_largest = norm_type == float("inf")
    if control is not None:
        operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        with peer_errors("another stage", "reducing the norm of the gradients"):
            all_reduce(control, total, operation)
    return total if is_largest else total ** (1.0 / norm_type)


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Return the norm of a gradient; of a sharded one, the norm of the whole."""
    norm = torch.linalg.vector_norm(gradient, norm_type)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().cpu()
