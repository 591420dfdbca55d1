"""Run small Trainer jobs in one process or several, and collect their losses."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.autoswitch import SwitchDecision

LAYERS = {1: (5,), 2: (2, 3), 3: (1, 2, 2)}
BATCH, NUM_SAMPLES, NUM_STEPS = 24, 200, 10  # one batch spans the end of an epoch


class ScriptedTuner:
    """Switches to the next of the scripted sync modes after each window."""

    NUM_STEPS = 3  # of a window

    def __init__(self, sync_modes: Sequence[str], shape: object) -> None:
        self.num_steps, self._remaining, self._sync_mode = (
            self.NUM_STEPS,
            list(sync_modes),
            "decoupled",
        )

    def after_window(self, times: object) -> SwitchDecision:
        before = self._sync_mode
        if self._remaining:
            self._sync_mode = self._remaining.pop(0)
        switches = self._sync_mode != before
        return SwitchDecision(
            sync_mode=self._sync_mode, switches=switches, why="scripted", predicted={}
        )

    def keep(self, pipelines: Sequence[int]) -> None:
        pass


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs[:, :4]) + inputs[:, 4:])


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def plan_of(num_stages: int, num_pipelines: int, schedule: str = "1f1b") -> Plan:
    return Plan(
        layers_per_stage=LAYERS[num_stages],
        pipelines=(PipelinePlan(schedule=schedule),) * num_pipelines,
    )


def trainer(plan: Plan, **more: Any) -> Trainer:
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "microbatch_size": 2,
        "clip_grad_norm": 0.5,
        "lr_schedule": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step / 5)),
        "timeout": 30.0,
        **more,
    }
    dataset = options.pop("dataset", None) or samples()
    loss_fn = options.pop("loss_fn", mse_loss)
    optimizer_fn = options.pop("optimizer_fn", partial(torch.optim.AdamW, lr=1e-2))
    whole = options.pop("model", model)
    return Trainer(whole, loss_fn, optimizer_fn, dataset, plan=plan, **options)


def run_job(
    num_processes: int, work: Callable[[DistContext | None], Any], folder: Path
) -> list[Any]:
    """Return the results of `work` by rank; a single process is this one."""

    def save_result(ctx: DistContext) -> None:
        torch.save(work(ctx), folder / f"found{ctx.rank}.pt")

    if num_processes == 1:
        return [work(None)]
    folder.mkdir(exist_ok=True)
    with LocalJob(save_result, num_processes, output_folder=folder / "logs") as job:
        assert job.wait(100), "not done in time"  # one may compile
    return [torch.load(folder / f"found{rank}.pt") for rank in range(num_processes)]


def fit(
    folder: Path, num_stages: int, num_pipelines: int, *, steps: int = NUM_STEPS, **more: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss of each global batch, and the weights of the first pipeline."""
    plan = more.pop("plan", None) or plan_of(num_stages, num_pipelines)

    def work(ctx: DistContext | None) -> tuple[Any, Any]:
        with trainer(plan, **more) as made:
            fitted = made.fit(max_steps=steps)
            ends = [(end.step, end.own.loss, end.own.num_samples) for end in fitted.steps]
            return ends, made.model.state_dict()

    found = run_job(plan.num_workers, work, folder)
    totals = [0.0] * steps
    counts = [0] * steps
    for ends, _ in found:
        for step, loss, num_samples in ends:
            if loss is not None:
                totals[step] += loss * num_samples
                counts[step] += num_samples
    losses = [total / max(count, 1) for total, count in zip(totals, counts, strict=True)]
    weights = {k: v for _, state in found[: plan.num_stages] for k, v in state.items()}
    return losses, weights
