"""`modes`: every sync mode with three optimizers; counts values that no optimizer may have.

Real processes train a model with an embedding, of which each worker uses few rows per step, and a
normalisation layer. Averages include optimizer state, wait or overlap with training, and come every
step or every tenth: then the moments of a row have decayed since it was published. After each mode
training goes on in another one, with the same optimizer. Counted on all workers, after each step:
non-finite numbers of weights and optimizer state, negative second moments and variances; at the
end, steps that the optimizer has counted too often or too rarely.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.parity.facts import Fact
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.parameter_server import ParameterServer
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.sync.modes import SYNC_MODES, SyncMode
from polyrhythm.types import Seconds

_NUM_WORKERS, _NUM_STEPS, _NUM_STEPS_AFTER, _EVERY = 3, 30, 4, 10
_NUM_ROWS, _WIDTH, _BATCH = 24, 4, 2
_TIMEOUT: Seconds = 60.0  # of a wait for other workers in a case
_JOB_TIMEOUT: Seconds = 400.0  # of all cases, for which the process of the server waits
_ERRORS = ("non-finite", "negative", "steps miscounted")
_NON_NEGATIVE = ("exp_avg_sq", "running_var")


class CountingSGD(Optimizer):
    """SGD on a running mean of gradients, weighed by the number of calls of `step`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it takes no closure
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 / group["num_steps"])
                    p.sub_(mean, alpha=group["lr"])


_OPTIMIZERS: Mapping[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=0.01, betas=(0.9, 0.95)),
    "SGD": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "a counting optimizer": CountingSGD,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A sync mode and how its averages are applied, with an optimizer."""

    mode: str
    optimizer: str
    overlap: bool = False
    decoupled: bool = False  # the all-gather runs during the next forward
    every: int = 1

    def __str__(self) -> str:
        more = [f"every {self.every} steps"] if self.every > 1 else []
        more += ["overlap"] if self.overlap else ["decoupled"] if self.decoupled else []
        return ", ".join([self.mode, *more, self.optimizer])

    @property
    def sync_mode(self) -> SyncMode:
        return SYNC_MODES[self.mode]


def measure(*, quick: bool) -> list[Fact]:
    """Return a fact for each case: the number of errors on all workers."""
    cases = list(_cases())
    if quick:
        kept = ("age, every 10 steps, overlap, AdamW", "decoupled, a counting optimizer")
        cases = [case for case in cases if str(case) in kept]
    with tempfile.TemporaryDirectory() as folder:
        with LocalJob(
            lambda ctx: _work(ctx, cases, Path(folder)),
            _NUM_WORKERS + 1,  # the last one is the parameter server
            output_folder=Path(folder),
        ) as job:
            assert job.wait(_JOB_TIMEOUT), f"the sync modes take more than {_JOB_TIMEOUT:g} s"
        found = [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(_NUM_WORKERS)
        ]
    return [_fact(case, [errors[str(case)] for errors in found]) for case in cases]


def _cases() -> Iterator[Case]:
    for name, mode in SYNC_MODES.items():
        for optimizer in _OPTIMIZERS:
            yield Case(name, optimizer, every=_EVERY if mode.has_outer_optimizer else 1)
            if mode.averages is None or mode.decoupled or mode.balances_microbatches:
                continue
            several = mode.after_local_steps()
            if several.can_overlap:
                yield Case(name, optimizer, overlap=True, every=_EVERY)
            if mode.can_overlap and not mode.has_outer_optimizer:
                yield Case(name, optimizer, overlap=True)
            if several.can_decouple:
                yield Case(name, optimizer, decoupled=True, every=_EVERY)


def _fact(case: Case, by_worker: list[dict[str, int]]) -> Fact:
    counts = {error: sum(errors[error] for errors in by_worker) for error in _ERRORS}
    shown = ", ".join(f"{count} {error}" for error, count in counts.items() if count)
    return Fact(str(case), float(sum(counts.values())), shown)


def _work(ctx: DistContext, cases: list[Case], folder: Path) -> None:
    with ctx.process_group(_JOB_TIMEOUT):
        workers = dist.new_group(list(range(_NUM_WORKERS)))
        found = {}
        for case in cases:
            if ctx.rank < _NUM_WORKERS:
                found[str(case)] = _Training(case, ctx.rank, workers).run()
            elif case.sync_mode.has_server:
                ParameterServer(
                    num_pipelines=_NUM_WORKERS, timeout=_JOB_TIMEOUT, name=str(case)
                ).serve()
        (folder / f"{ctx.rank}.json").write_text(json.dumps(found))


class _Rows(nn.Module):
    """The mean of two rows of an embedding, normalised, to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(_NUM_ROWS, _WIDTH)
        self.norm, self.last = nn.BatchNorm1d(_WIDTH, momentum=0.2), nn.Linear(_WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.rows(rows).mean(1)))
        return out


