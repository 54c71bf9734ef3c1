"""Settings of the policy: model, precision, adapters, and the shape of the built-in tiny policy."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TinyModelSettings(BaseModel):
    """Shape of the built-in tiny policy (Qwen2 architecture, tied embeddings, byte-level BPE with single digits)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    vocabulary_size: int = Field(512, ge=300, le=65536)
    """tokens of the byte-level BPE, including special ones"""
    hidden_size: int = Field(96, ge=16)
    """width of the residual stream; a multiple of heads"""
    layers: int = Field(4, ge=1)
    """transformer blocks"""
    heads: int = Field(4, ge=1)
    """attention heads"""
    intermediate_size: int = Field(256, ge=16)
    """width inside the feed-forward layers"""
    max_positions: int = Field(1024, ge=64)
    """maximum length of prompt and response together"""


class LoRASettings(BaseModel):
    """Low-rank adapters on a frozen model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rank: int = Field(0, ge=0, le=512)
    """rank of the adapters that are trained in place of the model's weights; 0: no adapters, all weights"""
    alpha: int = Field(32, ge=1)
    """scale of an adapter's product, divided by rank"""
    targets: list[str] = []
    """suffixes of the names of linear layers with an adapter, such as q_proj; empty: all but the head"""
    learning_rate_factor: float = Field(10.0, gt=0)
    """multiplies optimizer.learning_rate for the policy's adapters, which need about ten times that of all weights"""


class ModelSettings(BaseModel):
    """The policy to train."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    path: str | None = None
    """directory or Hugging Face id of the policy; if unset, the built-in tiny policy is used"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of the weights in training and sampling"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, slower; enable if activations do not fit"""
    checkpoint_offload: bool = False
    """keep the inputs of gradient_checkpointing in host memory until the backward pass: less memory on the GPU, slower;
    without a GPU the memory is the same
    """
    attention: Literal["auto", "sdpa", "flex", "flash"] = "auto"
    """how training computes attention over packed trajectories: sdpa on any machine; flex on GPUs; flash on GPUs in
    bfloat16, with the package flash-attn or else torch's varlen_attn, which does not support capped scores; auto: flash
    if it can run, else flex on GPUs for models with sliding windows or capped scores, else sdpa"""
    lora: LoRASettings = LoRASettings()
    tiny: TinyModelSettings = TinyModelSettings()

    @model_validator(mode="after")
    def _consistent(self) -> ModelSettings:
        if self.checkpoint_offload and not self.gradient_checkpointing:
            raise ValueError("checkpoint_offload=true moves what gradient_checkpointing keeps: set it to true as well")
        return self
