"""Shapes of models whose memory can be computed by hand, or measured in a moment."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from agentrl.models.shape import ModelShape, shape_from_config
from agentrl.planning.memory import TrainingSetup

_TINY = {
    "vocab_size": 4000,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def tiny_shape(kind: str = "qwen2", **more: Any) -> ModelShape:
    return shape_from_config(kind, AutoConfig.for_model(kind, **(_TINY | more)))


def setup(**more: Any) -> TrainingSetup:
    given: dict[str, Any] = {
        "ranks": 4,
        "stage": 2,
        "bfloat16": True,
        "tokens": 1024,
        "head_backend": "chunked",
        "device": "cpu",
    }
    return TrainingSetup(**(given | more))
