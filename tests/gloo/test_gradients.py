"""Pipelines in real processes give the gradients of one process, for any shape and schedule."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gloo.pipeline_gradients import distributed_gradients, single_process_gradients
from tests.grids import long_except


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "num_microbatches"),
    long_except([(1, 1, 1), (2, 1, 5), (1, 2, 3), (2, 2, 5), (4, 1, 2), (4, 2, 6)], 0, 3, 4),
)
def test_gradients_equal_those_of_one_process(
    tmp_path: Path, num_stages: int, num_pipelines: int, num_microbatches: int
) -> None:
    expected = single_process_gradients(
        tmp_path, num_pipelines=num_pipelines, num_microbatches=num_microbatches
    )
    for pipeline in distributed_gradients(
        tmp_path,
        num_stages=num_stages,
        num_pipelines=num_pipelines,
        num_microbatches=num_microbatches,
    ):
        for gradient, reference in zip(pipeline, expected, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-6)


@pytest.mark.timeout(90)
def test_every_schedule_gives_bitwise_equal_gradients(tmp_path: Path) -> None:
    def gradients_of(schedule: str) -> list[Tensor]:
        (gradients,) = distributed_gradients(
            tmp_path / schedule, num_stages=3, num_pipelines=1, schedule=schedule
        )
        return gradients

    reference = gradients_of("1f1b")
    for other in ("gpipe", "kfkb:2", "kfkb:3", "bounded:4,2,1"):
        assert all(
            torch.equal(a, b) for a, b in zip(gradients_of(other), reference, strict=True)
        ), other
