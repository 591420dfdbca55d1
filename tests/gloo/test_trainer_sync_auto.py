"""sync="auto": training switches to the fastest sync mode, and still uses every sample once."""

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from polyrhythm.events import Event, read_run
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.machine import DEVICE
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.decision_log import decision_log_paths
from polyrhythm.sync.log_reader import replay
from tests.gloo.trainer_jobs import BATCH, NUM_SAMPLES, model, plan_of, run_job, samples

NUM_STEPS = 110  # a switch needs three windows of 20


class SlowLoss:
    """Sleeps for each sample, and records which samples are used."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds, self.ids = seconds, list[int]()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        time.sleep(sum(self._seconds() for _ in target))
        self.ids += [int(i) for i in target[:, -1]]
        return mse_loss(output, target[:, :-1])


def numbered_samples() -> TensorDataset:
    inputs, targets = samples().tensors
    numbers = torch.arange(float(len(inputs)))[:, None]
    return TensorDataset(inputs, torch.cat([targets, numbers], 1))


def train(
    folder: Path,
    slowness: Callable[[int], Callable[[], float]],
    *,
    num_machines: int = 3,
    num_steps: int = NUM_STEPS,
) -> tuple[Any, list[Event]]:
    """Train three replicas; return samples, weights and last loss by rank, and sync events."""

    def work(ctx: DistContext | None) -> Any:
        assert ctx is not None
        os.environ[DEVICE] = f"machine{ctx.rank % num_machines}"
        loss = SlowLoss(slowness(ctx.rank))
        made = Trainer(
            model,
            loss,
            partial(torch.optim.AdamW, lr=1e-2),
            numbered_samples(),
            plan=plan_of(1, 3),
            batch_size=BATCH,
            microbatch_size=2,
            sync="auto",
            run_dir=folder / "run",
            timeout=30.0,
        )
        with made:
            fitted = made.fit(max_steps=num_steps)
            weights = [value.sum().item() for value in made.model.parameters()]
            return loss.ids, weights, fitted.losses[-1], made.global_step

    found = run_job(3, work, folder)
    return found, [event for event in read_run(folder / "run") if event.kind == "sync_mode"]


def check(found: Any) -> None:
    used = Counter(i for ids, *_ in found for i in ids)
    num_epochs, rest = divmod(NUM_STEPS * BATCH, NUM_SAMPLES)
    assert Counter(used.values()) == {num_epochs: NUM_SAMPLES - rest, num_epochs + 1: rest}
    for _, weights, loss, step in found:
        assert weights == pytest.approx(found[0][1], rel=1e-4, abs=1e-4)
        assert loss < 0.5  # 1.4 at first
        assert step == NUM_STEPS


def test_auto_stays_synchronous_on_one_machine(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "warnings")  # which the processes inherit
    logging.getLogger("polyrhythm").addHandler(handler)
    try:
        _, (event,) = train(
            tmp_path, lambda rank: lambda: 0.001 * rank, num_machines=1, num_steps=65
        )
    finally:
        logging.getLogger("polyrhythm").removeHandler(handler)
        handler.close()
    assert event.name == "decoupled"
    assert "one machine" in event.why
    assert (tmp_path / "warnings").read_text().count("stays in lockstep") == 1


@pytest.mark.long
def test_auto_switches_to_groups_for_random_stragglers(tmp_path: Path) -> None:
    def slowness(rank: int) -> Callable[[], float]:
        draw = random.Random(rank)
        return lambda: 0.08 if draw.random() < 0.05 else 0.0

    found, sync_modes = train(tmp_path, slowness)
    assert sync_modes[0].name == "decoupled"
    switches = [event for event in sync_modes if event.name in ("adaptive", "age")]
    assert "costs" in switches[0].why
    assert switches[0].values["decoupled_s"] > switches[0].values[f"{switches[0].name}_s"]
    assert 0 < switches[0].step < NUM_STEPS
    logs = decision_log_paths(tmp_path / "run")  # one per phase in groups or in `balanced`
    assert len(logs) == len([event for event in sync_modes if event.name != "decoupled"])
    assert [replay(path) for path in logs] == [None] * len(logs)
    check(found)


@pytest.mark.long
def test_auto_switches_to_balanced_for_a_persistent_straggler(tmp_path: Path) -> None:
    found, sync_modes = train(tmp_path, lambda rank: lambda: 0.02 if rank == 1 else 0.002)
    assert [event.name for event in sync_modes][:2] == ["decoupled", "balanced"]
    assert "pipeline 1" in sync_modes[1].why
    counts = [len(ids) for ids, *_ in found]
    assert counts[1] < min(counts[0], counts[2])
    check(found)
