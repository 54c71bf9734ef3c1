"""From per-token losses [B, T] to one number (docs/formulas.md 5)."""

import math

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidOptionError, check_choice
from agentrl.algorithms.validation import as_mask, check_alike

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    mode: str,
    *,
    normalizer: Tensor | float | None = None,
    length: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The loss of a micro-batch, a scalar connected to the graph of `per_token`; 0 if no token is left.

    `token_mean`               sum / tokens
    `token_sum`                sum
    `seq_mean_token_mean`      sum over sequences of (mean over their tokens) / sequences
    `seq_mean_token_sum`       sum / sequences
    `seq_mean_token_sum_norm`  sum / (sequences * length), `length` a constant of the settings

    `weights` [B]: the share of each row in its sequence, where a sequence (an agent's rollout) is split into rows; rows
    then count as that part of a sequence, and their means with that weight. Without it every row is a sequence.

    Only tokens in the mask count, and sequences with at least one of them; values elsewhere reach neither result nor
    gradient. `normalizer`, the sum of `loss_normalizer` over all micro-batches and ranks, replaces that count, so that
    the values of micro-batches *add up* to the optimizer step's.
    """
    check_choice("aggregation", mode, AGGREGATIONS)
    check_alike(per_token=per_token, loss_mask=loss_mask)
    _check_length(mode, length)
    mask = as_mask("loss_mask", loss_mask)
    sums = torch.where(mask, per_token, 0.0).sum(-1)  # (B,)
    if mode == "seq_mean_token_mean":
        sums = sums / mask.sum(-1).clamp(min=1)
        sums = sums if weights is None else sums * weights
    if mode == "token_sum":
        return sums.sum()
    count = loss_normalizer(mask, mode, weights) if normalizer is None else normalizer
    count = torch.as_tensor(count, dtype=sums.dtype, device=sums.device)
    total = sums.sum() / torch.where(count > 0, count, 1.0)
    return total if length is None else total / length


def token_factors(
    loss_mask: Tensor,
    mode: str,
    *,
    normalizer: Tensor | float | None = None,
    length: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The factor [B], float64, of every token in the mask of a row in `aggregate` with the same arguments.

    >>> token_factors(torch.tensor([[True, True], [True, False]]), "seq_mean_token_mean").tolist()
    [0.25, 0.5]
    """
    check_choice("aggregation", mode, AGGREGATIONS)
    _check_length(mode, length)
    mask = as_mask("loss_mask", loss_mask)
    factors = torch.ones(mask.shape[0], dtype=torch.float64, device=mask.device)
    if mode == "seq_mean_token_mean":
        factors = factors / mask.sum(-1).clamp(min=1)
        factors = factors if weights is None else factors * weights
    if mode == "token_sum":
        return factors
    count = float(loss_normalizer(mask, mode, weights) if normalizer is None else normalizer)
    return factors / (count or 1.0) / (length or 1.0)


def loss_normalizer(loss_mask: Tensor, mode: str, weights: Tensor | None = None) -> Tensor:
    """This call's contribution to the normalizer of `aggregate`: its tokens, its sequences, or (token_sum) 0.

    Sequences are counted by their `weights`, those of `aggregate`.
    """
    check_choice("aggregation", mode, AGGREGATIONS)
    mask = as_mask("loss_mask", loss_mask)
    if mode == "token_sum":
        return mask.new_zeros((), dtype=torch.int64)
    if mode == "token_mean":
        return mask.sum()
    rows = mask.any(-1)
    return rows.sum() if weights is None else (rows * weights.double()).sum()


def _check_length(mode: str, length: float | None) -> None:
    if mode != "seq_mean_token_sum_norm":
        if length is not None:
            raise InvalidOptionError(f"length is for seq_mean_token_sum_norm, not {mode}")
        return
    if length is None or not (math.isfinite(length) and length > 0):
        raise InvalidOptionError(f"seq_mean_token_sum_norm needs a constant positive length; got {length}")
