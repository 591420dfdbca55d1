"""The selection of collectives by device, and the in-place collectives of torch."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polyrhythm.errors import PolicyError
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.comm.process_groups import new_gloo_group
from polyrhythm.run.comm.reduce_scatter import (
    GlooCollectives,
    NcclCollectives,
    select_backend,
    uses_nccl,
)
from tests.gloo.pipelines import run_stages

TIMEOUT = 20.0


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def test_backend_is_selected_by_device(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> tuple[bool, bool, str]:
        host = GlooCollectives(new_gloo_group([0], "a test", timeout=TIMEOUT), timeout=TIMEOUT)
        on_cpu = select_backend(torch.device("cpu"), world(), host, start=lambda work: None)
        with pytest.raises(PolicyError) as caught:
            select_backend(torch.device("meta"), world(), host, start=lambda work: None)
        return on_cpu is host, uses_nccl(torch.device("cuda", 0), world()), str(caught.value)

    ((is_host, is_nccl, message),) = run_stages(1, work, tmp_path)
    assert is_host
    assert not is_nccl, "the group of WORLD is gloo for GPUs, too"
    assert "parameters on meta" in message


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_place_collectives_give_mean_and_all_shards(
    dtype: torch.dtype, num_workers: int, tmp_path: Path
) -> None:
    """In half precision NcclCollectives also run on gloo, which lacks the AVG of other dtypes."""

    def work(ctx: DistContext) -> tuple[torch.Tensor, torch.Tensor]:
        collectives = NcclCollectives(world())
        flat = torch.arange(6 * num_workers, dtype=dtype) + 3 * ctx.rank
        collectives.reduce_scatter(flat, 0).wait()
        scattered = flat.view(num_workers, -1)[ctx.rank].clone()
        collectives.all_gather(flat, 0).wait()
        return scattered, flat

    found = run_stages(num_workers, work, tmp_path)
    mean = torch.arange(6 * num_workers, dtype=torch.float32) + 1.5 * (num_workers - 1)
    for own, (scattered, flat) in zip(mean.view(num_workers, -1), found, strict=True):
        torch.testing.assert_close(scattered.float(), own, rtol=0.01, atol=0)
        torch.testing.assert_close(flat.float(), mean, rtol=0.01, atol=0)


def test_complex_tensors_are_gathered_as_real_views(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> torch.Tensor:
        flat = torch.zeros(4, dtype=torch.complex64)
        flat.view(2, -1)[ctx.rank] = complex(1, ctx.rank)
        NcclCollectives(world()).all_gather(flat, 0).wait()
        return flat

    expected = torch.tensor([1, 1, 1 + 1j, 1 + 1j])
    for flat in run_stages(2, work, tmp_path):
        assert torch.equal(flat, expected)
