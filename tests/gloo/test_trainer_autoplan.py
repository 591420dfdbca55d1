"""plan="auto": when processes probe, what the plan cache does, and what profiling preserves."""

import inspect
import logging
import os
import random
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import IterableDataset

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.machine import DEVICE
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.probe.probe import ProbeOptions
from polyrhythm.run.trainer import autoplan
from polyrhythm.run.trainer.autoplan import (
    AutoPlanner,
    layer_blocks,
    profile_layers,
    profile_sizes,
)
from polyrhythm.run.trainer.config import DeviceConfig, TrainerConfig
from polyrhythm.run.trainer.rank_assignment import assign_ranks
from polyrhythm.run.trainer.run_dir import PLAN, PlanKey, load_cached_plan
from polyrhythm.run.trainer.trainer import Trainer
from polyrhythm.sync.modes import SyncConfig
from tests.gloo.trainer_jobs import model, run_job, samples


def auto_trainer(**more: Any) -> Trainer:
    optimizer = partial(torch.optim.SGD, lr=1e-2)
    options: dict[str, Any] = {"batch_size": 24, "timeout": 20.0, **more}
    return Trainer(options.pop("model", model), mse_loss, optimizer, samples(), **options)


def fail_if_probed(ctx: DistContext, *_: object) -> None:
    wait_for_all(ctx)
    raise AssertionError("measured")


def wait_for_all(ctx: DistContext) -> None:
    """Rank 0 hosts the store: it waits until all processes are here."""
    assert ctx.store is not None
    num_here = ctx.store.add("here", 1)
    deadline = time.monotonic() + 20
    while ctx.rank == 0 and num_here < ctx.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
        num_here = ctx.store.add("here", 0)


def config(**more: Any) -> TrainerConfig:
    """Return the arguments of a Trainer with its defaults."""
    names = {field.name for field in fields(TrainerConfig)}
    signature = inspect.signature(Trainer).parameters
    options = {name: signature[name].default for name in names} | {
        "sync": SyncConfig(),
        "device": DeviceConfig(),
    }
    return TrainerConfig(**options | {"loss_fn": mse_loss, "optimizer_fn": SGD} | more)


def test_one_machine_uses_replicas_without_probing(tmp_path: Path) -> None:
    def work(_: DistContext | None) -> tuple[int, int]:
        autoplan.probe = fail_if_probed  # type: ignore[attr-defined]
        with auto_trainer() as trainer:
            trainer.fit(max_steps=1)
            return trainer.plan.num_stages, trainer.plan.num_pipelines

    assert run_job(3, work, tmp_path) == [(1, 3)] * 3


def slow_network_probe(ctx: DistContext, name: str, options: ProbeOptions) -> Cluster | None:
    """Return the cluster of a slow network, on which replicas would mostly wait for averages."""
    if ctx.rank > 0:
        return None
    names = tuple(f"host{rank}" for rank in range(ctx.world_size))
    return Cluster(
        name=options.cluster_name,
        devices=tuple(Device(name=name, region=name, flops=1e9) for name in names),
        regions=names,
        latency=((0.0, 0.0001), (0.0001, 0.0)),
        bandwidth=((0.0, 1e4), (1e4, 0.0)),
        flops_dtype=options.dtype,
    )


@pytest.mark.long
def test_ranks_follow_plan_devices_and_cached_plan_is_reused(tmp_path: Path) -> None:
    def work(ctx: DistContext | None, *, probe: Any) -> tuple[str, int, list[float]]:
        assert ctx is not None
        os.environ[DEVICE] = f"host{ctx.rank}"
        autoplan.probe = probe  # type: ignore[attr-defined]
        logging.basicConfig(level=logging.INFO, force=True)  # replaces pytest's handlers
        with auto_trainer(model=wide, run_dir=tmp_path / "run") as trainer:
            stage = trainer.worker.stage
            assert trainer.plan.pipelines[0].devices[stage] == f"host{ctx.rank}"
            return str(trainer.plan), stage, list(trainer.fit(max_steps=2).losses)

    first = run_job(2, partial(work, probe=slow_network_probe), tmp_path / "first")
    again = run_job(2, partial(work, probe=fail_if_probed), tmp_path / "again")
    assert [plan for plan, _, _ in first] == [first[0][0]] * 2
    assert {stage for _, stage, _ in first} == {0, 1}
    with auto_trainer(model=wide) as single:
        expected = list(single.fit(max_steps=2).losses)
    for found in (first, again):
        (losses,) = [losses for _, stage, losses in found if stage == 1]
        assert losses == pytest.approx(expected, abs=1e-5)
    for folder, origin in (("first", "measured in"), ("again", "used again")):
        log = (tmp_path / folder / "logs" / "rank0.log").read_text()
        assert log.count(f"plan {origin}") == 1
        assert "2 stages x 1 pipeline," in log


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 4))


