"""A model with a list of layers runs its own forward on every stage, with the same results.

Models of transformers are small and built from a config; nothing is downloaded.
"""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyrhythm.errors import PlanError
from polyrhythm.run.pipeline.partition import split_layers
from polyrhythm.run.pipeline.stage_modules import later_stage_keywords
from tests.gloo.chained_stages import Chained, compare, run_in_process
from tests.gloo.language_models import GPT2, LLAMA


def causal_masks(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - 3 :] = 0
    return mask


def compare_language_model(model: nn.Module, names: dict[str, Any], stages: list[int]) -> Chained:
    for num_stages in stages:
        for batch in (1, 3):
            tokens = torch.randint(0, 50, (batch, 10))
            split = partial(split_layers, **names)
            compare(model, split, tokens, num_stages=num_stages)
            mask = causal_masks(batch, 10)
            chained = compare(model, split, tokens, num_stages=num_stages, attention_mask=mask)
    return chained


def gpt2(num_layers: int = 5, **more: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": num_layers, "n_head": 2}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **more)).train()


def small(family: str, **more: Any) -> nn.Module:
    """Build a model of the Llama family."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        **more,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


@pytest.mark.long
@pytest.mark.timeout(100)
def test_gpt2_split_matches_whole_model(tmp_path: Path) -> None:
    def work() -> None:
        model = gpt2()
        chained = compare_language_model(model, GPT2, [1, 2, 3, 4])
        ties = [[(t.key, t.stages, t.name) for t in part.tied] for part in chained.parts]
        key = "transformer.wte.weight"
        assert ties == [[(key, (0, 3), key)], [], [], [(key, (0, 3), "lm_head.weight")]]
        whole = model.state_dict()
        for part in chained.parts:
            state = part.module.state_dict()
            assert all(torch.equal(whole[name], value) for name, value in state.items())
        assert len({name for part in chained.parts for name in part.module.state_dict()}) == len(
            whole
        )
        model.gradient_checkpointing_enable()
        compare_language_model(model, GPT2, [3])
        check_tokens_by_keyword_reach_every_stage(gpt2())
        check_partition_holds_only_own_weights()

    run_in_process(work, tmp_path)


def check_tokens_by_keyword_reach_every_stage(model: nn.Module) -> None:
    tokens = torch.randint(0, 50, (2, 10))
    split = partial(split_layers, **GPT2, layers_per_stage=[1, 4])
    chained = compare(model, split, num_stages=2, input_ids=tokens, labels=tokens)
    with pytest.raises(PlanError, match="use_cache=True"):
        chained.forward(tokens, use_cache=True)


def check_partition_holds_only_own_weights() -> None:
    model = gpt2()
    part = split_layers(model, stage=1, num_stages=3, **GPT2)
    tokens, hidden = torch.randint(0, 50, (2, 10)), torch.randn(2, 10, 16)
    before = model(tokens).logits.detach()
    caches: list[Any] = []
    hook = model.transformer.h[3].register_forward_pre_hook(lambda _, args: caches.append(args[1]))
    part.module(hidden)
    hook.remove()
    assert caches == [None], "keys and values are cached"
    own = set(part.module.parameters())
    others = {name: weakref.ref(p) for name, p in model.named_parameters() if p not in own}
    assert own == {p for layer in model.transformer.h[2:4] for p in layer.parameters()}, "no copies"
    assert torch.equal(model(tokens).logits, before), "the model itself has changed"
    del model
    gc.collect()
    assert [name for name, left in others.items() if left() is not None] == []
    assert part.module(hidden).shape == hidden.shape
    assert "(4): GPT2Block, on another stage" in repr(part.module)


@pytest.mark.timeout(100)
def test_llama_family_split_matches_whole_model(tmp_path: Path) -> None:
    def work() -> None:
        chained = compare_language_model(
            small("Llama", tie_word_embeddings=True), LLAMA, [1, 2, 3, 4]
        )
        key = "model.embed_tokens.weight"
        assert [(t.key, t.name) for t in chained.parts[3].tied] == [(key, "lm_head.weight")]
        untied = small("Llama", tie_word_embeddings=False)
        chained = compare_language_model(untied, LLAMA, [2, 4])
        assert not any(part.tied for part in chained.parts)
        for reentrant in (False, True):
            untied.gradient_checkpointing_enable({"use_reentrant": reentrant})
            compare_language_model(untied, LLAMA, [3])
        # Masks depend on a layer's position in the list; logits are capped after the head.
        gemma = small("Gemma2", head_dim=8, sliding_window=3, final_logit_softcapping=0.5)
        assert len(set(gemma.config.layer_types)) == 2
        compare_language_model(gemma, LLAMA, [3, 4])
        # Embeddings are scaled outside the embedding module.
        compare_language_model(small("Granite", embedding_multiplier=3.0), LLAMA, [3])
        from transformers import GPTNeoConfig, GPTNeoForCausalLM

        neo = GPTNeoConfig(  # its layers return tuples
            vocab_size=50,
            max_position_embeddings=16,
            hidden_size=16,
            num_layers=4,
            num_heads=2,
            attention_types=[[["global", "local"], 2]],
            window_size=3,
            embed_dropout=0.0,
        )
        compare_language_model(GPTNeoForCausalLM(neo), GPT2, [3])

    run_in_process(work, tmp_path)


class Plain(nn.Module):
    """A hand-written model: a dict of modules, a bare parameter, no `inputs_embeds`."""

    def __init__(self, *, oddity: str = "", blocks: type[nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"embed": nn.Embedding(20, 8), "blocks": blocks()})
        for index in range(5):
            self.body["blocks"].add_module(str(index), nn.Linear(8, 8))
        self.body["norm"] = nn.LayerNorm(8)
        self.position = nn.Parameter(torch.randn(6, 8))
        self.gain = nn.Linear(1, 8)
        self.oddity = oddity

    def forward(self, tokens: Tensor) -> Tensor:
        _, length = tokens.shape
        first = self.body["embed"](tokens)
        x = first + self.position[:length]
        gain = self.gain(torch.ones(1))
        layers = self.body["blocks"]
        if isinstance(layers, nn.Sequential):
            return self.body["norm"](layers(x) + gain)
        layers = list(layers.values() if isinstance(layers, nn.ModuleDict) else layers)
        if self.oddity == "reversed":
            layers.reverse()
        dropped = {"dropped 2": 2, "dropped 4": 4}.get(self.oddity)
        for index, layer in enumerate(layers * 2 if self.oddity == "twice" else layers):
            if index == dropped:
                continue
            if self.oddity.startswith("recompute"):
                x = checkpoint(layer, x, use_reentrant=self.oddity.endswith("reentrant"))
                x = x + 1 if self.oddity.endswith("shifted") else x
                continue
            try:
                x = torch.sin(layer(x) * gain)
            except Exception as error:  # some models report the layer that failed
                if self.oddity:
                    raise
                raise ValueError(f"in layer {index}") from error
            if self.oddity == "uses tokens":
                x = x + first
            if self.oddity == "uses position":
                x = x + self.position[:length]
        return self.body["norm"](x + gain)


PLAIN = {
    "layers": "body.blocks",
    "prologue": ["body.embed", "position"],
    "every": ["gain"],
    "epilogue": ["body.norm"],
}


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of reentrant
def test_plain_model_splits_or_is_refused(tmp_path: Path) -> None:
    def work() -> None:
        tokens = torch.randint(0, 20, (3, 6))
        split = partial(split_layers, **PLAIN)
        for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict):
            for num_stages in (1, 2, 3, 5):
                chained = compare(Plain(blocks=kind), split, tokens, num_stages=num_stages)
        ties = [(tie.key, tie.stages) for tie in chained.parts[2].tied]
        everywhere = (0, 1, 2, 3, 4)
        assert ties == [("gain.weight", everywhere), ("gain.bias", everywhere)]
        patched = Plain()
        patched.forward = patched.forward  # bound to this object, like a patched method
        compare(patched, split, tokens, num_stages=3)
        compare(Plain(oddity="recompute"), split, tokens, num_stages=3)
        compare(Plain(oddity="recompute, reentrant"), split, tokens, num_stages=1)
        for oddity, reason in [
            ("twice", "layer 0 was called when layer 5 was due"),
            ("reversed", "layer 4 was called when layer 2 was due"),
            ("dropped 2", "layer 3 was called when layer 2 was due"),
            ("uses tokens", "layers 2 to 3 use modules"),
            ("uses position", "layers 2 to 3 use modules"),
            ("recompute, reentrant", "use_reentrant=True"),
            ("recompute, shifted", "is not called with the hidden state"),
        ]:
            with pytest.raises(PlanError, match=reason):
                compare(Plain(oddity=oddity), split, tokens, num_stages=3)
        last = split(Plain(oddity="dropped 4"), stage=2, num_stages=3).module
        with pytest.raises(PlanError, match="the forward ended without a call of layer 4"):
            last(torch.ones(3, 6, 8))
        wrong = {**PLAIN, "prologue": ["position"], "epilogue": ["body.norm", "body.embed"]}
        with pytest.raises(PlanError, match=r"body\.embed is used before the layers"):
            compare(Plain(), partial(split_layers, **wrong), tokens, num_stages=2)

    run_in_process(work, tmp_path)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(*args, **kwargs)


@pytest.mark.parametrize("depth", [1, 2])
def test_wrapper_of_any_arguments_splits(tmp_path: Path, depth: int) -> None:
    path = "model." * depth
    names = {key: [path + name for name in PLAIN[key]] for key in ("prologue", "every", "epilogue")}
    split = partial(split_layers, layers=path + PLAIN["layers"], **names)

    def work() -> None:
        model: nn.Module = Plain()
        for _ in range(depth):
            model = Wrapper(model)
        tokens = torch.randint(0, 20, (3, 6))
        compare(model, split, tokens, num_stages=2)
        chained = compare(model, split, num_stages=2, tokens=tokens)
        later = chained.parts[1].module
        assert later_stage_keywords(later, (tokens,), {}).keys() == {"tokens"}

    run_in_process(work, tmp_path)


LAYER_ERRORS = [
    ({"layers": "body.block"}, "does not exist", r"\(with its length\): body\.blocks \(5\)"),
    ({"layers": "body.norm"}, "is a LayerNorm", r"body\.blocks \(5\)"),
    ({"prologue": ["body.embd"]}, "no 'body.embd'", r"nearest names: body\.embed"),
    ({"epilogue": ["nrom"]}, "no 'nrom'", "nearest names: .*norm"),
    ({"prologue": "body.embed"}, "prologue='body.embed'", r"prologue=\['body\.embed'\]"),
    ({"every": ["gain", "body.embed"]}, "'body.embed' overlaps with 'body.embed' in prol", "once"),
    ({"every": ["gain", "body"]}, "'body' overlaps with 'body.blocks' in layers", "once"),
    ({"every": ["gain", "body.blocks.1"]}, "overlaps with 'body.blocks' in layers", "once"),
    ({"every": []}, "assigns 'gain' to a stage", "`prologue`"),
    ({"prologue": ["position"]}, r"assigns 'body\.embed' to a stage", "`prologue`"),
    ({"prologue": ["body.embed"]}, "assigns 'position' to a stage", "`prologue`"),
    ({"num_stages": 6}, "6 stages for 5 layers", "at most 5 stages"),
    ({"layers_per_stage": [4, 2]}, "6 layers in 2 stages", "one number per stage"),
]


@pytest.mark.parametrize(("given", "wrong", "fix"), LAYER_ERRORS)
def test_invalid_layer_splits_are_refused(given: dict[str, Any], wrong: str, fix: str) -> None:
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(PlanError) as caught:
        split_layers(model, **{"stage": 0, "num_stages": 2, **PLAIN, **given})
    assert caught.match(wrong)
    assert caught.match(f"fix: .*{fix}")
