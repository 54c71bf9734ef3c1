"""Dimensions of a model that determine its memory use, read from its configuration without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentrl.errors import SettingsError
from agentrl.models.attention import reason_not_packable
from agentrl.models.loading import require_model_config
from agentrl.models.lora import adapted_layer_names
from agentrl.models.settings import LoRASettings, ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a model."""

    name: str
    config: PreTrainedConfig
    parameters: int
    largest_parameter: int  # number of elements of the largest tensor
    adapted: int  # input plus output features, summed over the layers with adapters
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # hidden units of the MLP for one token, summed over its experts
    experts: int  # number of experts per token; 0 without routing
    norms: int  # number of norms over the hidden units in each layer
    head_norms: bool  # whether queries and keys are normalized


def read_model_shape(model: ModelSettings) -> ModelShape:
    """Return the shape of ``model.path``, or of the embedded tiny policy.

    Raises SettingsError if the configuration cannot be read or does not support the configured ``model.rows``.
    """
    config = require_model_config(model)
    obstacle = reason_not_packable(config) if model.rows == "packed" else None
    if obstacle is not None:
        raise SettingsError(obstacle)
    return shape_from_config(model.path or "the embedded tiny policy", config, model.lora)


def shape_from_config(name: str, config: PreTrainedConfig, lora: LoRASettings | None = None) -> ModelShape:
    """Build a model on the meta device and measure its shape. ``lora`` selects the adapted layers.

    Raises SettingsError if the model cannot be trained or has no such layers.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [item.numel() for item in model.parameters()]
    head = model.get_output_embeddings()
    vectors = [item.numel() for name, item in model.named_parameters() if item.ndim == 1 and name.endswith("weight")]
    adapted = [model.get_submodule(name) for name in adapted_layer_names(model, lora or LoRASettings())]
    text = config.get_text_config()

    def dimension(field: str, default: int) -> int:  # some architectures' configurations lack the field
        return getattr(text, field, None) or default

    heads, experts = dimension("num_attention_heads", 1), dimension("num_experts_per_tok", 0)
    head_dim = dimension("head_dim", text.hidden_size // heads)
    dense = dimension("intermediate_size", 4 * text.hidden_size)
    return ModelShape(
        name=name,
        config=config,
        parameters=sum(sizes),
        largest_parameter=max(sizes),
        adapted=sum(item.in_features + item.out_features for item in adapted),
        vocabulary=head.weight.shape[0],
        hidden=head.weight.shape[1],
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=dimension("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp=experts * dimension("moe_intermediate_size", dense) if experts else dense,
        experts=experts,
        norms=(vectors.count(text.hidden_size) - 1) // text.num_hidden_layers,  # one norm follows the last layer
        head_norms=head_dim in vectors,
    )
