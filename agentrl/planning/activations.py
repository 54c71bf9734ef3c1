"""Activations of the transformer below the head: counted on tensors without memory, for any architecture.

A model of two and one of four layers run forward and backward on torch's `meta` device; the bytes that live are
counted, and go on linearly with the number of layers. Attention stands in by what a fused kernel keeps (arXiv
2307.08691): queries, keys, values, the result, and a float32 number for each query and head. Where ranks share rows it
goes through the exchanges that training makes, with nothing sent.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.kernels.attention import SequenceGroup
from agentrl.models.lora import with_adapter
from agentrl.models.settings import LoRASettings
from agentrl.planning.memory import ModelShape, TrainingSetup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedConfig, PreTrainedModel

_ATTENTION = "agentrl_planned"


class LiveBytes(TorchDispatchMode):
    """While active, counts the bytes of the storages that operations made on ``device`` and that still live.

    A storage counts once, however many views it has, from the operation that made it until its last tensor is gone;
    one that was there before, from the first view that is taken of it on: :meth:`leave_out` those that shall not count.
    Memory that a kernel takes and returns within one operation is not seen.

    >>> with LiveBytes() as counted:
    ...     a = torch.zeros(1000)
    ...     b = a.view(10, 100) + 1
    ...     del a
    >>> counted.live, counted.peak
    (4000, 8000)
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, leaf.untyped_storage().nbytes())
        return result

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors and their views."""
        for tensor in tensors:
            self._add(tensor, 0)

    def _add(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if tensor.device.type != self._device or key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size).atexit = False

    def restart(self) -> None:
        """Begin a new peak at what lives now."""
        self.peak = self.live

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@dataclass(frozen=True, kw_only=True)
class BackboneBytes:
    """Bytes of one micro-batch. Gradients of weights count while they are computed, not afterwards."""

    saved: int  # after the forward
    peak: int  # of forward and backward
    host: int  # in host memory after the forward


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A model to count, equal to another one by the text of its configuration."""

    config: PreTrainedConfig = field(compare=False)
    text: str
    layers: int
    bfloat16: bool
    checkpointing: bool
    checkpoint_offload: bool
    shared: int  # ranks that share a row
    lora_rank: int


def backbone_bytes(shape: ModelShape, setup: TrainingSetup) -> BackboneBytes:
    """Of ``setup.local_tokens`` tokens, one row."""
    depths = (shape.layers,) if shape.layers <= 4 else (2, 4)
    found = [_counted(_case(shape, setup, depth), setup.local_tokens) for depth in depths]
    first, last = found[0], found[-1]
    more = (shape.layers - depths[-1]) / max(1, depths[-1] - depths[0])

    def extended(one: int, other: int) -> int:
        return round(other + more * (other - one))

    return BackboneBytes(
        saved=extended(first.saved, last.saved),
        peak=extended(first.peak, last.peak),
        host=extended(first.host, last.host),
    )


def _case(shape: ModelShape, setup: TrainingSetup, layers: int) -> _Case:
    return _Case(
        config=shape.config,
        text=shape.config.to_json_string(),
        layers=layers,
        bfloat16=setup.bfloat16,
        checkpointing=setup.checkpointing,
        checkpoint_offload=setup.checkpoint_offload,
        shared=setup.sequence_parallel,
        lora_rank=setup.lora_rank,
    )


@lru_cache(maxsize=4096)
def _counted(case: _Case, tokens: int) -> BackboneBytes:
    model, host = _shrunk(case), _HostMemory()
    with torch.device("meta"), LiveBytes("meta") as counted:
        counted.leave_out([*model.parameters(), *model.buffers()])
        with saved_tensors_hooks(host.take, host.give_back) if case.checkpoint_offload else nullcontext():
            hidden = model.get_decoder()(
                input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False
            ).last_hidden_state
        saved = counted.live
        counted.restart()
        hidden.backward(torch.empty_like(hidden))
    return BackboneBytes(saved=saved, peak=max(saved, counted.peak), host=host.held)


class _HostMemory:
    """Takes what autograd keeps, and gives back tensors like it (``model.checkpoint_offload``)."""

    def __init__(self) -> None:
        self.held = 0

    def take(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        self.held += tensor.nbytes
        return tensor.shape, tensor.dtype

    def give_back(self, kept: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(kept[0], dtype=kept[1], device="meta")


@lru_cache(maxsize=16)
def _shrunk(case: _Case) -> PreTrainedModel:
    """A model of the first layers, without memory; it drops each gradient when it is there."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    attention = f"{_ATTENTION}_{case.shared}"
    AttentionInterface.register(attention, partial(_attention, ranks=_NoRanks.of(case.shared)))
    config = with_layers(case.config, case.layers)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if case.bfloat16 else torch.float32, attn_implementation=attention
        )
        with_adapter(model, LoRASettings(rank=case.lora_rank))
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.train().parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop)
    return model


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The configuration with its first ``layers`` alone."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    text.num_hidden_layers = layers
    kinds = getattr(text, "layer_types", None)  # not every architecture's configuration has it
    if kinds is not None:
        text.layer_types = list(kinds)[:layers]
    return changed


class _Saved(Protocol):
    """The context of a backward."""

    saved_tensors: tuple[Tensor, ...]


class _FusedAttention(torch.autograd.Function):
    """(query [B, H, T, D], key [B, K, T, D], value [B, K, T, E]) -> [B, T, H, E]; nothing is computed."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        result = query.new_empty(batch, tokens, heads, value.shape[-1])
        normalizers = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, normalizers)
        return result

    @staticmethod
    def backward(ctx: _Saved, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _NothingSent(torch.autograd.Function):
    """The memory of an exchange: a tensor of the same shape, forward and backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, blocks: Tensor) -> Tensor:
        return torch.empty_like(blocks)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient.contiguous())


class _NoRanks(SequenceGroup):
    """Ranks that share rows, none of which is there."""

    @classmethod
    def of(cls, size: int) -> _NoRanks:
        return cls(rank=0, size=size, group=cast("ProcessGroup", None))

    def _swapped(self, blocks: Tensor) -> Tensor:
        swapped: Tensor = _NothingSent.apply(blocks.contiguous())
        return swapped


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    ranks: SequenceGroup,
    **options: object,
) -> tuple[Tensor, None]:
    if ranks.size > 1:
        query, key, value = ranks.by_heads(query), ranks.keys_by_heads(key), ranks.keys_by_heads(value)
    result: Tensor = _FusedAttention.apply(query, key, value)
    return (ranks.by_tokens(result) if ranks.size > 1 else result), None
