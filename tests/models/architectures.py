"""Tiny random models of the architectures that are trained, with whatever each does around its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_COMMON = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "bos_token_id": None,
}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 2}
_SINKS = {
    "head_dim": 16,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
_GPT = {
    "vocab_size": 264,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
    "eos_token_id": 256,
    "bos_token_id": None,
}
_OPT = {
    "vocab_size": 264,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "bos_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"head_dim": 16},
    "llama": _COMMON,
    "mistral": _COMMON | {"sliding_window": None},
    "gemma2": _COMMON | _GEMMA | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": None},
    "gemma3_text": _COMMON | _GEMMA | {"final_logit_softcapping": 3.0},
    "granite": _COMMON | {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "cohere": _COMMON | {"logit_scale": 0.0625},
    "cohere2": _COMMON | {"logit_scale": 0.25, "layer_types": ["full_attention"] * 2},
    "gpt2": _GPT,
    "gpt_oss": _COMMON
    | _SINKS
    | {"initializer_range": 0.2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granite_swa": _COMMON | _SINKS | {"attention_multiplier": 0.25},
    "mimo_v2_flash": _COMMON | _SINKS | {"v_head_dim": 8, "n_routed_experts": 6, "moe_intermediate_size": 24},
    "gpt_neox": {name: value for name, value in _COMMON.items() if name != "num_key_value_heads"},
    "phi": _COMMON | {"partial_rotary_factor": 0.5},
    "opt": _OPT,
}


def build_tiny(kind: str, *, attention: str | None = None, seed: int = 0, **more: Any) -> Any:
    """A random float32 model in evaluation mode, over the byte tokenizer's 260 ids and 4 that no token has.

    Attention is the best that transformers has for the model.
    """
    config = AutoConfig.for_model(kind, **(SHAPES[kind] | more))
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    return made.eval()


def write_tiny(directory: Path, kind: str, **more: Any) -> None:
    """The same on disk."""
    build_tiny(kind, **more).save_pretrained(directory)
