"""The time that a step spends on progress, metrics and events, on the worker that shows them.

Two local replicas train a small model that computes until a step takes as long as wanted.
Functions that measure, gather, log or show something are timed from outside, together with what
the background thread of the gather needs of a core; the terminal is emulated, so that the line is
redrawn. Times are of the wall clock. Other load on the machine adds to them, so the round with
the least counts.
"""

import json
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.decoupled import optimizer
from polyrhythm.run.trainer import fit_loop
from polyrhythm.run.trainer.fit_loop import Phase
from polyrhythm.run.trainer.metrics import MeasuredStep, MetricGather
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sinks.jsonl import EventLog
from polyrhythm.types import Seconds

STEPS: tuple[Seconds, ...] = (0.1, 0.015)
_WIDTH, _BATCH, _CONTEXT = 256, 8, 32
_NUM_WARMUP = 5  # steps
_ROUND: Seconds = 1.0
_TIMEOUT: Seconds = 120.0


@dataclass(slots=True)
class InsideClock:
    """The time inside some functions, counted once if one calls another."""

    seconds: Seconds = 0.0
    _depth: int = 0

    def watch(self, owner: Any, name: str) -> None:
        """Replace a function or method by one that is timed; for the training thread."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)

    def watch_thread(self, owner: Any, name: str) -> None:
        """As `watch`, for a function that waits in another thread: only its CPU time counts."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        setattr(owner, name, timed)


class _Compute(nn.Module):
    """Computes until a step has its duration: after a sleep all code would run with cold caches."""

    def __init__(self, step: Seconds) -> None:
        super().__init__()
        self._step, self._last = step, time.monotonic()
        self._matrix = torch.ones(_WIDTH, _WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            while time.monotonic() < self._last + self._step:
                self._matrix @ self._matrix
        self._last = time.monotonic()
        return inputs


def measure(*, quick: bool) -> dict[str, float]:
    """Return the share of a step of 100 ms, and of one of 15 ms."""
    return {
        f"progress_overhead_{step * 1e3:.0f}ms": _overhead(step, num_rounds=1 if quick else 15)
        for step in STEPS
    }


def _overhead(step: Seconds, *, num_rounds: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        work = partial(_train, step=step, num_rounds=num_rounds, folder=Path(name))
        with LocalJob(work, 2, output_folder=Path(name) / "output") as job:
            if not job.wait(_TIMEOUT):
                raise TimeoutError(f"steps of {step} s take longer than {_TIMEOUT} s")
        shares: list[float] = json.loads((Path(name) / "shares.json").read_text())
    return min(shares)


def _train(ctx: DistContext, *, step: Seconds, num_rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["FORCE_COLOR"] = "1"  # the output file counts as a terminal
    clock = InsideClock()
    watched: list[tuple[Any, str]] = [
        (Phase, "_report"),
        (Phase, "_measured"),
        (MeasuredStep, "__init__"),
        (fit_loop, "count_tokens"),
        (optimizer, "squared_norm"),
        (EventLog, "write"),
    ]
    for owner, name in watched:  # the optimizer is decoupled: two pipelines
        clock.watch(owner, name)
    clock.watch_thread(MetricGather, "_gather")
    tokens = torch.randint(_WIDTH, (64 * _BATCH, _CONTEXT))
    with Trainer(
        lambda: nn.Sequential(
            _Compute(step),
            nn.Embedding(_WIDTH, _WIDTH),
            nn.Linear(_WIDTH, _WIDTH),
            nn.GELU(),
            nn.Linear(_WIDTH, _WIDTH),
        ),
        lambda logits, target: cross_entropy(logits.flatten(0, 1), target.flatten()),
        partial(torch.optim.AdamW, lr=1e-3),
        TensorDataset(tokens, tokens),
        batch_size=_BATCH,
        microbatch_size=_BATCH // 2,
        plan=Plan(layers_per_stage=(5,), pipelines=(PipelinePlan(schedule="1f1b"),) * 2),
        run_dir=folder / "run",
        timeout=_TIMEOUT,
    ) as trainer:
        trainer.fit(max_steps=_NUM_WARMUP)
        num_steps, shares = int(_ROUND / step), list[float]()
        for number in range(num_rounds):
            clock.seconds = 0.0
            trainer.fit(max_steps=_NUM_WARMUP + (number + 1) * num_steps)
            shares.append(clock.seconds / (num_steps * step))  # not of a step that was held up
    if ctx.rank == 0:
        (folder / "shares.json").write_text(json.dumps(shares))
