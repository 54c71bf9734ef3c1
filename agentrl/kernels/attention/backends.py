"""Attention of one layer over a packed row, by three backends: `sdpa`, `flash` and `flex`.

`sdpa` calls torch's function for documents of nearly equal lengths. It needs no mask [L, L], because every document is
a separate batch entry, and a causal query never reads the padding after a document. `flash` and `flex` call kernels
that take the boundaries of segments. The states of a segment depend only on its tokens and on the path to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from agentrl.kernels.attention.row import AttentionPass, PackedRow
from agentrl.kernels.records import KernelInputError


def attend(
    attention_pass: AttentionPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention inside every document: query [1, H, L, E], key and value [1, G, L, E] -> [1, L, H, E].

    A token attends to the last ``window`` tokens of its document, including itself. With a ``cap``, scores z are capped
    to cap tanh(z / cap). ``sinks`` [H] contains the score of one extra key for each head. Every token reads this key,
    whose value is zero. If ranks share the row, L is the number of this rank's tokens, and H must be a multiple of the
    number of ranks.
    """
    row, ranks, backend = attention_pass.row, attention_pass.sequence, attention_pass.backend
    if ranks is not None:
        query, key, value = ranks.tokens_to_heads(query), ranks.kv_tokens_to_heads(key), ranks.kv_tokens_to_heads(value)
        sinks = None if sinks is None else sinks[ranks.rank_slice(len(sinks))]
    # Sinks need a differentiable log-sum-exp, which the kernels of `flash` do not return.
    if backend == "flex" or (backend == "flash" and sinks is not None):
        states = attend_flex(row, query, key, value, scale=scale, window=window, cap=cap, sinks=sinks)
    elif backend == "flash":
        states = attend_flash(row, query, key, value, scale=scale, window=window, cap=cap)
    else:
        states = _attend_sdpa(row, query, key, value, scale=scale, window=window, cap=cap, sinks=sinks)
    return states if ranks is None else ranks.heads_to_tokens(states)


def _attend_sdpa(
    row: PackedRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    calls, places = row.segment_batches_by_length
    eager = cap is not None or sinks is not None  # scaled_dot_product_attention supports neither
    if (name := ("sdpa", window, eager, query.dtype)) not in row.mask_cache:
        row.mask_cache[name] = [_additive_mask(*call, window, query.dtype, needed=eager) for call in calls]
    parts = []
    for (queries, keys, _), mask in zip(calls, row.mask_cache[name], strict=True):
        # [n, H, w, E], [n, G, k, E] and [n, G, k, E]
        q, k, v = _select_tokens(query, queries), _select_tokens(key, keys), _select_tokens(value, keys)
        if eager:
            part = eager_attention(q, k, v, mask == 0, scale=scale, cap=cap, sinks=sinks)
        else:
            grouped = q.shape[1] != k.shape[1]
            part = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
        parts.append(part.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, places)[None]


def _additive_mask(
    queries: Tensor, keys: Tensor, first: Tensor, window: int | None, dtype: torch.dtype, *, needed: bool
) -> Tensor | None:
    """Return the mask [n or 1, 1, w, k] to add to the scores of a call, or None if a causal call is equivalent."""
    width, count = queries.shape[1], keys.shape[1]
    if width == count and not needed and (window is None or window >= count):
        return None
    columns = torch.arange(count, device=keys.device)
    # The padding after the last query attends to the last key, because a query without any key has undefined gradients.
    positions = (first[:, None] + torch.arange(width, device=keys.device)).clamp(max=count - 1)[:, None, :, None]
    seen = columns <= positions
    if window is not None:
        seen &= columns > positions - window
    return torch.zeros(seen.shape, dtype=dtype, device=keys.device).masked_fill_(~seen, -torch.inf)


def attend_flex(
    row: PackedRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run the backend `flex`: one call with a block mask. It is compiled on GPUs and has no backward pass on CPUs.

    A sink z multiplies the result of a softmax with the log-sum-exp l by exp(l) / (exp(l) + exp(z)).
    """
    if (name := ("flex", window)) not in row.mask_cache:
        row.mask_cache[name] = _block_mask(row, window)
    attended = _flex_function(compiled=query.is_cuda)(
        query,
        key,
        value,
        score_mod=None if cap is None else _cap_function(cap),
        block_mask=row.mask_cache[name],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:
        states, aux = attended
        attended = (states * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(states.dtype)
    return cast(Tensor, attended).transpose(1, 2)


@cache
def _cap_function(cap: float) -> Callable[..., Tensor]:
    """Return a function that caps scores. Cached, because `flex` recompiles for every new function."""

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _flex_function(*, compiled: bool) -> Callable[..., Any]:
    return cast(Callable[..., Any], torch.compile(flex_attention) if compiled else flex_attention)


def _block_mask(row: PackedRow, window: int | None) -> BlockMask:
    reach, positions = row.end_of_attending_tokens, row.position_ids[0]

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (key <= query) & (query < reach[key])
        return inside if window is None else inside & (positions[query] - positions[key] < window)

    length = row.input_ids.shape[1]
    device = row.input_ids.device
    return create_block_mask(seen, None, None, length, length, device=device, _compile=device.type == "cuda")


def attend_flash(
    row: PackedRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """Run the backend `flash`: one call for segments of different lengths.

    The last query of each segment is aligned with its last key. Nothing is planned or compiled for a shape, so a row
    of a new length costs no time on the host. The kernels need heads of equal widths, so narrower values
    (MiMo-V2-Flash, DeepSeek-V3) are padded with zeros.
    """
    bounds, width = row.varlen_bounds, value.shape[-1]
    if width < query.shape[-1]:
        value = pad(value, (0, query.shape[-1] - width))
    if bounds.indices is not None:
        key, value = key.index_select(2, bounds.indices), value.index_select(2, bounds.indices)
    attended = varlen_attention_function()(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens_q=bounds.queries,
        cu_seqlens_k=bounds.keys,
        max_seqlen_q=bounds.max_queries,
        max_seqlen_k=bounds.max_keys,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=0.0 if cap is None else cap,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # concerns the backward pass
    )
    states = attended[0] if isinstance(attended, tuple) else attended
    return states[None, ..., :width]


@cache
def varlen_attention_function() -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Return the function of flash-attn 3 or 2, or torch's equivalent, which does not support a cap."""
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        try:
            from flash_attn import flash_attn_varlen_func
        except ImportError:
            return torch_varlen_attention
    varlen: Callable[..., Tensor | tuple[Tensor, ...]] = flash_attn_varlen_func
    return varlen


def torch_varlen_attention(
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
    **_: bool,  # ignored: always causal; torch's global setting controls determinism
) -> Tensor:
    """Call torch's built-in flash-attn 2 with flash-attn's arguments. Raises KernelInputError if scores are capped."""
    from torch.nn.attention.varlen import varlen_attn

    if softcap:
        raise KernelInputError("torch's varlen_attn cannot cap scores: set model.attention=flex, or install flash-attn")
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


def _select_tokens(states: Tensor, indices: Tensor) -> Tensor:
    """Select [n, H, w, E] from [1, H, L, E] at indices [n, w]."""
    return states[0].index_select(1, indices.flatten()).unflatten(1, indices.shape).transpose(0, 1)


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention [n, H, w, E] where ``mask`` is True, with a float32 softmax. Cap and sinks are as in `attend`.

    Materializes all scores [n, H, w, w].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=wide)[..., : key.shape[2]].to(value.dtype) @ value
