"""Exported models load in processes that cannot import polyrhythm."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from polyrhythm.run.checkpoint.checkpointer import Checkpointer
from polyrhythm.run.checkpoint.export import export, hugging_face_configs
from polyrhythm.run.checkpoint.manifest import CheckpointError
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.checkpoint_models import (
    TiedLanguageModel,
    sequential_model,
    sequential_stage,
    tied_model_stage,
)
from tests.gloo.commands import run_export, run_without_polyrhythm
from tests.gloo.pipelines import assert_equal, run_stages


def save_with_two_stages(folder: Path, output: Path, *, tied: bool = False) -> None:
    """Save steps 1 and 2 with different weights."""

    def work(ctx: DistContext) -> None:
        part = (tied_model_stage if tied else sequential_stage)(ctx.rank, ctx.world_size)
        with Checkpointer(folder, tied=part.tied) as checkpoints:
            checkpoints.save(1, part.module, torch.optim.SGD(part.module.parameters()))
            with torch.no_grad():
                for parameter in part.module.parameters():
                    parameter.mul_(2)
            checkpoints.save(2, part.module, blocking=True)

    run_stages(2, work, output)


def test_an_exported_model_loads_without_polyrhythm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_two_stages(tmp_path / "run" / "checkpoints", tmp_path)
    assert run_export(tmp_path / "run") == 0
    assert "model.safetensors" in capsys.readouterr().out
    code = """
import torch
from safetensors.torch import load_file
from torch import nn
model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(),
    nn.Linear(5, 5).to(torch.bfloat16), nn.Linear(5, 4), nn.BatchNorm1d(4))
model.load_state_dict(load_file("export/step-00000002/model.safetensors"))
print(model[3].weight.dtype, [p.double().sum().item() for p in model.parameters()])
"""
    expected = [(2 * p.detach()).double().sum().item() for p in sequential_model().parameters()]
    assert run_without_polyrhythm(code, tmp_path / "run") == f"torch.bfloat16 {expected}"


def test_export_of_chosen_step_and_error_for_missing_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_two_stages(tmp_path / "checkpoints", tmp_path)
    assert run_export(tmp_path, "--step", "1", "--out", tmp_path / "one") == 0
    assert_equal(
        load_file(tmp_path / "one" / "model.safetensors"), dict(sequential_model().state_dict())
    )
    assert run_export(tmp_path, "--step", "1", "--out", tmp_path / "one") == 2
    assert f"{tmp_path / 'one'} exists" in capsys.readouterr().err
    assert run_export(tmp_path, "--step", "3") == 2
    assert "--step with one of 1, 2" in capsys.readouterr().err
    assert run_export(tmp_path / "nowhere") == 2
    (tmp_path / "checkpoints" / "step-00000001" / "stage-0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"stage-0.safetensors has 0 bytes"):
        export(tmp_path / "checkpoints" / "step-00000001", tmp_path / "two")
    assert not list(tmp_path.glob("*two*"))


def test_large_model_is_exported_as_shards_with_index(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, sequential_model())
    out = export(tmp_path / "step-00000001", tmp_path / "out", largest_file=100)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    expected = dict(sequential_model().state_dict())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    assert list(index["weight_map"]) == list(expected)
    loaded = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert_equal(loaded, expected)


@pytest.mark.long
def test_tied_weights_are_exported_once_and_load_with_safetensors(tmp_path: Path) -> None:
    save_with_two_stages(tmp_path / "checkpoints", tmp_path, tied=True)
    out = export(tmp_path / "checkpoints" / "step-00000001", tmp_path / "out")
    assert "head.weight" not in load_file(out / "model.safetensors")
    code = """
from safetensors.torch import load_model
from torch import nn
model = nn.Module()
model.embed, model.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
model.norm = nn.LayerNorm(8)
model.head.weight = model.embed.weight
print(load_model(model, "out/model.safetensors"), model.head.weight.double().sum().item())
"""
    expected = TiedLanguageModel().embed.weight.detach().double().sum().item()
    assert run_without_polyrhythm(code, tmp_path) == f"(set(), []) {expected}"


@pytest.mark.long
def test_exported_transformers_model_loads_with_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=11)
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model, run_info=hugging_face_configs(model))
    export(tmp_path / "step-00000001", tmp_path / "out")
    code = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("out")
print(type(model).__name__, [p.double().sum().item() for p in model.parameters()])
"""
    expected = [p.detach().double().sum().item() for p in model.parameters()]
    assert run_without_polyrhythm(code, tmp_path) == f"GPT2LMHeadModel {expected}"


def test_plain_model_has_no_hugging_face_configs() -> None:
    assert hugging_face_configs(nn.Linear(2, 2)) == {}
