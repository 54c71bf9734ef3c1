"""Low-rank adapters on the linear layers of a frozen model (LoRA, arXiv 2106.09685), implemented by peft.

A layer's weight W becomes W + (alpha / rank) B A. B starts at zero, so the adapted model starts as the original model.
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

ADAPTER_NAME = "policy"
"""Name of the adapter in peft."""

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_BASE = "base_layer."  # peft's prefix for the parameter names of an adapted layer
_FACTORS = (f".lora_A.{ADAPTER_NAME}.weight", f".lora_B.{ADAPTER_NAME}.weight")


def add_adapters(model: _Model, settings: LoRASettings) -> _Model:
    """Freeze ``model``, add adapters to it and return it. If ``rank`` is 0, return it unchanged.

    The initial adapters are the same in every process and for every seed. Raises SettingsError if a target does not
    exist or is the head, or if peft is not installed.
    """
    if settings.rank == 0:
        return model
    check_peft_installed()
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=adapted_layer_names(model, settings),
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter_factor(name))
    return model


def check_peft_installed() -> None:
    """Raise SettingsError if peft is not installed."""
    require_package("peft", extra="lora", purpose="model.lora.rank")


def adapted_layer_names(model: PreTrainedModel, settings: LoRASettings) -> list[str]:
    """Return the names of the layers to which adapters are added.

    Raises SettingsError for a target that does not exist or is the head.
    """
    head = model.get_output_embeddings()
    linear = {name: item for name, item in model.named_modules() if isinstance(item, nn.Linear)}
    names = [name for name, item in linear.items() if item is not head]
    if not settings.targets:
        return names
    found: set[str] = set()
    for target in settings.targets:
        if any(item is head and _ends_with(name, target) for name, item in linear.items()):
            raise SettingsError(
                f"model.lora.targets: {target} is the model's head, which cannot have an adapter, because training "
                f"computes statistics from the head's weight alone; valid: {_name_suffixes(names)}"
            )
        matched = [name for name in names if _ends_with(name, target)]
        if not matched:
            raise SettingsError(
                f"model.lora.targets: no linear layer of {type(model).__name__} has a name that ends in {target}; "
                f"valid: {_name_suffixes(names)}, or an empty list for all layers"
            )
        found.update(matched)
    return [name for name in names if name in found]


def is_adapter_factor(name: str) -> bool:
    """Return True if a parameter of an adapted model belongs to an adapter."""
    return name.endswith(_FACTORS)


def name_without_adapter(name: str) -> str:
    """Return the parameter's name in the model without adapters.

    >>> name_without_adapter("model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace(f".{_BASE}", ".")


def peft_parameter_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files.

    >>> peft_parameter_name("model.layers.0.mlp.up_proj.lora_A.policy.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"base_model.model.{name.replace(f'.{ADAPTER_NAME}.', '.')}"


def adapter_factor_names(name: str) -> tuple[str, str] | None:
    """Return the names of the factors A and B of the weight ``name``, or None if the parameter has no adapter.

    >>> adapter_factor_names("mlp.up_proj.base_layer.weight")
    ('mlp.up_proj.lora_A.policy.weight', 'mlp.up_proj.lora_B.policy.weight')
    """
    layer, found, kind = name.rpartition(f".{_BASE}")
    return (layer + _FACTORS[0], layer + _FACTORS[1]) if found and kind == "weight" else None


def merge_adapter(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Return W + scale B A, computed in float32 or wider and rounded to the dtype of W."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (lora_b.to(wide) @ lora_a.to(wide))).to(weight.dtype)


@contextmanager
def disabled_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the context, by multiplying their products by zero.

    All modules still run in the same order, which ZeRO-3 requires.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale(ADAPTER_NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER_NAME, 1.0)


def write_adapter(directory: Path, factors: Mapping[str, Tensor], settings: LoRASettings, *, base: str) -> None:
    """Write an adapter that peft and vLLM can load.

    ``factors`` maps names as in :func:`peft_parameter_name` to tensors. ``base`` is the path or id of the base model.
    """
    from peft import LoraConfig

    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(factors), directory / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=sorted({_last_layer_component(name) for name in factors}),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    config.save_pretrained(str(directory))


def _last_layer_component(exported: str) -> str:
    """Return the last component of the layer name in a factor's exported name."""
    return exported.rpartition(".lora_")[0].rpartition(".")[2]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _name_suffixes(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
