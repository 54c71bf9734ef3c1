"""The shape of a model from its configuration alone: a directory, a config.json, or a Hugging Face id."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.errors import SettingsError
from agentrl.models.attention import packing_obstacle
from agentrl.models.loading import read_config
from agentrl.models.lora import target_layers
from agentrl.models.settings import LoRASettings, ModelSettings
from agentrl.planning.memory import ModelShape
from agentrl_envs.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ALL_LAYERS = LoRASettings()


def read_shape(model: ModelSettings) -> ModelShape:
    """The shape of ``model.path``, or of the embedded tiny policy.

    Ids whose configuration cannot be read here (no network, nothing cached) are looked up among the shipped ones.
    Raises SettingsError for what is none of these.
    """
    return shape_of(model.path or "the embedded tiny policy", config_of(model), model.lora)


def shape_of(name: str, config: PreTrainedConfig, lora: LoRASettings = _ALL_LAYERS) -> ModelShape:
    """Counted on a model without memory, by the code that will also run it. ``lora`` names the adapted layers.

    Raises SettingsError for a model that cannot be trained, and for adapted layers that it does not have.
    """
    from transformers import AutoModelForCausalLM

    obstacle = packing_obstacle(config)
    if obstacle is not None:
        raise SettingsError(obstacle)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [item.numel() for item in model.parameters()]
    head = model.get_output_embeddings()
    vectors = [item.numel() for name, item in model.named_parameters() if item.ndim == 1 and name.endswith("weight")]
    adapted = [model.get_submodule(name) for name in target_layers(model, lora)]
    text = config.get_text_config()
    heads = text.num_attention_heads
    # Not every architecture's configuration has these.
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    experts = getattr(text, "num_experts_per_tok", None) or 0
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    expert = getattr(text, "moe_intermediate_size", None) or dense
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
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        mlp=experts * expert if experts else dense,
        experts=experts,
        norms=(vectors.count(text.hidden_size) - 1) // text.num_hidden_layers,  # one follows the last layer
        head_norms=head_dim in vectors,
    )


def config_of(model: ModelSettings) -> PreTrainedConfig:
    """The configuration of ``model.path``. Raises SettingsError where it cannot be read here."""
    path = model.path
    if path is None:
        found = read_config(model)
        assert found is not None  # the tiny policy's is made, not read
        return found
    if path in shipped_shapes():
        return _shipped(path)
    if Path(path).suffix == ".json" or Path(path).is_dir():
        return _from_file(Path(path))
    found = read_config(model)
    if found is None:
        known = sorted(shipped_shapes())
        raise SettingsError(
            f"model.path={path!r}: its configuration cannot be read here{did_you_mean(path, known)}; valid: a model "
            f"directory, the path of a config.json, or one of {', '.join(known)}"
        )
    return found


def _from_file(path: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        return AutoConfig.for_model(**json.loads(text))
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else " ".join(str(error).split()).partition(". Should contain one of")[0][:200]
        )
        raise SettingsError(
            f"model.path={str(path)!r}: no configuration of a model that transformers knows ({why}); valid: a "
            "config.json in Hugging Face format, with its model_type, or the directory that holds one"
        ) from error


@cache
def shipped_shapes() -> dict[str, dict[str, object]]:
    """Configurations by Hugging Face id, for plans without a network: shapes only, no tokens and no rotary settings."""
    text = resources.files("agentrl.planning").joinpath("shapes.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, object]] = json.loads(text)
    return found


def _shipped(name: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    shape = dict(shipped_shapes()[name])
    kind = str(shape.pop("model_type"))
    return AutoConfig.for_model(kind, **shape)
