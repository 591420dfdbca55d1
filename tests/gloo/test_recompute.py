"""Stages that recompute activations: the same gradients, fewer bytes, an unchanged model."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import TensorDataset

from polyrhythm.describe.model import ModelProfile
from polyrhythm.errors import LaunchError, PlanError, ScheduleError
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.plan import PipelinePlan, Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.partition import split_layers
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.run.profile.profile import ProfiledModel, count_profile, measure_layers
from polyrhythm.run.trainer.config import DeviceConfig
from polyrhythm.run.trainer.run_dir import PlanKey
from polyrhythm.run.trainer.trainer import Trainer
from tests.gloo.builtin_models import gpt
from tests.gloo.language_models import GPT2, VOCABULARY, next_token_loss, text
from tests.gloo.pipelines import (
    assert_equal,
    gradients,
    merged,
    random_batch,
    run_single_process,
    run_stages,
    step,
)
from tests.gloo.trainer_jobs import fit, plan_of, samples
from tests.grids import long_except
from tests.pure.plan_problems import cluster

SEEDS = (None, 7)
# Dynamo hides this warning, but not if warnings are errors.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def mlp(num_layers: int = 6, *, width: int = 8, dropout: float = 0.3) -> nn.Sequential:
    """Linear layers, activation functions and dropout, each a layer of its own."""
    torch.manual_seed(3)
    layers = [
        [nn.Linear(width, width), nn.GELU(), *([nn.Dropout(dropout)] if dropout else [])]
        for _ in range(num_layers)
    ]
    return nn.Sequential(*(layer for block in layers for layer in block))


def gpt2(**more: Any) -> nn.Module:
    """Return a GPT-2 with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **more})
    ).train()


def llama() -> nn.Module:
    """Return a Llama whose attention drops out; its layers take tensors by name, and tuples."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **heads)
    ).train()


def trained(
    model: nn.Module, seed: int | None, *, recompute: bool, **more: Any
) -> tuple[dict[str, Tensor], list[str], int]:
    """Return gradients after two steps, names of the state, and activation bytes."""
    is_text = not isinstance(model, nn.Sequential)
    make = Pipeline.from_layers if is_text else Pipeline.from_sequential
    torch.manual_seed(100)
    options = {"n_microbatches": 4, "schedule": "1f1b", "timeout": 30, **more}
    loss = next_token_loss if is_text else mse_loss
    with make(model, loss_fn=loss, seed=seed, recompute=recompute, **options) as pipeline:
        for number in range(2):
            step(pipeline, *(text(number) if is_text else random_batch(8, 8, seed=number)))
        (nbytes,) = pipeline.activation_bytes.values()
        return gradients(pipeline.module), list(pipeline.module.state_dict()), nbytes


@pytest.mark.timeout(120)
@pytest.mark.parametrize("build", long_except([mlp, gpt2, llama], 0))
def test_gradients_are_bit_identical_with_recomputation(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def compare(*_: DistContext) -> None:
        for seed in SEEDS:
            expected, names, nbytes = trained(build(), seed, recompute=False)
            actual, recomputing_names, fewer = trained(build(), seed, recompute=True)
            assert_equal(actual, expected)
            assert recomputing_names == names
            assert fewer < nbytes

    run_single_process(compare, tmp_path)
    run_stages(2, compare, tmp_path)


@pytest.mark.timeout(90)
def test_stages_choose_independently_and_masks_do_not_depend_on_it(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[dict[str, Tensor]]:
        return [
            trained(mlp(), 7, recompute=recompute)[0]
            for recompute in (False, ctx.rank == 0, ctx.rank == 1)
        ]

    single = run_single_process(lambda: trained(mlp(), 7, recompute=True)[0], tmp_path)
    for found in zip(*run_stages(2, work, tmp_path), strict=True):
        assert_equal(merged(found), single)


@pytest.mark.timeout(60)
def test_users_model_keeps_its_classes_and_does_not_recompute(tmp_path: Path) -> None:
    def work() -> None:
        model = gpt2()
        kinds = [type(module) for module in model.modules()]
        part = split_layers(model, stage=0, num_stages=1, **GPT2, recompute=True)
        assert [type(module) for module in model.modules()] == kinds
        assert dict(part.module.named_parameters()).keys() == dict(model.named_parameters()).keys()
        layer, view = model.transformer.h[1], part.module.transformer.h[1]
        assert isinstance(view, type(layer))
        part.module.eval()
        assert not layer.training, "one state"
        assert_equal(part.module(text(0)[0]), model(text(0)[0]).logits)

    run_single_process(work, tmp_path)


@compiles
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("backend", "in_place"),
    long_except(list(product(["eager", "aot_eager"], [False, True])), 3),
)
def test_compiled_layers_recompute(backend: str, in_place: bool, tmp_path: Path) -> None:
    def blocks(*, is_compiled: bool) -> nn.Sequential:
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)]
        for layer in layers if is_compiled and in_place else ():
            layer.compile(backend=backend)
        if is_compiled and not in_place:
            return nn.Sequential(*(torch.compile(layer, backend=backend) for layer in layers))
        return nn.Sequential(*layers)

    def work() -> None:
        expected = list(trained(blocks(is_compiled=False), None, recompute=False)[0].values())
        found, _, nbytes = trained(blocks(is_compiled=True), None, recompute=True)
        torch.testing.assert_close(list(found.values()), expected, rtol=0, atol=1e-6)
        assert nbytes == 5 * 2 * 8 * 4, "inputs of the layers, and two of the loss"

    run_single_process(work, tmp_path)


@compiles
@pytest.mark.timeout(120)
@pytest.mark.long  # it compiles for 20 s
def test_compiled_layers_of_a_list_recompute(tmp_path: Path) -> None:
    def work(*_: DistContext) -> None:
        expected = trained(gpt2(), 7, recompute=False)
        model = gpt2()
        for layer in model.transformer.h:
            layer.compile(backend="aot_eager")
        found = trained(model, 7, recompute=True)
        assert found[0].keys() == expected[0].keys()
        for name, gradient in expected[0].items():
            torch.testing.assert_close(found[0][name], gradient, rtol=0, atol=1e-6)
        assert found[2] < expected[2]

    run_stages(2, work, tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("build", [partial(mlp, dropout=0.0), gpt2])
def test_recomputation_uses_stashed_weights(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Without a flush, an update comes between the forward and the backward of a batch."""

    def train(model: nn.Module, *, recompute: bool) -> dict[str, Tensor]:
        is_text = not isinstance(model, nn.Sequential)
        make = Pipeline.from_layers if is_text else Pipeline.from_sequential
        loss = next_token_loss if is_text else mse_loss
        options = {"flush": False, "n_microbatches": 1, "timeout": 30, "seed": 7}
        with make(model, loss_fn=loss, recompute=recompute, **options) as pipeline:
            optimizer = SGD(pipeline.module.parameters(), lr=0.5)
            for number in range(6):
                step(pipeline, *(text(number) if is_text else random_batch(8, 8, seed=number)))
                if pipeline.has_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
            for _ in pipeline.drain():
                optimizer.step()
                optimizer.zero_grad()
            return {name: p.detach() for name, p in pipeline.module.named_parameters()}

    def work(ctx: DistContext) -> None:
        make = partial(build, tie_word_embeddings=False) if build is gpt2 else build
        assert_equal(train(make(), recompute=True), train(make(), recompute=False))

    run_stages(2, work, tmp_path)


