"""Low-rank adapters on the linear layers of a frozen model (LoRA, arXiv 2106.09685), made and computed by peft.

A layer's weight W becomes W + (alpha / rank) B A. B starts at zero, so the adapted model starts as the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.errors import SettingsError, require_package
from agentrl.models.settings import LoRASettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Model = TypeVar("_Model", bound="PreTrainedModel")

NAME = "policy"
"""peft's name of the adapter."""

WEIGHTS = "adapter_model.safetensors"
_BASE = "base_layer."  # what peft puts before the names of a layer's own parameters
_FACTORS = (f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight")


def with_adapter(model: _Model, settings: LoRASettings) -> _Model:
    """``model`` itself, all of its parameters frozen, with new adapters to train; unchanged with ``rank`` 0.

    The adapters start the same in every process and for every seed. Raises SettingsError for targets that the model
    does not have, for its head, and without peft.
    """
    if settings.rank == 0:
        return model
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=target_layers(model, settings), lora_dropout=0.0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(config, model, adapter_name=NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_factor(name))
    return model


def check_peft() -> None:
    """Raise SettingsError if peft is not installed."""
    require_package("peft", extra="lora", purpose="model.lora.rank")


def target_layers(model: PreTrainedModel, settings: LoRASettings) -> list[str]:
    """The names of the layers that get an adapter. Raises SettingsError for a target without a layer, and the head."""
    head = model.get_output_embeddings()
    linear = {name: item for name, item in model.named_modules() if isinstance(item, nn.Linear)}
    names = [name for name, item in linear.items() if item is not head]
    if not settings.targets:
        return names
    found: set[str] = set()
    for target in settings.targets:
        if any(item is head and _ends_with(name, target) for name, item in linear.items()):
            raise SettingsError(
                f"model.lora.targets: {target} is the model's head, which cannot have an adapter: training computes "
                f"statistics from the head's own weight alone; valid: {_kinds(names)}"
            )
        matched = [name for name in names if _ends_with(name, target)]
        if not matched:
            raise SettingsError(
                f"model.lora.targets: no linear layer of {type(model).__name__} has a name that ends with {target}; "
                f"valid: {_kinds(names)}, or an empty list for all of them"
            )
        found.update(matched)
    return [name for name in names if name in found]


def is_factor(name: str) -> bool:
    """Whether a parameter of an adapted model belongs to an adapter."""
    return name.endswith(_FACTORS)


def own_name(name: str) -> str:
    """The name that a parameter has without adapters.

    >>> own_name("model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace(f".{_BASE}", ".")


def exported_name(name: str) -> str:
    """An adapter parameter's name in the files of peft.

    >>> exported_name("model.layers.0.mlp.up_proj.lora_A.policy.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"base_model.model.{name.replace(f'.{NAME}.', '.')}"


def factors_of(name: str) -> tuple[str, str] | None:
    """The names of the factors A and B of the weight ``name``; None for a parameter that has none.

    >>> factors_of("mlp.up_proj.base_layer.weight")
    ('mlp.up_proj.lora_A.policy.weight', 'mlp.up_proj.lora_B.policy.weight')
    """
    layer, found, kind = name.rpartition(f".{_BASE}")
    return (layer + _FACTORS[0], layer + _FACTORS[1]) if found and kind == "weight" else None


def merged(weight: Tensor, first: Tensor, second: Tensor, scale: float) -> Tensor:
    """W + scale B A, computed in float32 at least and rounded to the dtype of W."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (second.to(wide) @ first.to(wide))).to(weight.dtype)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters: their products are multiplied by zero.

    All modules still run, in the same order, as ZeRO-3 expects of them.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


def write_adapter(directory: Path, factors: Mapping[str, Tensor], settings: LoRASettings, *, base: str) -> None:
    """Write an adapter that peft and vLLM load; ``factors`` by their :func:`exported_name`, ``base``: its model."""
    from peft import LoraConfig

    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(factors), directory / WEIGHTS, metadata={"format": "pt"})
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=sorted({_layer(name) for name in factors}),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    config.save_pretrained(str(directory))


def _layer(exported: str) -> str:
    """The last part of the name of the layer that a factor belongs to."""
    return exported.rpartition(".lora_")[0].rpartition(".")[2]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _kinds(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
