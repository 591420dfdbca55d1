"""The Trainer with models that have a list of layers, among them Hugging Face's, and their export.

Models are built small, from a configuration; nothing is downloaded.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.checkpoint_models import TiedLanguageModel
from tests.gloo.commands import run_export, run_without_polyrhythm
from tests.gloo.language_models import LANGUAGES, next_token_loss
from tests.gloo.trainer_jobs import run_job, samples

STEPS = 4


class TupleOutputModel(TiedLanguageModel):
    """Returns more than the loss needs, like models of transformers."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden)), hidden


def text() -> TensorDataset:
    """Return sequences of consecutive words, each with another first word."""
    words = (torch.arange(40)[:, None] + torch.arange(9)) % 11
    return TensorDataset(words[:, :-1], words[:, 1:])


def train(
    folder: Path,
    build: Callable[[], nn.Module],
    names: dict[str, Any],
    layers_per_stage: tuple[int, ...],
    num_pipelines: int,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train, save in `run`; return the loss of each batch and the first pipeline's weights."""
    plan = Plan(
        layers_per_stage=layers_per_stage,
        pipelines=(PipelinePlan(schedule="1f1b"),) * num_pipelines,
    )

    def work(ctx: DistContext | None) -> Any:
        with Trainer(
            build,
            next_token_loss,
            partial(torch.optim.SGD, lr=0.5, momentum=0.9),
            text(),
            split=LayerSplit(**names),
            plan=plan,
            batch_size=8,
            microbatch_size=2,
            clip_grad_norm=1.0,
            timeout=30.0,
            run_dir=folder / "run",
        ) as made:
            ends = made.fit(max_steps=STEPS).steps
            made.save()
            return [(end.own.loss, end.own.num_samples) for end in ends], made.model.state_dict()

    found = run_job(plan.num_workers, work, folder)
    last = [ends for ends, _ in found if ends[0][0] is not None]
    losses = [sum(loss * n / 8 for loss, n in ends) for ends in zip(*last, strict=True)]
    return losses, {k: v for _, state in found[: plan.num_stages] for k, v in state.items()}


def test_layer_list_gives_same_losses_in_one_and_several_stages(tmp_path: Path) -> None:
    names = {"layers": "layers", "prologue": ["embed"], "epilogue": ["norm", "head"]}
    single, weights = train(tmp_path, TupleOutputModel, names, (3,), 1)
    losses, found = train(tmp_path / "job", TupleOutputModel, names, (1, 2), 2)
    assert losses == pytest.approx(single, abs=1e-5)
    assert single[-1] < single[0]
    for name, expected in weights.items():
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2 tied", "llama untied"])
def test_transformers_model_is_trained_and_exported(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401  # once before the fork

    language = LANGUAGES[name]
    single, weights = train(tmp_path, language.build, language.names, (4,), 1)
    losses, _ = train(tmp_path / "job", language.build, language.names, (2, 2), 2)
    assert losses == pytest.approx(single, abs=1e-5)
    assert single[-1] < single[0]

    assert run_export(tmp_path / "job" / "run", "--out", tmp_path / "out") == 0
    assert "config.json" in capsys.readouterr().out
    stored = load_file(tmp_path / "out" / "model.safetensors")
    tied = json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert set(weights) - set(stored) == ({"lm_head.weight"} if tied else set())
    code = """
import torch
from transformers import AutoModelForCausalLM
torch.save(dict(AutoModelForCausalLM.from_pretrained("out").state_dict()), "found.pt")
"""
    run_without_polyrhythm(code, tmp_path)
    found = torch.load(tmp_path / "found.pt")
    assert set(found) == set(weights)
    for key, expected in weights.items():
        torch.testing.assert_close(found[key], expected, atol=1e-5, rtol=0)


def test_gradients_are_clipped_although_a_stage_is_frozen(tmp_path: Path) -> None:
    def half_frozen() -> nn.Sequential:
        built = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
        built[0].requires_grad_(False)
        return built

    def work(ctx: DistContext | None) -> list[float]:
        plan = Plan(layers_per_stage=(1, 1), pipelines=(PipelinePlan(schedule="1f1b"),))
        sgd = partial(torch.optim.SGD, lr=0.1)
        options: Any = {"batch_size": 24, "clip_grad_norm": 0.01, "timeout": 30.0}
        with Trainer(half_frozen, mse_loss, sgd, samples(), plan=plan, **options) as made:
            return list(made.fit(max_steps=2).losses)

    first, last = run_job(2, work, tmp_path)
    assert first == last
    assert first[1] < first[0]