def test_unsplittable_model_is_not_probed(tmp_path: Path) -> None:
    def work(ctx: DistContext | None) -> int:
        assert ctx is not None
        os.environ[DEVICE] = f"host{ctx.rank}"
        autoplan.probe = fail_if_probed  # type: ignore[attr-defined]
        with auto_trainer(model=lambda: nn.Linear(8, 4)) as trainer:
            return trainer.plan.num_pipelines

    assert run_job(2, work, tmp_path) == [2, 2]


def test_model_too_large_for_one_machine_is_probed(tmp_path: Path) -> None:
    def work(_: DistContext | None) -> str:
        autoplan.probe = fail_if_probed  # type: ignore[attr-defined]
        with pytest.raises(AssertionError) as raised:
            auto_trainer(device=DeviceConfig(memory_limit=100))
        time.sleep(0.2)
        return str(raised.value)

    assert run_job(2, work, tmp_path) == ["measured"] * 2


def test_missing_batch_size_is_rejected_before_waiting_for_peers(tmp_path: Path) -> None:
    def work(ctx: DistContext | None) -> str:
        assert ctx is not None
        os.environ[DEVICE] = f"host{ctx.rank}"
        with pytest.raises(PlanError) as raised:
            auto_trainer(batch_size=None)
        return raised.value.wrong

    assert run_job(2, work, tmp_path) == ["no batch_size"] * 2


def test_invalid_microbatch_size_is_rejected_before_probing(tmp_path: Path) -> None:
    def work(ctx: DistContext | None) -> str:
        assert ctx is not None
        os.environ[DEVICE] = f"host{ctx.rank}"
        autoplan.probe = fail_if_probed  # type: ignore[attr-defined]
        with pytest.raises(PlanError) as raised:
            auto_trainer(microbatch_size=5)
        return raised.value.wrong

    expected = "batch_size=24 with microbatch_size=5 and plan='auto'"
    assert run_job(2, work, tmp_path) == [expected] * 2


class _Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + float(np.random.rand())
        return x * scale + torch.randn_like(x)


def test_profiling_preserves_model_and_rng_state() -> None:
    whole = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), _Noisy(), nn.Linear(6, 4))
    whole[0].weight.grad = torch.ones(6, 8)
    whole.eval()
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    layers = profile_layers(
        config(batch_size=8),
        whole,
        samples(),
        sizes=(4, 2, 1),
        device=torch.device("cpu"),
    )
    assert [layer.name.partition(".")[2] for layer in layers] == [type(x).__name__ for x in whole]
    # A batch norm needs more than one sample: size 1 is skipped.
    assert [each.microbatch_size for each in layers[0].sizes] == [2]
    assert layers[0].parameter_bytes == (8 * 6 + 6) * 4
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    assert torch.equal(whole[0].weight.grad, torch.ones(6, 8))
    assert whole[3].weight.grad is None
    assert not whole.training
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()


