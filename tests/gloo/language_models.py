"""Small language models of Hugging Face's families, with the names that split them into stages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

GPT2 = {
    "layers": "transformer.h",
    "prologue": ["transformer.wte", "transformer.wpe", "transformer.drop"],
    "epilogue": ["transformer.ln_f", "lm_head"],
}
LLAMA = {
    "layers": "model.layers",
    "prologue": ["model.embed_tokens"],
    "every": ["model.rotary_emb"],
    "epilogue": ["model.norm", "lm_head"],
}
VOCABULARY, LENGTH = 50, 12


def gpt2(*, tied: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    known = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": tied}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **known)).train()


def llama(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).train()


@dataclass(frozen=True, kw_only=True)
class Language:
    build: Callable[[], nn.Module]
    names: dict[str, Any]
    embedding: str  # the parameter that the head shares in a tied model


def languages() -> dict[str, Language]:
    gpt2_names = {"names": GPT2, "embedding": "transformer.wte.weight"}
    llama_names = {"names": LLAMA, "embedding": "model.embed_tokens.weight"}
    return {
        f"{family} {'tied' if tied else 'untied'}": Language(
            build=partial(build, tied=tied), **names
        )
        for family, build, names in (("gpt2", gpt2, gpt2_names), ("llama", llama, llama_names))
        for tied in (True, False)
    }


LANGUAGES = languages()


def text(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(
        0, VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    return drawn[:, :-1], drawn[:, 1:]


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())