@pytest.mark.timeout(60)
def test_skips_and_layers_in_place_recompute(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 8),
            nn.GELU(),
            nn.Linear(8, 8),
            nn.ReLU(inplace=True),
            nn.Bilinear(8, 8, 8),
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)),
        )

    def work(*_: DistContext) -> None:
        options = {"skips": {4: 1}}
        expected, _, _ = trained(model(), None, recompute=False, **options)
        assert_equal(trained(model(), None, recompute=True, **options)[0], expected)

    run_stages(2, work, tmp_path)


def profile_of(model: nn.Module, example: Any) -> ModelProfile:
    subject = ProfiledModel.of((model, example), source="test")
    layers = measure_layers(subject, size=2, other_sizes=(1,), repeat=1, device=torch.device("cpu"))
    return ModelProfile(name="test", microbatch_size=2, layers=layers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", long_except(["mlp", "gpt", "gpt2", "llama"], 0, 1))
def test_predicted_activations_of_a_recomputing_stage_are_measured(
    kind: str, tmp_path: Path
) -> None:
    """On one stage and on both of two; the loss is a sum, which saves nothing."""
    tokens = text(0)[0]
    builds: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "mlp": (partial(mlp, dropout=0.0), torch.randn(8, 8)),
        "gpt": (partial(gpt, 4, 16, 12, 2, VOCABULARY), tokens),
        "gpt2": (gpt2, tokens),
        "llama": (llama, tokens),
    }
    build, inputs = builds[kind]

    def measured(*_: DistContext) -> tuple[int, int]:
        model = build()
        is_split = isinstance(model, nn.Sequential)
        make = Pipeline.from_sequential if is_split else Pipeline.from_layers
        options = {"n_microbatches": 4, "schedule": "1f1b", "timeout": 30}
        loss: Any = lambda output, _: output.sum()  # noqa: E731
        with make(model, loss_fn=loss, recompute=True, **options) as pipeline:
            step(pipeline, inputs, inputs)
            (nbytes,) = pipeline.activation_bytes.values()
            return pipeline.stage, nbytes

    def profile() -> list[tuple[int, int]]:
        found = profile_of(build(), inputs[:2] if kind in ("mlp", "gpt") else {"input_ids": tokens})
        problem = Problem(cluster=cluster((1,)), profile=found, job=TrainingJob(batch_size=8))
        num_layers = problem.num_layers
        half = (num_layers + 1) // 2
        parts = [range(num_layers), range(half), range(half, num_layers)]
        before = [0, 0, found.layers[half - 1].activation_bytes]
        memory = [problem.memory(part, 2, part) for part in parts]
        return [(m.activation - 2 * b, m.recomputed) for m, b in zip(memory, before, strict=True)]

    predictions = run_single_process(profile, tmp_path)
    found = [run_single_process(measured, tmp_path), *run_stages(2, measured, tmp_path)]
    for (predicted, rest), (_, nbytes) in zip(predictions, found, strict=True):
        assert predicted == pytest.approx(nbytes, rel=0.05)
        assert rest > 0


