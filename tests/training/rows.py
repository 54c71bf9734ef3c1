"""Scored rows by hand: every token is the model's, what is not given is zero."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.kernels import TokenStatistics
from agentrl.training.step.rows import ScoredRows
from agentrl.trajectory import Batch


def scored_rows(
    log_probs: Tensor,
    *,
    rollout_log_probs: Tensor | None = None,
    loss_mask: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    groups: Tensor | None = None,
) -> ScoredRows:
    """Rows of one token of prompt and the tokens of ``log_probs`` [B, T]."""
    zeros, mask = torch.zeros_like(log_probs), torch.ones_like(log_probs, dtype=torch.bool)
    none, numbers = torch.zeros(len(log_probs), dtype=torch.int64), torch.arange(len(log_probs))
    batch = Batch(
        input_ids=torch.nn.functional.pad(zeros, (1, 0)).long(),
        prompt_lengths=none + 1,
        response_ids=zeros.long(),
        response_mask=mask,
        response_lengths=mask.sum(-1),
        loss_mask=mask if loss_mask is None else loss_mask,
        rewards=zeros,
        rollout_log_probs=zeros if rollout_log_probs is None else rollout_log_probs,
        groups=numbers if groups is None else groups,
        samples=numbers,
        branches=none,
        parents=none - 1,
        forks=none,
        weights=torch.ones(len(log_probs)),
        truncated=none.bool(),
        versions=zeros.long(),
    )
    statistics = TokenStatistics(
        log_probs=log_probs, entropy=zeros, sum_pi_squared=zeros, energy=zeros, hidden_norm_squared=zeros
    )
    return ScoredRows(batch=batch, statistics=statistics, reference_log_probs=reference_log_probs)
