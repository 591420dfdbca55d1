"""Copies for a checkpoint of weights on a GPU."""

from pathlib import Path

import pytest
import torch

from polyrhythm.run.checkpoint.encoding import joined
from polyrhythm.run.checkpoint.state import Staging
from polyrhythm.run.comm.launch import DistContext, LocalJob

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)


@pytest.mark.timeout(120)
def test_copies_follow_each_other_if_an_optimizer_counts_steps_in_main_memory(
    tmp_path: Path,
) -> None:
    def work(ctx: DistContext) -> None:
        made = {f"step{i}": torch.tensor(float(i)) for i in range(3)}
        made |= {f"weight{i}": torch.randn(5, device="cuda") for i in range(3)}
        tensors, staging = (
            {name: made[name] for name in sorted(made, key=lambda x: x[-1])},
            Staging(),
        )
        for _ in range(2):
            copies = staging.copy_to_host(tensors).wait()
            assert len(list(joined(copies.values()))) == 1
            assert all(copy.is_pinned() for copy in copies.values())
            for name, value in tensors.items():
                torch.testing.assert_close(copies[name], value.cpu(), rtol=0, atol=0)
                value += 1

    with LocalJob(work, 1, output_folder=tmp_path) as job:
        assert job.wait(60)
