"""The memory model agrees with the peak bytes of tensors that autograd saves."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.cost.memory import peak_in_flight
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.schedule.spec import ScheduleSpec

NUM_STAGES, NUM_MICROBATCHES, WIDTH = 3, 8, 32


class LiveBytes:
    """Counts the bytes that autograd has saved and not yet released."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._live: dict[int, tuple[int, int]] = {}  # address -> bytes, times saved
        self.peak = 0

    def save(self, tensor: Tensor) -> "Saved":
        if tensor.untyped_storage().data_ptr() not in self._parameters:
            _, times = self._live.get(tensor.data_ptr(), (0, 0))
            self._live[tensor.data_ptr()] = (tensor.nbytes, times + 1)
            self.peak = max(self.peak, sum(nbytes for nbytes, _ in self._live.values()))
        return Saved(self, tensor)

    def release(self, pointer: int) -> None:
        if pointer in self._live:
            nbytes, times = self._live.pop(pointer)
            if times > 1:
                self._live[pointer] = (nbytes, times - 1)


class Saved:
    def __init__(self, owner: LiveBytes, tensor: Tensor) -> None:
        self.owner, self.tensor = owner, tensor

    def __del__(self) -> None:
        self.owner.release(self.tensor.data_ptr())


def measure(ctx: DistContext, schedule: str, folder: Path) -> None:
    with ctx.process_group(30):
        torch.manual_seed(ctx.rank)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()] * 3
        module = nn.Sequential(*layers)
        spec = ScheduleSpec.parse(schedule)
        with Pipeline(
            module,
            loss_fn=functional.mse_loss,
            n_microbatches=NUM_MICROBATCHES,
            schedule=spec,
            timeout=20,
        ) as pipeline:
            inputs = torch.randn(NUM_MICROBATCHES * 4, WIDTH)
            arguments = (inputs,) if pipeline.is_first else ()
            pipeline.step(*arguments, target=inputs, return_outputs=False)  # has its own hooks
            live = LiveBytes(list(module.parameters()))
            with torch.autograd.graph.saved_tensors_hooks(live.save, lambda saved: saved.tensor):
                pipeline.step(*arguments, target=inputs, return_outputs=False)
            (predicted,) = pipeline.activation_bytes.values()
            torch.save((live.peak, predicted, pipeline.peak_in_flight), folder / f"{ctx.rank}.pt")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("schedule", ["1f1b", "kfkb:2", "bounded:5,3,1", "gpipe"])
def test_peak_activations_match_memory_model(tmp_path: Path, schedule: str) -> None:
    with LocalJob(
        lambda ctx: measure(ctx, schedule, tmp_path), NUM_STAGES, output_folder=tmp_path
    ) as job:
        assert job.wait(60)
    built = ScheduleSpec.parse(schedule).build(
        num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES
    )
    for stage, actions in enumerate(built):
        peak, per_microbatch, in_flight = torch.load(tmp_path / f"{stage}.pt")
        assert in_flight == peak_in_flight(actions)
        # The running forward counts while it saves: the bound is met exactly.
        assert peak == in_flight * per_microbatch
