"""What a decoupled optimizer cannot do is told, with what to do instead."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from polyrhythm.errors import LaunchError
from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
from polyrhythm.run.launch import Place
from tests.gloo.decoupled import (
    WIDTH,
    adam,
    inputs_of,
    loss_of,
    mean_steps,
    ours,
    own_steps,
    refused,
    stack,
)
from tests.gloo.pipelines import run_alone, run_stages


def test_mistakes_are_told(tmp_path: Path) -> None:
    def work(place: Place) -> dict[str, str]:
        model = stack()
        optimizer = ours(model)
        said = {"no backward": refused(optimizer.step)}
        loss_of(model, inputs_of(place.rank, 0)).backward()
        parameters = list(model.parameters())
        said["clip"] = refused(lambda: nn.utils.clip_grad_norm_(parameters, 1.0))
        said["again"] = refused(lambda: loss_of(model, inputs_of(place.rank, 1)).backward())
        optimizer.step()
        said["forgotten"] = refused(lambda: loss_of(model, inputs_of(place.rank, 1)).backward())
        optimizer.zero_grad()
        saved = optimizer.state_dict()
        saved["state"][1]["exp_avg"] = torch.zeros(3, 3)
        said["shape"] = refused(lambda: optimizer.load_state_dict(saved))
        saved["param_groups"][0]["params"] = [0, 1]
        said["groups"] = refused(lambda: optimizer.load_state_dict(saved))
        optimizer.close()
        other = stack()
        said["foreign"] = refused(lambda: ours(model, adam(other)))
        said["swapped"] = refused(lambda: DistributedOptimizer(model, adam(model)))
        muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
        said["muon"] = refused(lambda: ours(model, muon))
        wrapped = DistributedDataParallel(other)
        said["ddp"] = refused(lambda: ours(wrapped))
        sharded = stack()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        said["fsdp2"] = refused(lambda: ours(sharded))
        larger = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5 + place.rank))
        said["differs"] = refused(lambda: ours(larger))
        return said

    for said in run_stages(2, work, tmp_path):
        assert "step() without a backward()" in said["no backward"]
        assert "optimizer.clip_grad_norm_(max_norm)" in said["clip"]
        assert "with optimizer.no_sync()" in said["again"]
        assert "call optimizer.zero_grad()" in said["forgotten"]
        assert "exp_avg of 0.bias has shape (3, 3) in the checkpoint" in said["shape"]
        assert "groups of [2]" in said["groups"]
        assert "not the model's" in said["foreign"]
        assert "an optimizer of torch.optim, then the model" in said["swapped"]
        assert "the optimizer Muon" in said["muon"]
        assert "give the module inside" in said["ddp"]
        assert "leave out fully_shard" in said["fsdp2"]
        assert "parameter 2 is '1.weight' (" in said["differs"]


def test_a_model_that_was_moved_or_replaced_is_told(tmp_path: Path) -> None:
    def work(place: Place) -> dict[str, str]:
        said = {}
        model = stack()
        optimizer = ours(model)
        own_steps(place, model, optimizer, range(1))
        said["replaced"] = refused(
            lambda: model.load_state_dict(stack(1).state_dict(), assign=True)
        )
        optimizer.close()
        model = stack()
        optimizer = ours(model)
        own_steps(place, model, optimizer, range(1))
        model[0].weight.data = model[0].weight.data.clone()
        said["moved"] = refused(lambda: own_steps(place, model, optimizer, range(1, 2)))
        said["mode"] = refused(lambda: ours(stack(), mode="nested decoupled"))
        said["group"] = refused(lambda: optimizer.add_param_group({"params": []}))
        sparse = nn.Sequential(nn.Embedding(4, WIDTH, sparse=True))
        lookup = ours(sparse, torch.optim.SGD(sparse.parameters()))
        said["sparse"] = refused(lambda: sparse(torch.tensor([1])).sum().backward())
        lookup.close()
        said["no mode"] = refused(lambda: ours(stack(), mode="best"))
        said["size"] = refused(lambda: ours(stack(), bucket_bytes=0))
        return said

    for said in run_stages(2, work, tmp_path):
        assert "0.weight was replaced" in said["replaced"]
        assert "without assign=True" in said["replaced"]
        assert "0.weight was moved" in said["moved"]
        assert "two nodes or more" in said["mode"]
        assert "a parameter group added" in said["group"]
        assert "sparse=False" in said["sparse"]
        assert "mode='best'" in said["no mode"]
        assert "bucket_bytes=0" in said["size"]


def test_use_after_the_process_group_is_gone_is_told(tmp_path: Path) -> None:
    """Of a job of one worker, too."""

    def work() -> list[str]:
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        model = stack()
        optimizer = ours(model)
        mean_steps(model, optimizer, range(1), range(2))
        optimizer.zero_grad()
        loss_of(model, inputs_of(0, 2)).backward()
        dist.destroy_process_group()
        return [refused(optimizer.step), refused(optimizer.state_dict)]

    for said in run_alone(work, tmp_path):
        assert "after destroy_process_group()" in said


def test_outside_of_a_job_it_says_how_to_start_one() -> None:
    assert "torchrun" in refused(lambda: ours(stack()), kind=LaunchError)
