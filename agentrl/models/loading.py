"""Load, create and export policies in the format of `transformers`, including the built-in tiny policy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from agentrl.errors import SettingsError
from agentrl.models.attention import ATTENTION, register_attention
from agentrl.models.routes import routing_recompute_contexts
from agentrl.models.settings import ModelSettings, TinyModelSettings
from agentrl_envs.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config


EOS = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], *, vocabulary_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer with ``vocabulary_size`` tokens. Digits and newlines are separate tokens.

    Single digits let a small model copy and compute numbers. With separate newlines, every fence has the same tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n| ?[A-Za-z]+|```| ?[^\sA-Za-z\d]| "), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


def tiny_config(settings: TinyModelSettings, *, vocabulary_size: int | None = None, eos_id: int = 0) -> Qwen2Config:
    """Return the Qwen2 configuration of the built-in tiny policy."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocabulary_size or settings.vocabulary_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.max_positions,
        tie_word_embeddings=True,
        initializer_range=0.04,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
        bos_token_id=None,
    )


def build_tiny_model(settings: TinyModelSettings, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreTrainedModel:
    """Create a randomly initialized Qwen2 model (tied embeddings, float32) for ``tokenizer``."""
    from transformers import Qwen2ForCausalLM

    size = max(settings.vocabulary_size, len(tokenizer))
    config = tiny_config(settings, vocabulary_size=size, eos_id=tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


_DROPOUT_NAMES = ("drop", "jitter")
"""Substrings of the names of probabilities in configurations and modules (attention_dropout, resid_pdrop, layerdrop,
...).
"""


def disable_dropout(model: PreTrainedModel) -> None:
    """Set all dropout probabilities to 0, in modules and in the configuration.

    Training, sampling and statistics must use the same policy. Evaluation mode is not enough: gradient checkpointing
    works only in training mode, which DeepSpeed enables.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _zero_dropout(vars(module))
    _zero_dropout_in_config(model.config)


def _zero_dropout_in_config(config: PreTrainedConfig) -> None:
    _zero_dropout(vars(config))
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            _zero_dropout_in_config(part)


def _zero_dropout(values: dict[str, object]) -> None:
    for name, value in values.items():
        if isinstance(value, float) and any(chance in name for chance in _DROPOUT_NAMES):
            values[name] = 0.0


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_CARD = """---
library_name: transformers
tags: [agentrl, reinforcement-learning, tool-use]
---

# {title}

{body}
"""


def read_model(path: str | Path, settings: ModelSettings) -> Any:
    """Load a causal language model from a directory or Hugging Face id, in the configured dtype, without dropout."""
    from transformers import AutoModelForCausalLM

    _disable_progress_bars()
    read = partial(AutoModelForCausalLM.from_pretrained, path, dtype=_DTYPES[settings.dtype])
    return prepare_model(build_with_agentrl_attention(read), settings)


def create_model_without_weights(path: str | Path, settings: ModelSettings) -> PreTrainedModel:
    """Create the model without loading its weights, inside the caller's context (for example, ZeRO-3's sharding).

    Call `prepare_model` after the weights are loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    return build_with_agentrl_attention(
        partial(AutoModelForCausalLM.from_config, config, dtype=_DTYPES[settings.dtype])
    )


def build_with_agentrl_attention(build: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """Build a model with agentrl's attention function, or the class's function if the class accepts no other."""
    try:
        return build(attn_implementation=register_attention())
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        return build()


def prepare_model(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel:
    """Prepare a model for training and sampling, and return it. Every new model must pass through this function."""
    disable_dropout(model)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if settings.checkpoint_offload:
        offload_checkpoints_to_host(model.get_decoder())
    return model


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Enable gradient checkpointing for padded and packed rows."""
    # context_fn restores the packed row and its routes while a layer is recomputed. It requires use_reentrant=False.
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": routing_recompute_contexts}
    )


def offload_checkpoints_to_host(transformer: nn.Module) -> None:
    """Store the inputs of checkpointed layers in host memory between the forward and the backward pass.

    Tensors that a layer recomputes in the backward pass stay on the device.
    """
    entered: list[save_on_cpu] = []

    def enter(module: nn.Module, arguments: object) -> None:
        entered.append(save_on_cpu(pin_memory=torch.cuda.is_available()))
        entered[-1].__enter__()

    def leave(module: nn.Module, arguments: object, output: object) -> None:
        entered.pop().__exit__(None, None, None)

    transformer.register_forward_pre_hook(enter)
    transformer.register_forward_hook(leave, always_call=True)


def read_model_config_if_available(settings: ModelSettings) -> PreTrainedConfig | None:
    """Load the model's configuration without its weights.

    Returns None if the configuration is unavailable (no such file, no network).
    """
    from transformers import AutoConfig

    if settings.path is None:
        return tiny_config(settings.tiny)
    try:
        return AutoConfig.from_pretrained(settings.path)
    except OSError:
        return None


def require_model_config(settings: ModelSettings) -> PreTrainedConfig:
    """Return the configuration of ``settings.path``, or of the tiny policy. Weights are not read.

    Shipped configurations allow memory estimates without a network. They lack token ids and rotary settings. Raises
    SettingsError if the configuration cannot be read on this machine.
    """
    from transformers import AutoConfig

    shipped = json.loads(resources.files("agentrl.models").joinpath("shapes.json").read_text(encoding="utf-8"))
    path, reason = settings.path, ""
    if path in shipped:
        return AutoConfig.for_model(**shipped[path])
    try:
        config = read_model_config_if_available(settings)
    except (ValueError, TypeError, KeyError) as error:  # not a configuration that transformers supports
        config, reason = None, f" ({str(error).partition('. ')[0][:200]})"
    if config is None:
        raise SettingsError(
            f"model.path={path!r}: the configuration cannot be read{reason}{did_you_mean(str(path), shipped)}; valid: "
            "a model directory, a config.json in Hugging Face format with a model_type, or one of these names: "
            f"{', '.join(sorted(shipped))}"
        )
    return config


def has_full_attention(config: PreTrainedConfig) -> bool:
    """Return True if every layer attends to the whole context, without sliding windows or linear attention."""
    # Not every architecture's configuration has layer_types and sliding_window.
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
    """Export model, tokenizer and model card as a directory that `transformers` loads."""
    _disable_progress_bars()
    model.save_pretrained(directory, state_dict=state)
    tokenizer.save_pretrained(directory)
    (directory / "README.md").write_text(_CARD.format(title=title, body=body))


def _disable_progress_bars() -> None:
    """Disable the progress bars of `transformers`, which would garble the console of a run."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def model_fingerprint(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of the parameters' names, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors, key=lambda item: item[0]):
        data = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name}:{tuple(tensor.shape)}:{data.dtype}".encode())
        digest.update(data.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