class _Counting(IterableDataset[Any]):
    """An iterable dataset whose inputs have names."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield {"x": torch.full((8,), float(self.at)), "y": torch.ones(8)}, torch.zeros(4)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden)


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.first(x if y is None else x + y)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.last(x)
        return logits


def test_layer_list_is_profiled_with_prologue_and_epilogue() -> None:
    stream = _Counting()
    layers = profile_layers(
        config(
            batch_size=4, split=LayerSplit(layers="blocks", prologue=("first",), epilogue=("last",))
        ),
        _Blocks(),
        stream,
        sizes=(2, 1),
        device=torch.device("cpu"),
    )
    block, first, last = 8 * 9 * 4, 8 * 9 * 4, 4 * 9 * 4
    assert [layer.parameter_bytes for layer in layers] == [block + first, block, block + last]
    assert [layer.activation_bytes for layer in layers] == [2 * 8 * 4, 2 * 8 * 4, 2 * 4 * 4]
    assert stream.state_dict() == {"at": 0}, "training starts with the first sample"


def test_measured_stage_recomputes_if_its_memory_limit_requires_it() -> None:
    """Layers of 32 KiB weights, times 4; 64 samples store 128 KiB and more in each."""
    whole = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(6))
    )
    here = Cluster(
        name="one",
        devices=(Device(name="a", region="a", memory=2**30),),
        regions=("a",),
        latency=((1e-4,),),
        bandwidth=((1e9,),),
    )
    found = {}
    for limit in (None, 6 * 4 * 36_000 + 400_000):
        for choice in ("auto", "always"):
            device = DeviceConfig("cpu", memory_limit=limit, recompute=choice)
            chosen = config(batch_size=64, microbatch_size=64, device=device)
            processes = SimpleNamespace(num_processes=1, ctx=SimpleNamespace(keeps_survivors=False))
            plan = AutoPlanner(chosen, whole, samples(), processes)._search_plan(here)
            found[limit is None, choice] = plan.recompute
    assert found == {
        (True, "auto"): (),
        (True, "always"): (True,),
        (False, "auto"): (True,),
        (False, "always"): (True,),
    }


def test_layers_without_parameters_stay_with_a_neighbour_layer() -> None:
    kinds = [nn.Flatten(), nn.Linear(8, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)]
    assert layer_blocks(LayerSplit(), nn.Sequential(*kinds)) == (4, 1, 1)
    assert layer_blocks(LayerSplit(layers="blocks"), _Blocks()) == (1, 1, 1)


@pytest.mark.parametrize(
    ("batch", "microbatch", "num_processes", "sizes"),
    [
        (24, None, 4, (6, 2, 1)),
        (64, None, 4, (16, 4, 1)),
        (4096, None, 4, (64, 8, 1)),
        (23, None, 4, (1,)),
        (2, None, 4, (1,)),
        (24, 3, 4, (3,)),
    ],
)
def test_profile_sizes_divide_the_batch(
    batch: int, microbatch: int | None, num_processes: int, sizes: tuple[int, ...]
) -> None:
    assert (
        profile_sizes(config(batch_size=batch, microbatch_size=microbatch), num_processes) == sizes
    )


def planned() -> Plan:
    return Plan(
        layers_per_stage=(2, 1),
        pipelines=(PipelinePlan(devices=("b", "a"), num_microbatches=4, schedule="1f1b"),),
        microbatch_size=2,
        sync="decoupled",
        model="a model",
    )


@pytest.mark.parametrize(
    ("change", "is_used"),
    [
        ({}, True),
        ({"microbatch_size": 2}, True),
        ({"microbatch_size": 4}, False),
        ({"devices": ("a", "c")}, False),
        ({"devices": ("a", "b", "c")}, False),
        ({"model": "another"}, False),
        ({"batch": 16}, False),
        ({"sync": "groups"}, False),
        ({"buddy": False}, False),
    ],
)
def test_cached_plan_is_reused_only_for_the_same_job(
    tmp_path: Path, change: dict[str, Any], is_used: bool
) -> None:
    planned().save(tmp_path / PLAN)
    values: dict[str, Any] = {
        "devices": ("a", "b"),
        "model": "a model",
        "batch": 8,
        "microbatch_size": None,
        "sync": "decoupled",
    }
    found = load_cached_plan(tmp_path, PlanKey(**{**values, **change}))
    assert found == (planned() if is_used else None)


def test_damaged_cached_plan_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PLAN).write_text('{"schema": 2, "layers_per_st')
    key = PlanKey(devices=("a",), model="", batch=1, microbatch_size=None, sync="decoupled")
    assert load_cached_plan(tmp_path, key) is None
    assert "not used" in caplog.text


def test_processes_on_one_device_are_assigned_by_rank() -> None:
    names = ["a", "b", "a"]
    pipelines = tuple(PipelinePlan(devices=(name,)) for name in ("b", "a (rank 2)", "a (rank 0)"))
    assert assign_ranks(Plan(layers_per_stage=(1,), pipelines=pipelines), names) == [2, 0, 1]
