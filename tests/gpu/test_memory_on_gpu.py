"""The memory model agrees with the peak that the CUDA allocator reports."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from polyrhythm.cost.memory import StageMemory, needed
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.pipeline.pipeline import Pipeline

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)

NUM_MICROBATCHES, ROWS, WIDTH = 8, 512, 2048


def measure(ctx: DistContext, schedule: str, folder: Path) -> None:
    with ctx.process_group(60):
        device = torch.device("cuda", 0)
        layers: list[nn.Module] = []
        for _ in range(6):
            layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
        module = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(module.parameters())
        with Pipeline(
            module,
            loss_fn=functional.mse_loss,
            n_microbatches=NUM_MICROBATCHES,
            schedule=schedule,
            timeout=60,
        ) as pipeline:
            batch = torch.randn(NUM_MICROBATCHES * ROWS, WIDTH, device=device)
            arguments = (batch,) if pipeline.is_first else ()
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                pipeline.step(*arguments, target=batch, return_outputs=False)
                measured = torch.cuda.max_memory_allocated()
                optimizer.step()
            parameter_bytes = sum(p.nbytes for p in module.parameters())
            (activation,) = pipeline.activation_bytes.values()
            memory = StageMemory(
                weights=parameter_bytes,
                gradients=parameter_bytes,
                optimizer=2 * parameter_bytes,
                activation=activation,
                message=ROWS * WIDTH * 4,
            )
            predicted = needed(memory, in_flight=pipeline.peak_in_flight, window=2)
            # Temporary memory of layers and cuBLAS is measured without a pipeline.
            torch.cuda.reset_peak_memory_stats()
            x = batch[:ROWS].clone().requires_grad_()
            functional.mse_loss(module(x), batch[:ROWS]).backward()
            temporary = torch.cuda.max_memory_allocated() - needed(memory, in_flight=1, window=0)
            if pipeline.is_first:
                # The model counts the slice of the batch that each micro-batch saves; here all
                # slices are views of one tensor, which is part of `temporary`.
                measured += (pipeline.peak_in_flight - 1) * memory.message
        torch.save((measured - temporary, predicted), folder / f"{ctx.rank}.pt")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("schedule", ["1f1b", "kfkb:3", "gpipe"])
def test_peak_gpu_memory_matches_memory_model(tmp_path: Path, schedule: str) -> None:
    with LocalJob(lambda ctx: measure(ctx, schedule, tmp_path), 2, output_folder=tmp_path) as job:
        assert job.wait(120)
    for stage in range(2):
        measured, predicted = torch.load(tmp_path / f"{stage}.pt")
        assert 0.95 < measured / predicted < 1.05, f"stage {stage}: {measured} and {predicted}"
