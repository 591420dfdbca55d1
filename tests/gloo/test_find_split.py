"""The split of a model is found, and a split that is not the model is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.partition import LayerSplit
from polyrhythm.run.pipeline.verify_split import verify_split
from tests.gloo.chained_stages import run_in_process
from tests.gloo.language_models import gpt2, llama


class Layered(nn.Module):
    """Layers with what a split may get wrong, by name."""

    def __init__(self, *, oddity: str = "") -> None:
        super().__init__()
        self.head = nn.Linear(8, 20, bias=False)  # defined before it is used
        self.embed = nn.Embedding(20, 8)
        self.head.weight = self.embed.weight
        self.bias = nn.Linear(1, 8)
        self.unused = nn.Linear(2, 2)
        self.norms = nn.ModuleDict({"last": nn.BatchNorm1d(8), "first": nn.LayerNorm(8)})
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.oddity = oddity
        self.seen = torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        x = start = self.norms["first"](self.embed(tokens))
        bias = self.bias(torch.ones(1))
        values: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x = torch.sin(layer(x)) + (bias if self.oddity == "every" else 0)
            values.append(x)
            if index == 3 and self.oddity == "first layer":
                x = x + values[0]
            if index == 3 and self.oddity == "rounded":
                x = x + values[0].detach().round()
            if self.oddity == "embedding":
                x = x + start
        if self.oddity == "repeated":
            for layer in self.layers:
                x = layer(x)
        self.seen = self.seen + 1
        return self.head(self.norms["last"](x.transpose(1, 2)).transpose(1, 2))


def example() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (), {"tokens": torch.randint(0, 20, (3, 6))}


@pytest.mark.timeout(60)
def test_parts_of_a_plain_model_are_found_by_use(tmp_path: Path) -> None:
    def work() -> None:
        model = Layered(oddity="every").train()
        split = LayerSplit().found(model, example())
        assert split == LayerSplit(
            layers="layers",
            prologue=("embed", "unused", "norms.first"),
            every=("bias",),
            epilogue=("head", "norms.last"),
        )
        assert LayerSplit().num_layers(model) == 4, "found without an example: remembered"
        assert verify_split(model, split, [1, 3], example()) < 1e-6
        # Skips from the embedding are recomputed from the tokens, which every stage has.
        skipping = Layered(oddity="embedding")
        skipping.embed.requires_grad_(False)  # frozen: flows are found all the same
        split = LayerSplit().found(skipping, example())
        assert {"embed", "norms.first"} <= set(split.every)
        assert verify_split(skipping, split, [1, 1, 2], example()) < 1e-6

    run_in_process(work, tmp_path)


@pytest.mark.timeout(60)
def test_finding_and_verifying_change_nothing(tmp_path: Path) -> None:
    def work() -> None:
        model = Layered().train()
        model.layers[1].eval()
        model(torch.ones(2, 3, dtype=torch.long)).sum().backward()
        weights = list(model.parameters())
        state = copy.deepcopy(model.state_dict())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        modes, random = [m.training for m in model.modules()], torch.get_rng_state()
        given = (), {"tokens": torch.arange(12).reshape(2, 6)}
        verify_split(model, LayerSplit().found(model, given), [2, 2], given)
        assert torch.equal(random, torch.get_rng_state())
        assert [m.training for m in model.modules()] == modes
        assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
        assert model.head.weight is model.embed.weight
        assert all(torch.equal(model.state_dict()[n], v) for n, v in state.items())
        assert model.seen == 1
        now = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert now.keys() == gradients.keys()
        assert all(torch.equal(now[n], g) for n, g in gradients.items())

    run_in_process(work, tmp_path)


@pytest.mark.timeout(60)
def test_wrong_splits_are_refused_with_the_reason(tmp_path: Path) -> None:
    def work() -> None:
        for oddity, reason in [
            ("first layer", "take more from layer 0 than the hidden state"),
            ("rounded", "the output differs by|use modules"),
            ("repeated", "layers: layer 0 is called 2 times"),
        ]:
            model = Layered(oddity=oddity)
            with pytest.raises(PlanError, match=reason):
                verify_split(model, LayerSplit().found(model, example()), [2, 2], example())
        model = Layered(oddity="first layer")
        assert LayerSplit().found(model, example()).together == ((0, 3),)
        with pytest.raises(PlanError, match=r"example.*\n.*\n.*split=LayerSplit"):
            LayerSplit().check(Layered(), [2, 2])
        assert LayerSplit().num_layers(Layered()) == 1
        names = {"prologue": ["embed", "norms.first", "unused"], "epilogue": ["head", "norms.last"]}
        named = LayerSplit(layers="layers", every=["bias"], **names)
        verify_split(Layered(oddity="every"), named, [2, 2], example())
        names["prologue"].append("bias")
        named = LayerSplit(layers="layers", **names)
        with pytest.raises(PlanError, match="use modules that only the first stage has"):
            verify_split(Layered(oddity="every"), named, [2, 2], example())
        with pytest.raises(PlanError, match="and no `layers`"):
            LayerSplit(prologue=["embed"]).check(Layered(), [2, 2])

    run_in_process(work, tmp_path)


class Choosing(nn.Module):
    """A layer that chooses indices, or takes those of an earlier layer, and passes them on."""

    def __init__(self, *, is_own: bool) -> None:
        super().__init__()
        self.linear, self.is_own = nn.Linear(8, 8), is_own

    def forward(self, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        chosen = x.topk(3).indices if self.is_own or given is None else given
        return x + x.gather(-1, chosen).sum(-1, keepdim=True), chosen


class ChoosingLayers(nn.Module):
    def __init__(self, own: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Choosing(is_own=is_own) for is_own in own)

    def forward(self, x: Tensor) -> Tensor:
        chosen = None
        for layer in self.layers:
            x, chosen = layer(x, chosen)
        return x


@pytest.mark.timeout(60)
def test_layers_that_share_choices_stay_on_one_stage(tmp_path: Path) -> None:
    def work() -> None:
        model = ChoosingLayers([True, True, False, False, True])
        given = (torch.randn(2, 8),), {}
        split = LayerSplit().found(model, given)
        assert split.together == ((1, 2), (1, 3)), "passed on to the others, and not used"
        with pytest.raises(PlanError, match="no boundary of stages from layer 1 to layer 2"):
            LayerSplit().check(model, [2, 3])

    run_in_process(work, tmp_path)


@pytest.mark.timeout(100)
def test_models_of_transformers_split_without_names(tmp_path: Path) -> None:
    def work() -> None:
        import transformers

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
        sizes |= {"num_attention_heads": 2, "vocab_size": 50}
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        image = {"image_size": 8, "patch_size": 4}
        tokens = torch.randint(1, 50, (2, 8))
        bert = transformers.BertConfig(**sizes, **no_dropout)
        vit = transformers.ViTConfig(**sizes, **no_dropout, **image)
        for model, inputs in [
            (gpt2(tied=True), {"input_ids": tokens}),
            (llama(tied=True), {"input_ids": tokens}),
            (transformers.BertForMaskedLM(bert), {"input_ids": tokens}),
            (
                transformers.ViTForImageClassification(vit),
                {"pixel_values": torch.randn(2, 3, 8, 8)},
            ),
        ]:
            assert LayerSplit().num_layers(model) == 4
            whole = LayerSplit().extract_stage(model, 0, [4])
            assert whole.module is model
            assert len(whole.layers) == 4, "dropout does not depend on the number of stages"
            split = LayerSplit().found(model)
            assert not split.every
            assert verify_split(model, LayerSplit(), [1, 2, 1], ((), inputs)) < 1e-6
        t5 = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=4, num_heads=2, vocab_size=50
        )
        with pytest.raises(PlanError, match="is an encoder-decoder"):
            LayerSplit().found(transformers.T5ForConditionalGeneration(t5))
        resnet = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8, 16], depths=[1, 2, 1], layer_type="basic"
        )
        images = {"pixel_values": torch.randn(2, 3, 32, 32)}
        model = transformers.ResNetForImageClassification(resnet)
        assert LayerSplit().num_layers(model) == 3
        assert verify_split(model, LayerSplit(), [1, 2], ((), images)) < 1e-5

    run_in_process(work, tmp_path)
