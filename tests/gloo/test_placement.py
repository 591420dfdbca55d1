"""Models that are sharded, spread over devices, without values, or on another device."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import mse_loss

from polyrhythm.errors import LaunchError, ScheduleError
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.trainer.config import DeviceConfig
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.trainer_jobs import model, samples


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def refusal(module: nn.Module, device: Any = None) -> LaunchError:
    optimizer_fn = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(LaunchError) as caught:
        Trainer(module, mse_loss, optimizer_fn, samples(), batch_size=4, device=device)
    return caught.value


def test_trainer_refuses_fsdp2_which_a_pipeline_runs(mesh: DeviceMesh) -> None:
    whole = model()
    fully_shard(whole, mesh=mesh)
    error = refusal(whole)
    assert error.wrong.startswith("a model that is sharded already: 0.weight, which is a DTensor")
    assert "Pipeline" in error.fix
    assert "into stages and replicas" in error.expected
    with Pipeline(whole, 2, mse_loss, schedule="1f1b") as pipeline:
        pipeline.step(torch.randn(4, 8), target=torch.randn(4, 4))
    assert all(p.grad is not None for p in whole.parameters())


def test_trainer_refuses_fsdp2_of_a_module_without_weights(mesh: DeviceMesh) -> None:
    whole = nn.Sequential(nn.Tanh())
    fully_shard(whole[0], mesh=mesh)
    assert refusal(whole).wrong == "a model that is sharded already: fully_shard"


def test_trainer_refuses_tensor_parallel_weights(mesh: DeviceMesh) -> None:
    whole = model()
    whole[2].weight = nn.Parameter(distribute_tensor(whole[2].weight.detach(), mesh))
    assert "2.weight, which is a DTensor" in refusal(whole).wrong


def test_trainer_refuses_weights_without_values() -> None:
    whole = model()
    whole[2].to("meta")
    error = refusal(whole)
    assert error.wrong == ("2 of 6 weights without values, on the meta device, such as 2.weight")
    assert "device_map" in error.fix


def test_trainer_refuses_a_model_spread_over_devices() -> None:
    whole = model()
    with FakeTensorMode():
        whole[4].bias = nn.Parameter(torch.empty(4, device="cuda:1"))
    error = refusal(whole)
    assert error.wrong == (
        "a model that is spread over 2 devices: 4.weight on cpu, 4.bias on cuda:1"
    )
    assert "device_map" in error.fix


WRAPPERS = [nn.parallel.DistributedDataParallel, FullyShardedDataParallel, nn.DataParallel]


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")  # with one process
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("is_whole", [True, False])
def test_trainer_refuses_wrappers(
    wrapper: Callable[[nn.Module], nn.Module], is_whole: bool, mesh: DeviceMesh
) -> None:
    options = {"device_id": torch.device("cpu")} if wrapper is FullyShardedDataParallel else {}
    whole = model()
    if is_whole:
        error = refusal(wrapper(whole, **options))
    else:
        whole[2] = wrapper(whole[2], **options)
        error = refusal(whole)
    assert error.wrong == f"a model wrapped in {wrapper.__name__}"
    assert "model.module" in error.fix


def test_trainer_refuses_layers_without_a_shape() -> None:
    whole = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    assert refusal(whole).wrong == "weights without a shape yet, such as 0.weight"


DEVICES = {
    "cuda": "device='cuda' on a machine without a usable GPU",
    "cuda:1": "device='cuda:1' on a machine without a usable GPU",
    "meta": "device='meta'",
    "mps": "device='mps'",
    0: "device='cuda:0' on a machine without a usable GPU",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("device", "wrong"), DEVICES.items())
def test_devices_that_are_not_there_are_refused(device: Any, wrong: str) -> None:
    assert refusal(model(), device=device).wrong == wrong
    if isinstance(device, str):
        with pytest.raises(LaunchError, match=re.escape(wrong)):
            Pipeline(model(), 2, mse_loss, schedule="1f1b", device=device)


def test_a_gpu_beyond_those_of_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    error = refusal(model(), device="cuda:2")
    assert error.wrong == "device='cuda:2' on a machine with 2 GPUs"
    assert error.expected == "an index below 2"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_memory_limit_of_nothing_is_refused(limit: int) -> None:
    with pytest.raises(LaunchError, match=f"memory_limit={limit}"):
        DeviceConfig(memory_limit=limit)


def step_error(module: nn.Module, device: str) -> ScheduleError:
    pipeline = Pipeline(module, 2, mse_loss, schedule="1f1b", device=device)
    with pipeline, pytest.raises(ScheduleError) as caught:
        pipeline.step(torch.randn(4, 8), target=torch.randn(4, 4))
    return caught.value


def test_pipeline_refuses_a_module_on_another_device_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    error = step_error(model(), "cuda:1")
    assert error.wrong == "device='cuda:1', and the module of stage 0 is on cpu"
    assert "pipeline.module.to('cuda:1')" in error.fix
    error = step_error(model().to("meta"), "cpu")
    assert error.wrong == "device='cpu', and the module of stage 0 is on meta"
    assert "pipeline.module.to_empty(device='cpu')" in error.fix


def test_pipeline_takes_a_module_that_is_moved_before_its_first_step() -> None:
    module = model().to("meta")
    with Pipeline(module, 2, mse_loss, schedule="1f1b", device="cpu") as pipeline:
        whole = model()
        pipeline.module.to_empty(device="cpu").load_state_dict(whole.state_dict())
        inputs, target = torch.randn(4, 8), torch.randn(4, 4)
        pipeline.step(inputs, target=target)
        mse_loss(whole(inputs), target).backward()
        for found, expected in zip(pipeline.module.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
