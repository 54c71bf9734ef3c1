"""Attention with one query per row, as in decoding, for CPUs.

Two batched matrix products take half as long as ``scaled_dot_product_attention``, which splits its work over queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from agentrl.kernels.attention import current_pass
from agentrl.models.attention import attention

_NAME = "agentrl_decode"


def decode_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``softmax(q k^T scaling) v`` without gradient and dropout, with the signature of `transformers`' functions.

    ``query`` [m, heads, 1, dim], ``key`` and ``value`` [m, kv_heads, width, dim], ``attention_mask`` [m, 1, 1, width]
    True where a query attends. Returns [m, 1, heads, dim] and no weights. Any other forward, which another thread may
    run while the model decodes, and any layer that caps its scores
    uses :func:`.attention`.
    """
    rows, heads, queries, dim = query.shape
    if queries != 1 or attention_mask is None or torch.is_grad_enabled() or _asks_for_more(kwargs):
        return attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    groups, width = key.shape[1], key.shape[2]
    scale = dim**-0.5 if scaling is None else scaling
    grouped = (query * scale).reshape(rows * groups, heads // groups, dim)  # heads of one group share keys and values
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2))
    scores.view(rows, heads, width).masked_fill_(~attention_mask[:, 0], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, value.flatten(0, 1)).view(rows, 1, heads, value.shape[-1]), None


def _asks_for_more(given: dict[str, Any]) -> bool:
    options = ("softcap", "s_aux", "position_bias")
    return current_pass() is not None or any(given.get(name) is not None for name in options)


AttentionInterface.register(_NAME, decode_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@contextmanager
def decoding(config: Any) -> Iterator[None]:
    """Make the model of ``config`` compute attention with :func:`decode_attention` inside this block."""
    usual = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
