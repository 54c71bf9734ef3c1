"""Reading and writing policies in the format of `transformers`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from agentrl.kernels.attention import recompute_contexts
from agentrl.models.attention import register_attention
from agentrl.models.dropout import switch_off_dropout
from agentrl.models.settings import ModelSettings
from agentrl.models.tiny import tiny_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_CARD = """---
library_name: transformers
tags: [agentrl, reinforcement-learning, tool-use]
---

# {title}

{body}
"""


def read_model(path: str | Path, settings: ModelSettings) -> Any:
    """The causal language model in a directory or of a Hugging Face id, in the dtype that is set, without dropout."""
    from transformers import AutoModelForCausalLM

    _show_no_progress_bars()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=_DTYPES[settings.dtype], attn_implementation=register_attention()
    )
    return finish_model(model, settings)


def empty_model(path: str | Path, settings: ModelSettings) -> PreTrainedModel:
    """The same model before its weights are read, made under the caller's context; call `finish_model` afterwards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    return AutoModelForCausalLM.from_config(
        config, dtype=_DTYPES[settings.dtype], attn_implementation=register_attention()
    )


def finish_model(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel:
    """Prepare a model for training and sampling; every new model passes here. Returns it."""
    switch_off_dropout(model)
    if settings.gradient_checkpointing:
        checkpoint_layers(model)
    if settings.checkpoint_offload:
        keep_checkpoints_on_host(model.get_decoder())
    return model


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Enable gradient checkpointing, also for packed rows."""
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": recompute_contexts}
    )


def keep_checkpoints_on_host(transformer: nn.Module) -> None:
    """From now on, what a forward keeps of each checkpointed layer, its input, waits for the backward in host memory.

    Inside of a layer nothing changes: what it recomputes stays where it is.
    """
    entered: list[save_on_cpu] = []

    def enter(module: nn.Module, arguments: object) -> None:
        entered.append(save_on_cpu(pin_memory=torch.cuda.is_available()))
        entered[-1].__enter__()

    def leave(module: nn.Module, arguments: object, output: object) -> None:
        entered.pop().__exit__(None, None, None)

    transformer.register_forward_pre_hook(enter)
    transformer.register_forward_hook(leave, always_call=True)


def read_config(settings: ModelSettings) -> PreTrainedConfig | None:
    """The model's configuration without its weights; None if it cannot be read here (no such file, no network)."""
    from transformers import AutoConfig

    if settings.path is None:
        return tiny_config(settings.tiny)
    try:
        return AutoConfig.from_pretrained(settings.path)
    except OSError:
        return None


def attends_to_everything(config: PreTrainedConfig) -> bool:
    """Whether every layer attends to the whole context: no sliding window, no linear attention."""
    # Not every architecture's configuration has these two.
    kinds = getattr(config, "layer_types", None)
    return all(kind == "full_attention" for kind in kinds) if kinds else not getattr(config, "sliding_window", None)


def write_model(
    directory: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    title: str,
    body: str,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Export model, tokenizer and model card so that `transformers` loads the directory."""
    _show_no_progress_bars()
    model.save_pretrained(directory, state_dict=state)
    tokenizer.save_pretrained(directory)
    (directory / "README.md").write_text(_CARD.format(title=title, body=body))


def _show_no_progress_bars() -> None:
    """Keep the bars of `transformers` out of the console of a run."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def model_fingerprint(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of names, shapes and values of parameters; equal exactly when the weights are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors, key=lambda item: item[0]):
        data = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name}:{tuple(tensor.shape)}:{data.dtype}".encode())
        digest.update(data.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
