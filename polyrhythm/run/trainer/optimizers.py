"""Optimizers and learning rate schedules by their usual settings, for the Trainer.

    optimizer_fn, lr_schedule = pr.adamw(lr=3e-4, weight_decay=0.1), pr.cosine(warmup=100)
    trainer = pr.Trainer(..., optimizer_fn=optimizer_fn, lr_schedule=lr_schedule)

Every stage makes its own optimizer of its own parameters, so an optimizer is given as a function.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from polyrhythm.errors import LaunchError

_logger = logging.getLogger(__name__)
NamedParameters = Iterable[tuple[str, nn.Parameter]]


def adamw(
    lr: float, weight_decay: float = 0.01, **options: Any
) -> Callable[[NamedParameters], Optimizer]:
    """Return an `optimizer_fn` that makes torch's AdamW, with its further options.

    Biases and the weights of norms, which have fewer than two dimensions, are not decayed. On a GPU
    it is fused by default: in float16, or with on_nan="skip", the host then waits for no step.
    """

    def make(named: NamedParameters) -> Optimizer:
        named = list(named)
        decayed = [(name, parameter) for name, parameter in named if parameter.dim() >= 2]
        others = [(name, parameter) for name, parameter in named if parameter.dim() < 2]
        # Both groups on every stage, also an empty one: stages have the same groups.
        groups: list[dict[str, Any]] = [{"params": decayed}]
        groups.append({"params": others, "weight_decay": 0.0})
        for group in groups:
            if not group["params"]:  # torch wants names in all groups, or in none
                group["param_names"] = []
        chosen = {"fused", "foreach", "differentiable"} & options.keys()
        is_on_gpu = all(p.is_cuda and p.is_floating_point() for _, p in named)
        kernels: dict[str, Any] = {"fused": True} if is_on_gpu and not chosen else {}
        return AdamW(groups, lr=lr, weight_decay=weight_decay, **options, **kernels)

    return make


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """Factors of the learning rate by step: a linear warm-up, then `shape` down to `final`."""

    shape: Callable[[float], float]  # from 1 at 0, after the warm-up, to 0 at 1, the last step
    warmup: int
    num_steps: int | None  # None: the max_steps of `fit`
    final: float

    def __post_init__(self) -> None:
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise _invalid(f"warmup={self.warmup!r}", "a number of steps, 0 or more", "warmup=100")
        if self.num_steps is not None and (
            not isinstance(self.num_steps, int) or self.num_steps <= self.warmup
        ):
            expected = "a number of steps that is larger than warmup, or None: fit's max_steps"
            raise _invalid(f"num_steps={self.num_steps!r}", expected, "num_steps=1000")
        if not 0 <= self.final <= 1:
            raise _invalid(f"final={self.final!r}", "a factor from 0 to 1", "final=0.1")

    def scheduler(self, optimizer: Optimizer, max_steps: int) -> LambdaLR:
        """Return the scheduler of an optimizer."""
        warmup, final, shape = self.warmup, self.final, self.shape
        num_steps = self.num_steps or max_steps
        if 0 < max_steps <= warmup:
            _logger.warning("warmup=%d of the learning rate takes all %d steps", warmup, max_steps)

        def factor(step: int) -> float:
            if step < warmup:
                return step / warmup
            done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
            return final + (1 - final) * max(0.0, shape(done))

        return LambdaLR(optimizer, factor)


def cosine(*, warmup: int = 0, num_steps: int | None = None, final: float = 0.0) -> LRSchedule:
    """Warm up over `warmup` steps, then follow half a cosine down to `final` times the rate."""
    return LRSchedule(lambda done: 0.5 * (1 + math.cos(math.pi * done)), warmup, num_steps, final)


def linear(*, warmup: int = 0, num_steps: int | None = None, final: float = 0.0) -> LRSchedule:
    """Warm up over `warmup` steps, then decay linearly to `final` times the rate."""
    return LRSchedule(lambda done: 1 - done, warmup, num_steps, final)


def constant(*, warmup: int = 0) -> LRSchedule:
    """Warm up over `warmup` steps, then keep the rate."""
    return LRSchedule(lambda done: 1.0, warmup, None, 0.0)


def _invalid(wrong: str, expected: str, fix: str) -> LaunchError:
    return LaunchError(wrong, expected=expected, fix=f"pass {fix}, for example")
