"""The placeholder in a parameter's `.grad` while its gradient is being averaged.

The gradient cannot be read then: backward left this worker's own gradient, and only a shard of the
mean comes back. Code that clips, scales or adds to it gets an error that names the call to use
instead; with `None`, clipping would silently do nothing.
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from polyrhythm.errors import PolicyError

_ALLOWED_OPS = (torch.ops.aten.detach.default, torch.ops.aten.zero_.default)  # of zero_grad
_ADD_OPS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class InFlightGradient(Tensor):
    """A tensor with the shape of a gradient and without its numbers."""

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
