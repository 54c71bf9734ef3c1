"""How far the training policy's log-probabilities are from those of the engine that sampled (docs/formulas.md 6)."""

import torch
from torch import Tensor

from agentrl.algorithms.validation import as_mask, check_alike, check_finite

_EXPONENT_LIMIT = 20.0


@torch.no_grad()
def mismatch_metrics(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Diagnostics over the model tokens of [B, T] log-probabilities, as float64 scalars; all 0 (ess 1) without tokens.

    Of log_rho = train - rollout (clamped to +-20 where it is exponentiated): `mean_abs_difference`,
    `max_abs_difference`; `kl_k1` mean(-log_rho) and `kl_k3` mean(rho - log_rho - 1), estimates of KL(rollout || train);
    `chi2` mean(rho^2) - 1; `ess` (sum rho)^2 / (n sum rho^2); `log_ppl_gap` |mean train - mean rollout| of every
    trajectory, averaged over those with a model token; `tokens`, how many there are.

    Raises InvalidInputError on wrong shapes and on a non-finite log-probability at a model token.
    """
    mask = checked_mask(train_log_probs, rollout_log_probs, response_mask)
    log_rho = torch.where(mask, train_log_probs.double(), 0.0) - torch.where(mask, rollout_log_probs.double(), 0.0)
    lengths = mask.sum(-1)
    count = lengths.sum()
    tokens = count.clamp(min=1)
    rho = torch.where(mask, log_rho.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT).exp(), 0.0)
    squares = rho.square().sum()
    gaps = (log_rho.sum(-1) / lengths.clamp(min=1)).abs()
    nothing = count == 0
    return {
        "mean_abs_difference": log_rho.abs().sum() / tokens,
        "max_abs_difference": log_rho.abs().max() if log_rho.numel() else log_rho.new_zeros(()),
        "kl_k1": -log_rho.sum() / tokens,
        "kl_k3": torch.where(mask, rho - log_rho - 1, 0.0).sum() / tokens,
        "chi2": torch.where(nothing, 0.0, squares / tokens - 1),
        "ess": torch.where(nothing, 1.0, rho.sum().square() / (tokens * squares.clamp(min=torch.finfo().tiny))),
        "log_ppl_gap": gaps.sum() / (lengths > 0).sum().clamp(min=1),
        "tokens": count,
    }


@torch.no_grad()
def perplexity_metrics(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """exp(-mean ln p) of every trajectory, averaged over those with a model token; float64 scalars, 0 without any.

    `train_perplexity`, `rollout_perplexity` (the exponent at most 20), and `trajectories`, how many those are.
    """
    mask = checked_mask(train_log_probs, rollout_log_probs, response_mask)
    lengths = mask.sum(-1)
    trajectories = (lengths > 0).sum()

    def perplexity(log_probs: Tensor) -> Tensor:
        surprise = -torch.where(mask, log_probs.double(), 0.0).sum(-1) / lengths.clamp(min=1)
        each = torch.where(lengths > 0, surprise.clamp(max=_EXPONENT_LIMIT).exp(), 0.0)
        return each.sum() / trajectories.clamp(min=1)

    return {
        "train_perplexity": perplexity(train_log_probs),
        "rollout_perplexity": perplexity(rollout_log_probs),
        "trajectories": trajectories,
    }


def checked_mask(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """The mask as bool, once shapes fit and the log-probabilities are finite there."""
    mask = as_mask("response_mask", response_mask)
    check_alike(response_mask=mask, train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs)
    check_finite("train_log_probs", train_log_probs, mask)
    check_finite("rollout_log_probs", rollout_log_probs, mask)
    return mask
