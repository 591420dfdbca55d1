"""GroupSync averages models on a GPU through host memory, with exact results."""

from pathlib import Path

import pytest
import torch
from torch import nn

from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.replicas import TIMEOUT, run_replicas

pytestmark = pytest.mark.skipif(
    not torch.cuda.device_count(), reason="this machine has no CUDA device"
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_models_are_equal_after_average_all(
    dtype: torch.dtype, overlap: bool, tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(ctx.rank)
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to("cuda", dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with GroupSync(
            model, optimizer, "age", overlap=overlap, state="average", timeout=TIMEOUT
        ) as sync:
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.randn(8, 64, device="cuda", dtype=dtype)).square().mean().backward()
                optimizer.step()
                sync.step()
            sync.average_all()
        assert all(p.is_cuda for p in model.parameters())
        assert all(m["exp_avg"].is_cuda for m in optimizer.state.values())
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return weights.cpu(), model[1].running_mean.cpu()

    found = run_replicas(3, work, tmp_path)
    for weights, mean in found:
        assert torch.equal(weights, found[0][0])
        assert torch.equal(mean, found[0][1])
        assert weights.isfinite().all()


@pytest.mark.timeout(120)
def test_gradients_on_gpu_are_averaged_before_step(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[float]:
        model = nn.Linear(1, 1, bias=False).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with GroupSync(model, optimizer, "all_reduce", timeout=TIMEOUT):
            model(torch.tensor([1.0 + 2 * ctx.rank], device="cuda")).sum().backward()
            optimizer.step()
        return model.weight.grad.flatten().tolist()

    assert run_replicas(2, work, tmp_path) == [[2.0], [2.0]]
