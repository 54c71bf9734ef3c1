"""Loss rows by hand: every token is the model's, what is not given is zero."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.batch import Batch
from agentrl.kernels import TokenStatistics
from agentrl.kernels.attention import pack_padded


def rows_of(
    log_probs: Tensor,
    *,
    rollout_log_probs: Tensor | None = None,
    loss_mask: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    groups: Tensor | None = None,
) -> Batch:
    """A scored batch of one token of prompt and the tokens of ``log_probs`` [B, T]."""
    zeros, mask = torch.zeros_like(log_probs), torch.ones_like(log_probs, dtype=torch.bool)
    none, numbers = torch.zeros(len(log_probs), dtype=torch.int64), torch.arange(len(log_probs))
    ids = torch.nn.functional.pad(zeros, (1, 0)).long()
    row, rows, columns = pack_padded(ids, none + 1, mask)
    return Batch(
        row=row,
        rows=rows,
        columns=columns,
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
        problem_weights=torch.ones(len(log_probs)),
        path_weights=torch.ones(len(log_probs)),
        truncated=none.bool(),
        versions=zeros.int(),
        home_ranks=none,
        greedy_returns=None,
        support=None,
        counted=True,
        statistics=TokenStatistics(
            log_probs=log_probs, entropy=zeros, sum_pi_squared=zeros, energy=zeros, hidden_norm_squared=zeros
        ),
        reference_log_probs=reference_log_probs,
        teacher_log_probs=teacher_log_probs,
    )