class _Training:
    """One worker in one case, then in another mode."""

    def __init__(self, case: Case, rank: int, workers: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        self._case, self._rank, self._workers, self._model = case, rank, workers, _Rows()
        self._optimizer = _OPTIMIZERS[case.optimizer](self._model.parameters())
        self._draw = torch.Generator().manual_seed(rank)
        self._errors = Counter[str](dict.fromkeys(_ERRORS, 0))

    def run(self) -> dict[str, int]:
        if self._case.sync_mode.decoupled:
            self._train_decoupled(_NUM_STEPS)
            self._train_in_groups("all_reduce", _NUM_STEPS_AFTER, "after")
        else:
            self._train_in_groups(
                self._case.mode,
                _NUM_STEPS,
                "first",
                every=self._case.every,
                overlap=self._case.overlap,
                decoupled=self._case.decoupled,
                state="local" if self._case.sync_mode.has_server else "average",
            )
            self._train_decoupled(_NUM_STEPS_AFTER)
        self._check_counts(_NUM_STEPS + _NUM_STEPS_AFTER)
        return dict(self._errors)

    def _train_in_groups(self, mode: str, num_steps: int, phase: str, **options: Any) -> None:
        has_server = SYNC_MODES[mode].has_server
        sync = GroupSync(
            self._model,
            self._optimizer,
            mode,
            num_pipelines=_NUM_WORKERS,
            timeout=_TIMEOUT,
            name=str(self._case) if has_server else f"{self._case} {phase}",
            **options,
        )
        with sync:
            for _ in range(num_steps):
                share = (
                    sync.share(2 * _NUM_WORKERS)
                    if SYNC_MODES[mode].balances_microbatches
                    else range(1)
                )
                for _ in share:
                    self._backward()
                self._optimizer.step()
                sync.step()
                self._optimizer.zero_grad()
                self._check_values()
            sync.average_all()
            self._check_values()

    def _train_decoupled(self, num_steps: int) -> None:
        optimizer = DistributedOptimizer(
            self._optimizer,
            self._model,
            bucket_bytes=100,  # several buckets on each worker
            process_group=self._workers,
            elementwise=True,
            timeout=_TIMEOUT,
        )
        for _ in range(num_steps):
            self._backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            self._check_values()
        state = optimizer.state_dict()
        optimizer.close()
        self._optimizer = _OPTIMIZERS[self._case.optimizer](self._model.parameters())
        self._optimizer.load_state_dict(state)
        self._check_values()

    def _backward(self) -> None:
        rows = torch.randint(_NUM_ROWS, (_BATCH, 2), generator=self._draw)
        self._model(rows).sub(self._rank).square().mean().backward()

    def _check_values(self) -> None:
        named = list(self._model.state_dict().items())
        named += [item for state in self._optimizer.state.values() for item in state.items()]
        for name, tensor in named:
            if isinstance(tensor, Tensor):
                self._errors["non-finite"] += int((~tensor.isfinite()).sum())
                if name.endswith(_NON_NEGATIVE):
                    self._errors["negative"] += int((tensor < 0).sum())

    def _check_counts(self, expected: int) -> None:
        """Compare the counts of steps, of the groups or of the parameters, with the real number."""
        states = [*self._optimizer.param_groups, *self._optimizer.state.values()]
        counts = [int(s[key]) for s in states for key in ("num_steps", "step") if key in s]
        assert counts or self._case.optimizer == "SGD", "the other optimizers count their steps"
        self._errors["steps miscounted"] += sum(count != expected for count in counts)
