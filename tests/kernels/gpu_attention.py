"""The kernels of `flex` and `flash` on a CPU: what they compute, by slower functions."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as torch_module
from torch import Tensor

from agentrl.kernels.attention import backends


def stand_in(patch: pytest.MonkeyPatch, *, torch_kernel: bool = False) -> None:
    """`flex` uncompiled, with the backward pass that torch has for a CPU but refuses; :func:`varlen` as `flash`.

    Where ``torch_kernel``, `flash` calls torch's function, and that is :func:`torch_varlen_attn`.
    """
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    patch.setattr(flex, "_validate_device", lambda *_: None)
    patch.setattr(
        backends, "varlen_attention_function", lambda: backends.torch_varlen_attention if torch_kernel else varlen
    )
    patch.setattr(torch_module, "varlen_attn", torch_varlen_attn)


def varlen(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """What flash-attn's function of that name computes, segment by segment: queries are the last of their keys."""
    assert given["causal"]
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    groups, cap = q.shape[1] // k.shape[1], given["softcap"]
    bounds = [given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()]
    parts = []
    for (start, stop), (first, last) in zip(*map(itertools.pairwise, bounds), strict=True):
        queries, keys = stop - start, last - first
        apart = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        left = given["window_size"][0]
        seen = (apart >= 0) & (apart <= (left if left >= 0 else keys))
        own, other = k[first:last].repeat_interleave(groups, 1), v[first:last].repeat_interleave(groups, 1)
        scores = given["softmax_scale"] * torch.einsum("qhe,khe->hqk", q[start:stop], own)
        scores = cap * torch.tanh(scores / cap) if cap else scores
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        parts.append(torch.einsum("hqk,khe->qhe", weights, other))
    return torch.cat(parts)


def torch_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch's documentation says of varlen_attn: (-1, 0) is causal, (W, 0) the last W tokens and a query's own."""
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert (max_q, max_k) == tuple(int(ends.diff().max()) for ends in (cu_seq_q, cu_seq_k))
    assert {cu_seq_q.dtype, cu_seq_k.dtype} == {torch.int32}
    bounds = {"cu_seqlens_q": cu_seq_q, "cu_seqlens_k": cu_seq_k}
    return varlen(query, key, value, causal=True, softcap=0, softmax_scale=scale, window_size=window_size, **bounds)
