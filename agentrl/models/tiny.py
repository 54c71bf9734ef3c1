"""The embedded tiny policy: a Qwen2 model of about half a million parameters and its own byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from agentrl.models.settings import TinyModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config

EOS = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], *, vocabulary_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE of ``vocabulary_size`` tokens in which digits and newlines stand alone.

    Single digits let a small model copy and compute numbers; an isolated newline keeps fences regular.
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
    """The Qwen2 configuration of the embedded policy."""
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
    """A freshly initialised Qwen2 model (tied embeddings, float32) for ``tokenizer``."""
    from transformers import Qwen2ForCausalLM

    size = max(settings.vocabulary_size, len(tokenizer))
    config = tiny_config(settings, vocabulary_size=size, eos_id=tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)
