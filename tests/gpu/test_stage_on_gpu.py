"""Stages on a GPU send tensors through host memory, with correct gradients."""

from pathlib import Path

import pytest
import torch

from tests.gloo.pipeline_gradients import distributed_gradients, single_process_gradients

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("num_stages", "num_pipelines"), [(1, 1), (2, 2)])
def test_gpu_gradients_match_single_cpu_process(
    tmp_path: Path, num_stages: int, num_pipelines: int
) -> None:
    expected = single_process_gradients(tmp_path, num_pipelines=num_pipelines)
    for pipeline in distributed_gradients(
        tmp_path, num_stages=num_stages, num_pipelines=num_pipelines, device="cuda"
    ):
        for actual, reference in zip(pipeline, expected, strict=True):
            torch.testing.assert_close(actual, reference, rtol=0, atol=1e-5)
