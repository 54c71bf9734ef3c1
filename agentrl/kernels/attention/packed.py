"""Attention of one layer over a packed row; `sdpa` calls torch's function for documents of nearly equal lengths.

It needs no mask [L, L]: a call has no other documents, and padding follows a document, where a causal one never looks.
A prompt that several documents share is read once more, for its own states, so that no document's depend on another.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.kernels.attention.row import AttentionPass
from agentrl.kernels.attention.variants import attend_by_blocks, attend_by_segments


def attend(
    now: AttentionPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Causal attention inside every document: query [1, H, L, E], key and value [1, G, L, E]; returns [1, L, H, E].

    A token sees the last ``window`` tokens of its document, itself included. Scores z become cap tanh(z / cap) with a
    ``cap``. Where ranks share the row, L are this rank's tokens; H must be a multiple of their number.
    """
    if (ranks := now.sequence) is None:
        return _attend(now, query, key, value, scale, window, cap)
    query, key, value = ranks.by_heads(query), ranks.keys_by_heads(key), ranks.keys_by_heads(value)
    return ranks.by_tokens(_attend(now, query, key, value, scale, window, cap))


def _attend(
    now: AttentionPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> Tensor:
    if now.backend == "flex":
        return attend_by_blocks(now.row, query, key, value, scale=scale, window=window, cap=cap)
    if now.backend == "flash":
        return attend_by_segments(now.row, query, key, value, scale=scale, window=window, cap=cap)
    tables, numbers = now.row.calls
    parts = [
        _causal(_rows(query, indices), _rows(key, indices), _rows(value, indices), scale, window, cap)
        .transpose(1, 2)
        .flatten(0, 1)
        for indices in tables
    ]
    return torch.cat(parts).index_select(0, numbers)[None]


def _rows(states: Tensor, indices: Tensor) -> Tensor:
    """[1, H, L, E] at indices [n, w]: [n, H, w, E]."""
    return states[0].index_select(1, indices.flatten()).unflatten(1, indices.shape).transpose(0, 1)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, cap: float | None
) -> Tensor:
    """Causal attention of whole documents [n, H, w, E]."""
    width, grouped = query.shape[2], query.shape[1] != key.shape[1]
    banded = window is not None and window < width
    if cap is None and not banded:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = torch.ones(width, width, dtype=torch.bool, device=query.device).tril_()
    if window is not None:
        mask = mask.triu_(1 - window)
    if cap is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
    return capped_attention(query, key, value, mask, scale=scale, cap=cap)


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None, cap: float
) -> Tensor:
    """softmax(cap tanh(scale q k^T / cap)) v where ``mask`` is True, as wide as float32: [n, H, w, E].

    Holds all scores [n, H, w, w].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=wide).to(value.dtype) @ value
