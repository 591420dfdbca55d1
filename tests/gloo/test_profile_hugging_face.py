"""Profiles of Hugging Face models: by factory and split, by type, and by folder."""

from pathlib import Path

import pytest

from polyrhythm.cli import main
from polyrhythm.describe.model import ModelProfile
from polyrhythm.errors import DescriptionError
from polyrhythm.plan.plan import Plan
from polyrhythm.run.profile.hugging_face import HuggingFaceModel
from polyrhythm.run.profile.profile import count_profile, measure_profile
from tests.grids import long_except

TINY = "gpt2,n_layer=3,n_embd=16,n_head=2,vocab_size=50,bos_token_id=1,eos_token_id=1,sequence=8"
FACTORY = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from polyrhythm import LayerSplit

def build():
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50))
    split = LayerSplit(
        layers="transformer.h", prologue=["transformer.wte", "transformer.wpe", "transformer.drop"],
        epilogue=["transformer.ln_f", "lm_head"],
    )
    return model, {"input_ids": torch.randint(50, (2, 8))}, split

def forgotten():
    return build()[:2]

def wrong():
    model, example, split = build()
    return model, example, "transformer.h"

def plain():
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]), torch.randn(4, 8)
"""
WORDS, POSITIONS, NORM = 50 * 16, 1024 * 16, 2 * 16
BLOCK = 2 * NORM + (16 * 48 + 48) + (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16)


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_factory.py"
    path.write_text(FACTORY)
    return path


def test_layers_of_a_model_with_a_split_are_measured(factory: Path) -> None:
    profile = measure_profile(f"{factory}:build", sizes=(2,), repeat=1, device="cpu")
    first, middle, last = (layer.parameter_bytes for layer in profile.layers)
    assert middle == 4 * BLOCK
    assert first == 4 * (BLOCK + WORDS + POSITIONS)
    assert last == 4 * (BLOCK + NORM + WORDS), "the tied head is on the last stage, too"
    assert profile.layers[-1].activation_bytes == 4 * 2 * 8 * 50


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", "a str with a split"),
        pytest.param("missing", "unknown function 'missing'", marks=pytest.mark.long),
    ],
)
def test_invalid_factory_of_a_file_is_refused(factory: Path, name: str, message: str) -> None:
    with pytest.raises(DescriptionError, match=message):
        measure_profile(f"{factory}:{name}", sizes=(2,), repeat=1, device="cpu")
    with pytest.raises(DescriptionError, match=r"nowhere.py: no such file"):
        measure_profile("nowhere.py:build")


@pytest.mark.long
def test_counted_layers_have_the_bytes_of_measured_ones() -> None:
    counted = count_profile(TINY, flops=1e12, sizes=(2, 1))
    measured = measure_profile(TINY, sizes=(2, 1), repeat=1, device="cpu")
    assert counted.microbatch_sizes == (1, 2)
    for count, measure in zip(counted.layers, measured.layers, strict=True):
        assert count.parameter_bytes == measure.parameter_bytes
        assert count.activation_bytes == measure.activation_bytes
        assert count.backward == pytest.approx(2 * count.forward)
    assert counted.layers[1].parameter_bytes == 4 * BLOCK
    products = 2 * 2 * 8 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + 2 * 2 * 2 * 8 * 8 * 16
    assert counted.layers[1].forward == pytest.approx(products / 1e12)


def test_config_of_a_folder_and_changed_values_are_used(tmp_path: Path) -> None:
    model, example = HuggingFaceModel(TINY).build()
    assert example["input_ids"].shape == (8, 8)
    model.config.save_pretrained(tmp_path / "saved")
    again, example = HuggingFaceModel(f"{tmp_path}/saved,n_layer=2").build()
    assert type(again).__name__ == "GPT2LMHeadModel"
    assert len(again.transformer.h) == 2
    assert example["input_ids"].shape == (8, 512)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gpt3", "unknown model 'gpt3'"),
        ("gpt2,n_layers=3", "did you mean 'n_layer'"),
        ("gpt2,n_layer", "key=value"),
        ("gpt2,n_layer=4,n_head=5", "gpt2,n_layer=4,n_head=5: "),
        ("gpt2,n_layer=1,n_embd=16,n_head=2,sequence=2000", "from 1 to 1024"),
        ("t5", "an encoder and a decoder"),
        ("some/folder", "no config.json"),
    ],
)
def test_unusable_config_is_refused(source: str, message: str) -> None:
    with pytest.raises(DescriptionError, match=message):
        HuggingFaceModel(source).build()


@pytest.mark.parametrize("source", long_except(["tiny_factory.py:plain", TINY], 1))
def test_plan_takes_a_model_and_writes_its_profile(
    factory: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(factory.parent)
    flops = [] if ":" in source else ["--flops", "1e12"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "case4_regional", source, "--batch-size", "4", "-o", "plan.json", *flops])
    assert ended.value.code == 0
    plan = Plan.load("plan.json")
    assert plan.sources is not None
    assert plan.sources.profile == "plan.profile.json"
    assert len(ModelProfile.load(Path("plan.profile.json")).layers) == 3
