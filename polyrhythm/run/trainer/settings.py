"""What a Trainer was given, checked before any process waits for another."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polyrhythm.errors import LaunchError
from polyrhythm.plan.plan import AUTO, Plan
from polyrhythm.run.trainer.cutting import Cut
from polyrhythm.run.trainer.together import DECOUPLED, LOCKSTEP
from polyrhythm.sync.registry import POLICIES
from polyrhythm.types import Bytes, Seconds


@dataclass(frozen=True, kw_only=True)
class Settings:
    loss_fn: Callable[..., Tensor]
    optimizer_fn: Callable[[Iterable[torch.nn.Parameter]], Optimizer]
    lr_scheduler_fn: Callable[[Optimizer], LRScheduler] | None = None
    batch_size: int | None = None  # samples of a step, of all pipelines together
    microbatch_size: int | None = None
    plan: Plan | Path | str = AUTO
    schedule: str = AUTO
    memory_limit: str | Bytes | None = None
    sync: str = AUTO
    sync_options: Mapping[str, object] = field(default_factory=dict)
    overlap: bool = False
    cut: Cut = field(default_factory=Cut)
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    shuffle: bool = True
    seed: int = 0
    device: torch.device | str | None = None
    callbacks: Sequence[Callable[[Any], None]] = ()
    checkpoint_every: int | None = None  # steps
    deadline: Seconds = 60.0
    grace: Seconds = 30.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "microbatch_size", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _refused(name, value, "1 or more, or None")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise _refused("clip_grad_norm", self.clip_grad_norm, "a number above 0, or None")
        for name in ("deadline", "grace"):
            if not getattr(self, name) > 0:
                raise _refused(name, getattr(self, name), "seconds above 0")
        if not 0 <= self.seed < 2**31:
            raise _refused("seed", self.seed, "0 or more, below 2**31")
        if self.autocast not in (None, torch.bfloat16):
            raise LaunchError(
                f"autocast={self.autocast}",
                expected="torch.bfloat16, or None for none",
                fix="use bfloat16: float16 needs its losses scaled, which stages do not agree on",
            )
        known = (AUTO, DECOUPLED, *sorted(set(POLICIES) - {"ssp"}))
        if self.sync not in known:
            raise LaunchError(
                f"sync={self.sync!r}", expected=f"one of {', '.join(known)}", fix="use auto"
            )
        if self.overlap and self.sync in (AUTO, *LOCKSTEP):
            raise LaunchError(
                f"overlap=True with sync={self.sync!r}",
                expected="a policy that averages models, such as adaptive; auto overlaps by itself",
                fix="leave overlap out, or use sync='adaptive'",
            )

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Around forward and backward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast)


def _refused(name: str, value: object, expected: str) -> LaunchError:
    return LaunchError(f"{name}={value}", expected=expected, fix=f"give another {name}")
