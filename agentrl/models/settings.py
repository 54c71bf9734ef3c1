"""Settings of the policy: model, precision, adapters, and the shape of the built-in tiny policy."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TinyModelSettings(BaseModel):
    """Shape of the built-in tiny policy (Qwen2 architecture, tied embeddings, byte-level BPE with single digits)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    vocabulary_size: int = Field(512, ge=300, le=65536)
    """number of tokens of the byte-level BPE, including special tokens"""
    hidden_size: int = Field(96, ge=16)
    """width of the residual stream, a multiple of heads"""
    layers: int = Field(4, ge=1)
    """number of transformer blocks"""
    heads: int = Field(4, ge=1)
    """number of attention heads"""
    intermediate_size: int = Field(256, ge=16)
    """width inside the feed-forward layers"""
    max_positions: int = Field(1024, ge=64)
    """maximum length of a sequence, prompt and response together"""


class LoRASettings(BaseModel):
    """Low-rank adapters on a frozen model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rank: int = Field(0, ge=0, le=512)
    """rank of the adapters that are trained instead of the model's weights; 0: no adapters, train all weights"""
    alpha: int = Field(32, ge=1)
    """scale of the adapters, whose products B A are multiplied by alpha / rank"""
    targets: list[str] = []
    """name suffixes of the linear layers that get an adapter, such as q_proj; empty: all linear layers except the
    head"""
    learning_rate_factor: float = Field(10.0, gt=0)
    """factor on optimizer.learning_rate for the policy's adapters, which need about ten times the learning rate of full
    training"""


class ModelSettings(BaseModel):
    """The policy to train."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    path: str | None = None
    """directory or Hugging Face id of the policy; if unset, the built-in tiny policy is used"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of the weights in training and sampling"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass, which saves memory but is slower; enable it if activations do not
    fit"""
    checkpoint_offload: bool = False
    """keep the inputs from which gradient_checkpointing recomputes activations in host memory until the backward pass.
    Saves GPU memory but is slower; without a GPU, it saves no memory"""
    attention: Literal["auto", "sdpa", "flex", "flash"] = "auto"
    """attention function for packed trajectories in training. sdpa: any machine; flex: GPUs; flash: GPUs in bfloat16,
    with the package flash-attn or else torch's varlen_attn, which does not support capped scores; auto: flash if it is
    supported, else flex on GPUs for models with sliding windows or capped scores, else sdpa. Layers with attention
    sinks use flex instead of flash"""
    rows: Literal["auto", "packed", "padded"] = "auto"
    """how the model reads trajectories in training. packed: one row without padding, in which a shared prefix is stored
    once; padded: separate rows with padding, for models with linear attention or custom attention code; auto: packed if
    a small copy of the model computes correct results from packed rows, else padded"""
    lora: LoRASettings = LoRASettings()
    tiny: TinyModelSettings = TinyModelSettings()

    @model_validator(mode="after")
    def _consistent(self) -> ModelSettings:
        if self.checkpoint_offload and not self.gradient_checkpointing:
            raise ValueError("checkpoint_offload=true requires gradient checkpointing: set gradient_checkpointing=true")
        return self
