"""A forward in which rows with the same prompt share its computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def response_hidden(backbone: nn.Module, input_ids: Tensor, prompt_lengths: Tensor, response_ids: Tensor) -> Tensor:
    """Hidden states [B, T, D] that predict ``response_ids`` [B, T], as one forward of ``input_ids`` [B, S] gives them.

    Each distinct prompt goes through ``backbone`` once; its keys and values stand before every response to it. Always
    two forwards, so that ranks that gather parameters stay in step. Differentiable. Attention must be `sdpa`, over the
    whole context, without gradient checkpointing.
    """
    from transformers import DynamicCache

    rows, steps = response_ids.shape
    width = int(prompt_lengths.max())
    columns = torch.arange(width, device=input_ids.device)
    inside = columns < prompt_lengths[:, None]  # [B, P]
    prompts = input_ids[:, :width].masked_fill(~inside, -1)
    distinct, owner = prompts.unique(dim=0, return_inverse=True)  # [G, P], [B]
    cache = DynamicCache()
    states = backbone(input_ids=distinct.clamp(min=0), past_key_values=cache, use_cache=True).last_hidden_state
    layer: Any
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[owner], layer.values[owner]
    before = states[owner, prompt_lengths - 1]  # [B, D], predicts the first response token
    # The last response token predicts nothing that is asked for; a lone one is fed all the same.
    fed = max(steps - 1, 1)
    places = torch.arange(fed, device=input_ids.device)
    mask = torch.cat(
        [inside[:, None].expand(rows, fed, width), (places <= places[:, None]).expand(rows, fed, fed)], dim=-1
    )[:, None]
    after = backbone(
        input_ids=response_ids[:, :fed],
        attention_mask=mask,
        position_ids=prompt_lengths[:, None] + places,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return torch.cat([before[:, None], after], dim=1)[:, :steps]
