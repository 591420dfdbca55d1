"""Tiny models of transformers, built from their configs: no downloads, random weights.

A config is shrunk by the names of its fields, so that a new architecture needs no line here; fields
that must agree with each other in a way of their own stand in `_SPECIAL`.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

NUM_LAYERS, WIDTH, WORDS, LENGTH = 4, 32, 64, 9

_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(
        ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "max_window_layers"), NUM_LAYERS
    ),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "ngram_vocab_size_base"), WORDS),
    **dict.fromkeys(
        (
            "intermediate_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "dense_intermediate_size",
            "ffn_hidden_size",
            "expert_ffn_hidden_size",
            "ffn_dim",
            "hidden_dim",
        ),
        48,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_heads", "n_head", "num_heads", "swa_num_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("index_head_dim", "global_head_dim", "qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "ple_embed_dim"), 16),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads", "n_group", "num_expert_group"), 2),
    **dict.fromkeys(
        (
            "num_experts",
            "n_routed_experts",
            "num_local_experts",
            "moe_num_experts",
            "zero_expert_num",
        ),
        4,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "topk_group"), 2
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 32),
    **dict.fromkeys(("model_max_length", "rel_extent", "keep_window_size"), 32),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "index_topk"), 4),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    "n_shared_experts": 1,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "hc_lowrank": 8,
}
# Dropout and noise differ between runs.
_OFF = ("dropout", "pdrop", "jitter", "layerdrop")
_TOWER = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    # The last layer takes the keys and values of the third one, which is on its stage.
    "Gemma3nTextConfig": {
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
        "num_kv_shared_layers": 1,
    },
    "Phi4MultimodalConfig": {
        "vision_config": {**_TOWER, "num_hidden_layers": 2},
        "audio_config": {**_TOWER, "num_blocks": 2, "ext_pw_out_channel": 32},
    },
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]], "window_size": 3},
    "OPTConfig": {"word_embed_proj_dim": 24},
    "ElectraConfig": {"embedding_size": 24},
    "AlbertConfig": {"embedding_size": 24},
    "ViTConfig": {"image_size": 16, "patch_size": 4},
    "Dinov2Config": {"image_size": 16, "patch_size": 4},
    "SwinConfig": {
        "image_size": 32,
        "patch_size": 2,
        "window_size": 4,
        "embed_dim": 8,
        "depths": [2, 2, 2],
        "num_heads": [1, 2, 2],
    },
    "ResNetConfig": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 2, 1, 1]},
    "T5Config": {"d_kv": 8, "d_ff": 48},
}


# Without a pipeline plan; the split is found from their calls.
OTHERS: Mapping[str, str] = {
    "GPT2Config": "GPT2LMHeadModel",
    "BertConfig": "BertForMaskedLM",
    "ViTConfig": "ViTForImageClassification",
    "GPTNeoConfig": "GPTNeoForCausalLM",
    "GPTJConfig": "GPTJForCausalLM",
    "OPTConfig": "OPTForCausalLM",
    "BloomConfig": "BloomForCausalLM",
    "FalconConfig": "FalconForCausalLM",
    "MptConfig": "MptForCausalLM",
    "RobertaConfig": "RobertaForMaskedLM",
    "DistilBertConfig": "DistilBertForMaskedLM",
    "ElectraConfig": "ElectraForMaskedLM",
    "MPNetConfig": "MPNetForMaskedLM",
    "ModernBertConfig": "ModernBertForMaskedLM",
    "Dinov2Config": "Dinov2ForImageClassification",
    "SwinConfig": "SwinForImageClassification",
    "ResNetConfig": "ResNetForImageClassification",
    "AlbertConfig": "AlbertForMaskedLM",
    "T5Config": "T5ForConditionalGeneration",
}


def planned_architectures() -> list[str]:
    """Return the configs of causal language models that have a pipeline plan."""
    return [kind.__name__ for kind in _causal() if getattr(kind, "base_model_pp_plan", None)]


def build(name: str) -> nn.Module:
    """Return a tiny model with random weights, in train mode."""
    transformers: Any = importlib.import_module("transformers")
    kind = getattr(transformers, name)
    # By key: to list the items of the mapping would import all models.
    model_kind = getattr(transformers, OTHERS[name]) if name in OTHERS else _causal()[kind]
    model_kind = model_kind[0] if isinstance(model_kind, tuple) else model_kind
    model: nn.Module = model_kind(_tiny_config(kind))
    return model.train()


def batch(
    model: Any, *, seed: int, length: int = LENGTH, padded: bool = False
) -> dict[str, Tensor]:
    """Return images or texts; one text is padded if asked."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        size = model.config.image_size if hasattr(model.config, "image_size") else 32
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    inputs = {"input_ids": torch.randint(2, WORDS, (2, length), generator=generator)}
    if padded:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, length - 3 :] = 0
        inputs["attention_mask"] = mask
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
    return inputs


def _causal() -> Any:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return auto.MODEL_FOR_CAUSAL_LM_MAPPING


def _tiny_config(kind: type) -> Any:
    known = kind().to_dict()
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    if known.get("num_key_value_heads") == known.get("num_attention_heads"):
        sizes["num_key_value_heads"] = _SIZES["num_attention_heads"]
    sizes |= {
        name: 0.0
        for name, value in known.items()
        if isinstance(value, float) and any(part in name for part in _OFF)
    }
    return kind(**{**sizes, **_SPECIAL.get(kind.__name__, {})})
