"""Trainer(stages=, pipelines=): layers by parameters and memory, and refusals."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from polyrhythm.errors import UserError
from polyrhythm.plan.plan import PLAN_VARIABLE, even_plan
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.machine import DEVICE
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.trainer import autoplan
from polyrhythm.run.trainer.autoplan import count_parameters
from polyrhythm.run.trainer.config import DeviceConfig
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.trainer_jobs import run_job, samples


class Tagger(nn.Module):
    """Eight equal layers after an embedding of many weights, which costs no time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.table = nn.Embedding(1000, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.table.weight[0]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden)
        return logits


class Reversed(Tagger):
    """Calls its layers in an order that no pipeline can follow."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.table.weight[0]
        for layer in reversed(self.layers):
            hidden = torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden)
        return logits


SPLIT = LayerSplit(layers="layers", prologue=("embed", "table"), epilogue=("head",))
COPY = 4 * 4  # bytes of a weight, its gradient and Adam's two values


def make(**more: Any) -> Trainer:
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    options: dict[str, Any] = {"batch_size": 24, "timeout": 20.0, "split": SPLIT, **more}
    return Trainer(options.pop("model", Tagger), mse_loss, optimizer, samples(), **options)


def test_work_leaves_out_embeddings_and_memory_counts_shared_weights_once() -> None:
    model = Tagger()
    model.layers[0].requires_grad_(False)
    layer = 16 * 16 + 16
    blocks = [[model.embed, model.table, model.layers[0]], [model.layers[1]], [model.layers[1]]]
    work, needed = count_parameters(blocks)
    assert work == [8 * 16 + 16 + layer, layer, layer]
    assert needed[0, 1] == 4 * layer + COPY * (8 * 16 + 16 + 16_000)
    assert needed[1, 3] == needed[1, 2] == COPY * layer


def test_layers_follow_memory_of_devices_and_losses_stay_those_of_one_process(
    tmp_path: Path,
) -> None:
    """The first device holds the embedding and one layer; the script may join the job itself."""

    def work(ctx: DistContext | None, *, joins: bool) -> tuple[Any, list[float]]:
        assert ctx is not None
        limit = COPY * (16_000 + 600) if ctx.rank == 0 else "1GiB"
        if joins:
            group = ctx.process_group(20.0)
            group.__enter__()
        with make(pipelines=1, device=DeviceConfig(memory_limit=limit)) as trainer:
            losses = [] if joins else list(trainer.fit(max_steps=2).losses)
            found = trainer.plan.layers_per_stage
        if joins:
            dist.destroy_process_group()
        return found, losses

    found = run_job(2, partial(work, joins=False), tmp_path)
    with make() as single:
        expected = list(single.fit(max_steps=2).losses)
    assert [layers for layers, _ in found] == [(1, 7)] * 2
    assert found[1][1] == pytest.approx(expected, abs=1e-5)
    assert [layers for layers, _ in run_job(2, partial(work, joins=True), tmp_path)] == [(1, 7)] * 2


def refusal(ctx: DistContext | None, **more: Any) -> str:
    with pytest.raises(UserError) as raised:
        make(**more)
    if dist.is_initialized():
        dist.destroy_process_group()
    return str(raised.value)


def test_stage_that_does_not_fit_is_refused_in_all_processes(tmp_path: Path) -> None:
    limit = COPY * (16_000 + 1000)
    found = run_job(
        2, partial(refusal, stages=2, device=DeviceConfig(memory_limit=limit // 8)), tmp_path
    )
    assert found[0] == found[1]
    assert "stage 0 of 2 (layers 0 to 0) needs 256.5KiB and" in found[0]
    assert f"has {limit // 8 / 1024:.4g}KiB for it" in found[0]
    assert "layer 0 alone needs" in found[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stages": 2}, "stages=2 with 1 process\n  expected: 2 processes"),
        ({"stages": 0}, "stages=0"),
        ({"pipelines": 1.5}, "pipelines=1.5"),
        (
            {"stages": 1, "plan": even_plan(num_layers=8, num_stages=1, num_pipelines=1)},
            "with plan=",
        ),
    ],
)
def test_impossible_degrees_are_refused(more: dict[str, Any], message: str) -> None:
    assert message in refusal(None, **more)


def test_degrees_of_command_and_script_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYRHYTHM_PIPELINES", "2")
    assert "pipelines=2 on the command line" in refusal(None, pipelines=1)
    assert "pipelines=2 with 1 process" in refusal(None)
    monkeypatch.setenv(PLAN_VARIABLE, "plan.json")
    assert "pipelines=2 and a plan" in refusal(None)


def test_forgotten_split_names_the_argument_and_the_lists_of_the_model() -> None:
    plan = even_plan(num_layers=8, num_stages=2, num_pipelines=1)
    text = refusal(None, plan=plan, split=LayerSplit(), model=Reversed)
    assert 'name `split=`: split=LayerSplit(layers="layers"' in text
    assert "layers (8)" in text
    assert "profile" not in text
    assert "'layer' does not exist" in refusal(None, plan=plan, split=LayerSplit(layers="layer"))


@pytest.mark.long
def test_several_machines_measure_layers_first(tmp_path: Path) -> None:
    """Unless the model is too large for the device that would measure it."""

    def work(ctx: DistContext | None, *, limit: int | None) -> str:
        assert ctx is not None
        os.environ[DEVICE] = f"host{ctx.rank}"
        stages: list[int | None] = []

        def found(planner: Any, cluster: Any) -> Any:
            stages.append(planner.num_stages)
            return even_plan(num_layers=8, num_stages=2, num_pipelines=1)

        autoplan.AutoPlanner._search_plan = found  # type: ignore[method-assign]
        with make(stages=2, device=DeviceConfig(memory_limit=limit)) as trainer:
            return f"{stages} {trainer.plan.layers_per_stage}"

    found = run_job(2, partial(work, limit=None), tmp_path)
    assert found == ["[2] (4, 4)", "[] (4, 4)"]
    small = COPY * (16_000 + 1500)
    assert run_job(2, partial(work, limit=small), tmp_path) == ["[] (4, 4)"] * 2
