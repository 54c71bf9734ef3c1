"""Attention over a packed row by the two kernels of GPUs that know documents themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from agentrl.kernels.attention.row import PackedRow
from agentrl.kernels.records import KernelInputError


def attend_by_blocks(
    row: PackedRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """`flex`: one call with a block mask of the row. Compiled on GPUs; on a CPU torch refuses its backward pass."""
    if window not in row.window_masks:
        row.window_masks[window] = _block_mask(row, window)
    attended = _flex(compiled=query.is_cuda)(
        query,
        key,
        value,
        score_mod=None if cap is None else _capped_at(cap),
        block_mask=row.window_masks[window],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2)


@cache
def _capped_at(cap: float) -> Callable[..., Tensor]:
    """The same function at every call, or `flex` would be compiled anew."""

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _flex(*, compiled: bool) -> Callable[..., Tensor]:
    return cast(Callable[..., Tensor], torch.compile(flex_attention) if compiled else flex_attention)


def _block_mask(row: PackedRow, window: int | None) -> BlockMask:
    segment, prefix = row.segment_of
    positions = row.position_ids[0]

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (segment[key] == segment[query]) | (segment[key] == prefix[query])
        inside = same & (key <= query)
        return inside if window is None else inside & (positions[query] - positions[key] < window)

    length = row.input_ids.shape[1]
    device = row.input_ids.device
    return create_block_mask(seen, None, None, length, length, device=device, _compile=device.type == "cuda")


def attend_by_segments(
    row: PackedRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """`flash`: one call for segments of different lengths; the causal mask aligns their last queries and last keys.

    Nothing is planned or compiled for a shape, so rows of new lengths cost nothing on the host.
    """
    bounds = row.bounds
    if bounds.indices is not None:
        key, value = key.index_select(2, bounds.indices), value.index_select(2, bounds.indices)
    attended = varlen_kernel()(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens_q=bounds.queries,
        cu_seqlens_k=bounds.keys,
        max_seqlen_q=bounds.most_queries,
        max_seqlen_k=bounds.most_keys,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=0.0 if cap is None else cap,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # its backward pass
    )
    states = attended[0] if isinstance(attended, tuple) else attended
    return states[None]


@cache
def varlen_kernel() -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The function of flash-attn 3 or 2, else torch's, which takes no softcap, with flash-attn's arguments."""
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        try:
            from flash_attn import flash_attn_varlen_func
        except ImportError:
            return torch_varlen
    varlen: Callable[..., Tensor | tuple[Tensor, ...]] = flash_attn_varlen_func
    return varlen


def torch_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
    **_: bool,  # always causal; torch's global switch makes its backward pass deterministic
) -> Tensor:
    """flash-attn 2 as a part of torch, called with flash-attn's arguments."""
    from torch.nn.attention.varlen import varlen_attn

    if softcap:
        raise KernelInputError("torch's varlen_attn caps no scores: set model.attention=flex, or install flash-attn")
    return cast(
        Tensor,
        varlen_attn(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            scale=softmax_scale,
            window_size=(window_size[0], 0),
            enable_gqa=query.shape[1] != key.shape[1],
        ),
    )
