"""What stands in a parameter's `.grad` once its gradient has gone to be averaged.

From then on the gradient is not here to look at: what backward left was this worker's alone, and
what comes back is a part of the mean. Whoever would clip, scale or add to it in the usual way gets
an error that says what to call instead, where `None` would let clipping do nothing.
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from polyrhythm.errors import PolicyError

_ALLOWED_OPS = (torch.ops.aten.detach.default, torch.ops.aten.zero_.default)  # of zero_grad
_ADD_OPS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class InFlightGradient(Tensor):
    """Of the shape of a gradient, without its numbers."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> Self:
        found: Self = Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"InFlightGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # whose stub is that of a function
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
                "a backward on top of gradients that have gone to be averaged",
                expected="step() and zero_grad() before the next backward",
                fix="call optimizer.zero_grad() after each step; to accumulate, "
                "with optimizer.no_sync(): loss.backward() for all but the last",
            )
        raise PolicyError(
            f"{func} of a gradient that has gone to be averaged",
            expected="gradients left alone between backward() and step()",
            fix="optimizer.clip_grad_norm_(max_norm) clips by the norm of the mean of all workers; "
            "for what treats each number by itself, take the parameters of "
            "optimizer.param_groups: they have this worker's part of the mean",
        )


def has_gradient(parameter: Tensor) -> bool:
    """That has not gone yet."""
    return parameter.grad is not None and not isinstance(parameter.grad, InFlightGradient)