def test_counted_profile_has_what_recomputing_layers_keep() -> None:
    found = count_profile("gpt2,n_layer=2,n_embd=32,n_head=2,sequence=32", flops=1e12)
    for layer in found.layers:
        assert layer.recompute_bytes is not None
        assert 32 * 32 * 4 <= layer.recompute_bytes < layer.stored_bytes / 5


@pytest.mark.timeout(60)
def test_model_that_recomputes_itself_is_not_wrapped_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with caplog.at_level(logging.WARNING, logger="polyrhythm"):
        part = split_layers(model, stage=0, num_stages=1, **GPT2, recompute=True)
    assert "recomputes its layers itself" in caplog.text
    assert part.module.transformer.h[0] is model.transformer.h[0]


def test_modules_without_known_layers_are_refused() -> None:
    class Opaque(nn.Linear): ...

    with pytest.raises(ScheduleError, match="recompute=True with a Opaque") as raised:
        Pipeline(Opaque(8, 8), loss_fn=mse_loss, n_microbatches=1, recompute=True)
    assert "from_layers" in raised.value.fix


@pytest.mark.timeout(60)
def test_sequential_split_by_hand_recomputes(tmp_path: Path) -> None:
    def work() -> None:
        found = []
        for recompute in (False, True):
            model = mlp()
            torch.manual_seed(5)
            options = {"loss_fn": mse_loss, "n_microbatches": 2, "schedule": "1f1b"}
            with Pipeline(model, **options, seed=3, recompute=recompute) as pipeline:
                step(pipeline, *random_batch(8, 8))
            found.append(gradients(model))
        assert_equal(*found)

    run_single_process(work, tmp_path)


def double_samples() -> TensorDataset:
    return TensorDataset(*(tensor.double() for tensor in samples().tensors))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("degrees", [(1, 1), pytest.param((2, 2), marks=pytest.mark.long)])
def test_trainer_with_recomputation_equals_one_without(
    degrees: tuple[int, int], tmp_path: Path
) -> None:
    """In float64; the replicas' weights are gathered by pre-hooks, which recomputation calls."""
    plan = plan_of(*degrees)
    recomputing = replace(plan, recompute=(True,) * plan.num_stages)
    torch.set_default_dtype(torch.float64)
    try:
        expected, weights = fit(tmp_path / "plain", *degrees, plan=plan, dataset=double_samples())
        losses, found = fit(
            tmp_path / "recompute", *degrees, plan=recomputing, dataset=double_samples()
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert losses == pytest.approx(expected, rel=0, abs=1e-12)
    for name, weight in weights.items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12)


class WordDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = text(index)[0][0]
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("has_loss_fn", [False, True])
def test_hugging_face_trainer_recomputes_always(has_loss_fn: bool, tmp_path: Path) -> None:
    def work() -> list[dict[str, Tensor]]:
        found = []
        for recompute in ("never", "always"):
            with Trainer(
                gpt2(),
                next_token_loss if has_loss_fn else None,
                partial(SGD, lr=0.1),
                WordDataset(),
                batch_size=4,
                microbatch_size=2,
                device=DeviceConfig("cpu", recompute=recompute),
            ) as trainer:
                trainer.fit(max_steps=3, progress=False)
                assert trainer.plan.recompute == (() if recompute == "never" else (True,))
                found.append({name: p.detach() for name, p in trainer.model.named_parameters()})
        return found

    assert_equal(*run_single_process(work, tmp_path))


def test_unknown_choice_is_refused() -> None:
    with pytest.raises(LaunchError, match="recompute='sometimes'"):
        DeviceConfig(recompute="sometimes")


def test_cached_plan_matches_the_choice_of_recomputation() -> None:
    plan = Plan(
        layers_per_stage=(1, 1),
        pipelines=(PipelinePlan(devices=("a", "b"), num_microbatches=2),),
        microbatch_size=1,
        model="m",
    )
    key = PlanKey(devices=("a", "b"), model="m", batch=2, microbatch_size=1, sync="all_reduce")
    some, every = replace(plan, recompute=(True, False)), replace(plan, recompute=(True, True))
    for choice, expected in {
        "auto": [True, True, True],
        "never": [True, False, False],
        "always": [False, False, True],
    }.items():
        chosen = replace(key, recompute=choice)
        assert [chosen.is_matched_by(each) for each in (plan, some, every)] == expected


def test_model_without_a_list_of_layers_cannot_recompute() -> None:
    with pytest.raises(PlanError):
        Trainer(
            nn.Linear(8, 4),
            mse_loss,
            partial(SGD, lr=0.1),
            samples(),
            batch_size=4,
            device=DeviceConfig("cpu", recompute="always"),
        )
