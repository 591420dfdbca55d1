"""The Trainer with an iterable dataset, whose state is in the checkpoint."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from polyrhythm.run.checkpoint.manifest import read_manifest
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.data.order import DataError
from polyrhythm.run.trainer.config import CheckpointConfig
from polyrhythm.sinks.metrics import StepInfo
from polyrhythm.sync.dispatch import SamplerState
from tests.gloo.trainer_jobs import BATCH, NUM_STEPS, fit, plan_of, run_job, trainer

STOP_STEP = 6


class Stream(IterableDataset):
    """Endless samples, each drawn when it is read; records which samples are read."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.num_read = 0
        self.read = list[int]()  # sample numbers, in this process

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            inputs = torch.randn(8, generator=self.generator)
            self.read.append(self.num_read)
            self.num_read += 1
            yield inputs, torch.tanh(inputs[:4]) + inputs[4:]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.num_read, "chance": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_read = state["given"]
        self.generator.set_state(state["chance"])


class SleepCallback:
    """Slows a worker down."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, end: StepInfo) -> None:
        time.sleep(self._seconds)


def resume(
    folder: Path, shape: tuple[int, int], steps: int, saved: Path | None = None, **more: Any
) -> list[Any]:
    """Return by rank: the restored step, the steps since, and the numbers of the samples read."""
    plan = plan_of(*shape)

    def work(ctx: DistContext | None) -> Any:
        stream = Stream()
        with trainer(plan, dataset=stream, run_dir=folder / "run", **more) as made:
            first_step = made.restore(saved)
            ends = made.fit(max_steps=steps).steps
            made.save()
            found = [(end.step, end.own.loss, end.own.num_samples) for end in ends]
            return first_step, found, stream.read

    return run_job(plan.num_workers, work, folder)


def losses_of(found: list[Any], first: int, steps: int) -> list[float]:
    """Return the loss of each global batch from `first` on."""
    ends = [end for _, ends, _ in found for end in ends if end[1] is not None]
    by_step = [[end for end in ends if end[0] == step] for step in range(first, steps)]
    return [sum(e[1] * e[2] for e in ends) / sum(e[2] for e in ends) for ends in by_step]


@pytest.mark.parametrize(
    ("before", "after", "sync"),
    [
        ((1, 1), (1, 2), "decoupled"),
        ((1, 2), (1, 1), "balanced"),
        pytest.param((1, 2), (2, 2), "all_reduce", marks=pytest.mark.long),
        pytest.param((2, 2), (1, 3), "decoupled", marks=pytest.mark.long),
    ],
)
def test_resume_with_another_plan_continues_the_stream(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], sync: str
) -> None:
    whole, _ = fit(tmp_path, 1, 1, dataset=Stream())
    first = resume(tmp_path, before, STOP_STEP, sync=sync)
    assert {first_step for first_step, _, _ in first} == {0}
    second = resume(tmp_path, after, NUM_STEPS, sync=sync)
    losses = losses_of(first, 0, STOP_STEP) + losses_of(second, STOP_STEP, NUM_STEPS)
    assert losses == pytest.approx(whole, abs=1e-5)
    assert {first_step for first_step, _, _ in second} == {STOP_STEP}
    for _, _, read in second[:: after[0]]:  # later stages do not read
        assert read[0] >= (STOP_STEP - 1) * BATCH  # at most one step is read again
        assert read[-1] < NUM_STEPS * BATCH
        assert len(set(read)) == len(read)


@pytest.mark.long
def test_stateful_dataloader_continues_after_restore(tmp_path: Path) -> None:
    def stream(seed: int) -> StatefulDataLoader[Any]:
        torch.manual_seed(seed)
        inputs = torch.randn(NUM_STEPS * BATCH, 8, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, torch.tanh(inputs[:, :4]) + inputs[:, 4:])
        return StatefulDataLoader(data, batch_size=None, shuffle=True)

    whole, _ = fit(tmp_path, 1, 1, dataset=stream(seed=1))
    losses = list[float]()
    for steps, seed in ((STOP_STEP, 1), (NUM_STEPS, 2)):  # the order is in the state, too
        with trainer(plan_of(1, 1), dataset=stream(seed), run_dir=tmp_path / "run") as made:
            made.restore()
            losses += made.fit(max_steps=steps).losses
            made.save()
    assert losses == pytest.approx(whole, abs=1e-5)


def test_outstanding_samples_are_read_again_after_restore(tmp_path: Path) -> None:
    """At the checkpoint a slow pipeline still has samples that it acquired but has not used."""

    def train_with_checkpoints(ctx: DistContext | None) -> None:
        assert ctx is not None
        sleep_callback = SleepCallback(0.03 if ctx.rank == 1 else 0.0)
        options = {"checkpoint": CheckpointConfig(every=STOP_STEP), "sync": "adaptive"}
        with trainer(plan_of(1, 2), dataset=Stream(), run_dir=tmp_path / "run", **options) as made:
            made.fit(max_steps=NUM_STEPS, callbacks=[sleep_callback])

    run_job(2, train_with_checkpoints, tmp_path)
    saved, _ = sorted((tmp_path / "run" / "checkpoints").iterdir())  # of step 6 or later, and 10
    sampler_state = msgspec.convert(read_manifest(saved).extra["supply"], SamplerState)
    assert sampler_state.outstanding
    for shape, sync in (((1, 1), "decoupled"), ((2, 2), "adaptive")):
        found = resume(tmp_path, shape, NUM_STEPS, saved, sync=sync)
        starts = [read[0] for _, _, read in found if read]
        assert starts
        for start in starts:
            assert sampler_state.first_unused - 2 * BATCH <= start <= sampler_state.first_unused
    used = [number for _, ends, _ in found for _, loss, number in ends if loss is not None]
    assert sum(used) == NUM_STEPS * BATCH - sampler_state.num_used


def test_stream_with_state_that_cannot_be_encoded_is_rejected_at_start(tmp_path: Path) -> None:
    class Holding(Stream):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "lines": (line for line in "text")}

    with pytest.raises(DataError, match=r"the state of a Holding\['lines'\] is a generator"):
        trainer(plan_of(1, 1), dataset=Holding(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
