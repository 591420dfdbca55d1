"""The Trainer's arguments, checked before any process waits for another."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polyrhythm.errors import LaunchError
from polyrhythm.plan.plan import AUTO, Plan
from polyrhythm.run.trainer.split_spec import SplitSpec
from polyrhythm.sync.modes import SYNC_MODES
from polyrhythm.types import Bytes, Seconds

_MUST_MATCH = (
    *("batch_size", "microbatch_size", "seed", "shuffle", "schedule", "sync", "overlap"),
    *("clip_grad_norm", "autocast", "checkpoint_every"),
)  # equal in every process


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    loss_fn: Callable[..., Tensor]
    optimizer_fn: Callable[[Iterable[torch.nn.Parameter]], Optimizer]
    lr_scheduler_fn: Callable[[Optimizer], LRScheduler] | None = None
    batch_size: int | None = None  # samples per step, summed over all pipelines
    microbatch_size: int | None = None
    plan: Plan | Path | str = AUTO
    schedule: str = AUTO
    memory_limit: str | Bytes | None = None
    sync: str = AUTO
    sync_options: Mapping[str, object] = field(default_factory=dict)
    overlap: bool = False
    split: SplitSpec = field(default_factory=SplitSpec)
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    shuffle: bool = True
    seed: int = 0
    device: torch.device | str | None = None
    callbacks: Sequence[Callable[[Any], None]] = ()
    checkpoint_every: int | None = None  # steps
    timeout: Seconds = 60.0
    grace_period: Seconds = 30.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "microbatch_size", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value >= 1):
                raise _invalid(name, value, "an integer from 1 on, or None")
        if self.clip_grad_norm is not None and not _is_above_0(self.clip_grad_norm):
            raise _invalid("clip_grad_norm", self.clip_grad_norm, "a number above 0, or None")
        for name in ("timeout", "grace_period"):
            if not _is_above_0(getattr(self, name)):
                raise _invalid(name, getattr(self, name), "seconds above 0")
        if not (_is_integer(self.seed) and 0 <= self.seed < 2**31):
            raise _invalid("seed", self.seed, "an integer from 0 to 2**31 - 1")
        if not isinstance(self.callbacks, Sequence) or not all(map(callable, self.callbacks)):
            raise _invalid("callbacks", self.callbacks, "a list of functions that take a StepEnd")
        for name in ("loss_fn", "optimizer_fn", "lr_scheduler_fn", "collate_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise _invalid(name, value, "a function")
        if not isinstance(self.plan, Plan | Path | str):
            raise _invalid("plan", self.plan, "a Plan, the path of its file, or 'auto'")
        try:
            torch.device(self.device or "cpu")
        except (RuntimeError, TypeError):
            raise _invalid("device", self.device, "a torch device such as 'cuda:1'") from None
        if self.autocast not in (None, torch.bfloat16):
            raise LaunchError(
                f"autocast={self.autocast}",
                expected="torch.bfloat16, or None to turn it off",
                fix="use bfloat16: float16 needs loss scaling, which stages do not agree on",
            )
        known = (AUTO, *(mode.name for mode in SYNC_MODES.values() if not mode.has_server))
        if self.sync not in known:
            near = get_close_matches(self.sync, known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else "use auto"
            raise LaunchError(f"sync={self.sync!r}", expected=f"one of {', '.join(known)}", fix=fix)
        mode = SYNC_MODES.get(self.sync)  # None for auto
        if self.sync_options and (mode is None or mode.policy is None):
            raise LaunchError(
                f"sync_options={dict(self.sync_options)} with sync={self.sync!r}",
                expected="sync_options with a policy",
                fix="omit sync_options, or name the policy: sync='adaptive'",
            )
        if self.overlap and (mode is None or not mode.can_overlap):
            raise LaunchError(
                f"overlap=True with sync={self.sync!r}",
                expected="a policy that averages models, such as adaptive; auto overlaps by itself",
                fix="omit overlap, or use sync='adaptive'",
            )

    def must_match(self, num_samples: int | None) -> dict[str, Any]:
        """Return the arguments that must be equal in all processes."""
        values = {name: getattr(self, name) for name in _MUST_MATCH}
        return values | {"sync_options": dict(self.sync_options), "samples": num_samples}

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context for forward and backward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_above_0(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _invalid(name: str, value: object, expected: str) -> LaunchError:
    return LaunchError(f"{name}={value!r}", expected=expected, fix=f"pass another {name}")
