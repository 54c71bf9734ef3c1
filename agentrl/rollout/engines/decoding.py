"""Decoding with one row per trajectory: the KV cache, and attention with one query per row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from agentrl.kernels.attention import current_attention_pass
from agentrl.models.attention import attention

_LENGTH_STEP = 16


class SlotCache(Cache):
    """Keys and values ``[rows, heads, length + 1, head_dim]`` per layer, contiguous and no longer than needed.

    Before a forward pass, the caller selects rows and the positions of their new tokens
    (:meth:`select_entries_and_build_mask`). Each layer's ``update`` writes at these positions and returns the keys and
    values that the rows may attend to. The last column collects padding and is always masked. Stale entries past a
    row's length need no clearing: the mask hides them until they are overwritten.

    A decoding step reads every column of every layer, so unused columns cost time. The length therefore grows with the
    longest row, by at least an eighth. To save memory, each layer that grows moves to the memory that the previous
    layer has freed.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        # Keys of all layers, then values of all layers.
        self._tensors: list[Tensor | None] = [None] * (2 * layers)
        self._memory: list[Tensor | None] = [None] * (2 * layers)  # flat; a tensor occupies the beginning of its memory
        self._spare_memory: Tensor | None = None
        self._layers = layers
        self._reserved_rows = 0
        self._has_entries = False
        self.rows = 0
        self.length = 0

    def reserve(self, rows: int) -> None:
        """Reserve ``rows`` rows, so that the cache grows only once for all rows."""
        self._reserved_rows = max(rows, self._reserved_rows)

    def clear(self) -> None:
        """Drop all rows, but keep their memory for later rows."""
        self.rows = self.length = self._reserved_rows = 0
        self._has_entries = False

    def select_entries_and_build_mask(self, rows: Tensor | int, positions: Tensor, width: int) -> Tensor:
        """Select rows (an index tensor [m], or the first ``rows``) and token positions [m, q]; -1 is padding.

        ``width`` is the largest position plus one. Returns the attention mask [m, 1, q, columns], True where a query
        may attend; ``columns`` are the columns that :meth:`update` returns.
        """
        count = rows if isinstance(rows, int) else len(rows)
        self._grow(count if isinstance(rows, int) else int(rows.max()) + 1, width)
        self._selected = rows
        # Leading rows are returned as views of the whole length. Selected rows are copied, but only up to ``width``.
        self._width = self.length + 1 if isinstance(rows, int) else width
        self._index = torch.arange(count, device=positions.device) if isinstance(rows, int) else rows
        self._positions = torch.where(positions < 0, self.length, positions)
        self._flat_positions: dict[int, Tensor] = {}
        columns = torch.arange(self._width, device=positions.device)
        return (columns <= positions.clamp(min=0)[..., None])[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [m, heads, q, head_dim]. Returns all keys and values of the selected rows."""
        return self._store_and_read(layer_idx, key_states), self._store_and_read(self._layers + layer_idx, value_states)

    def copy_rows(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` entries of rows ``source`` onto rows ``target``, making room for them."""
        self._grow(int(target.max()) + 1, length)
        for tensor in self._tensors:
            if tensor is not None:
                tensor[target, :, :length] = tensor[source, :, :length]

    def swap_rows(self, first: Tensor, second: Tensor, length: int) -> None:
        """Exchange the first ``length`` entries of each row in ``first`` and the corresponding row in ``second``."""
        both, other = torch.cat([first, second]), torch.cat([second, first])
        for tensor in self._tensors:
            if tensor is not None:
                tensor[both, :, :length] = tensor[other, :, :length]

    def _store_and_read(self, index: int, new: Tensor) -> Tensor:
        _, heads, _, dim = new.shape
        tensor = self._tensors[index]
        if tensor is None:
            self._tensors[index] = tensor = self._reuse_or_add_memory(index, heads, dim, new)
        self._has_entries = True
        if heads not in self._flat_positions:
            head = torch.arange(heads, device=new.device)[None, :, None]
            rows = self._index[:, None, None] * heads + head  # [m, heads, 1]
            self._flat_positions[heads] = (rows * (self.length + 1) + self._positions[:, None]).flatten()
        tensor.view(-1, dim).index_copy_(0, self._flat_positions[heads], new.reshape(-1, dim))
        if isinstance(self._selected, int):
            return tensor[: self._selected]
        return tensor[self._selected, :, : self._width]

    def _grow(self, rows: int, length: int) -> None:
        if rows <= self.rows and length <= self.length:
            return
        if length > self.length:
            length = -(-max(length, self.length * 9 // 8) // _LENGTH_STEP) * _LENGTH_STEP
        self.rows, self.length = max(rows, self.rows, self._reserved_rows), max(length, self.length)
        for index, old in enumerate(self._tensors):
            if old is None:
                continue
            memory = self._memory[index]
            new = self._reuse_or_add_memory(index, old.shape[1], old.shape[3], old)
            if self._has_entries:
                new[: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]
                self._spare_memory = memory
            self._tensors[index] = new

    def _reuse_or_add_memory(self, index: int, heads: int, dim: int, like: Tensor) -> Tensor:
        """Return a tensor of the current size, in the layer's memory or, to preserve live rows, in spare memory."""
        shape = (self.rows, heads, self.length + 1, dim)
        size = math.prod(shape)
        memory = self._spare_memory if self._has_entries and self._memory[index] is not None else self._memory[index]
        if memory is None or memory.numel() < size:
            # Fill with zeros, because a masked entry is still multiplied and must therefore be finite.
            memory = like.new_zeros(size * 5 // 4)
        self._memory[index] = memory
        return memory[:size].view(shape)


_ATTENTION_NAME = "agentrl_decode"


def decode_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute ``softmax(q k^T scaling) v`` without gradients or dropout, with the signature used by `transformers`.

    ``query`` [m, heads, 1, dim], ``key`` and ``value`` [m, kv_heads, width, dim], ``attention_mask`` [m, 1, 1, width]
    True where a query attends. Returns [m, 1, heads, dim] and no weights. :func:`.attention` handles layers that cap
    their scores, and all other forward passes, because another thread may run one while the model decodes.
    """
    rows, heads, queries, dim = query.shape
    if queries != 1 or attention_mask is None or torch.is_grad_enabled() or _needs_general_attention(kwargs):
        return attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    groups, width = key.shape[1], key.shape[2]
    scale = dim**-0.5 if scaling is None else scaling
    grouped = (query * scale).reshape(rows * groups, heads // groups, dim)  # heads of one group share keys and values
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2))
    scores.view(rows, heads, width).masked_fill_(~attention_mask[:, 0], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, value.flatten(0, 1)).view(rows, 1, heads, value.shape[-1]), None


def _needs_general_attention(options: dict[str, Any]) -> bool:
    names = ("softcap", "s_aux", "position_bias")
    return current_attention_pass() is not None or any(options.get(name) is not None for name in names)


AttentionInterface.register(_ATTENTION_NAME, decode_attention)
AttentionMaskInterface.register(_ATTENTION_NAME, sdpa_mask)


@contextmanager
def use_decode_attention(config: Any) -> Iterator[None]:
    """Make the model of ``config`` compute attention with :func:`decode_attention` inside this block."""
    previous = config._attn_implementation
    config._attn_implementation = _ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = previous
