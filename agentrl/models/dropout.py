"""Forwards without randomness: training, sampling and statistics must use the same policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_CHANCES = ("drop", "jitter")
"""Parts of the names of probabilities in configurations and modules: attention_dropout, resid_pdrop, layerdrop, ..."""


def switch_off_dropout(model: PreTrainedModel) -> None:
    """Set every probability of dropout to 0, of modules, of functions that modules call, and in the configuration.

    Evaluation mode is not enough: gradient checkpointing works in training mode only, which DeepSpeed switches on.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _clear(vars(module))
    _clear_config(model.config)


def _clear_config(config: PreTrainedConfig) -> None:
    _clear(vars(config))
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            _clear_config(part)


def _clear(values: dict[str, object]) -> None:
    for name, value in values.items():
        if isinstance(value, float) and any(chance in name for chance in _CHANCES):
            values[name] = 0.0
