"""Rollout correction: metrics, weights and masks for tokens sampled by another policy or another implementation.

log_rho = ln p of the training policy (before the update) - ln p of the policy that sampled
(docs/reference/formulas.md 6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.options import (
    InvalidOptionError,
    Options,
    check_choice,
    check_finite,
    check_order,
    check_positive,
    check_range,
    check_same_shape,
    checked_option,
    loss_mask_or_response_mask,
    make_options,
    to_bool_mask,
)

_EXPONENT_LIMIT = 20.0


RATIO_LEVELS = ("token", "sequence", "geometric")
WEIGHT_BOUNDS = ("truncate", "icepop")
DIVERGENCES = ("k2", "k3")
DIVERGENCE_LEVELS = ("token", "sequence_mean", "sequence_max")
_LOG_LARGEST = math.log(torch.finfo(torch.float64).max) - 1


@dataclass(frozen=True, kw_only=True)
class CorrectionOptions(Options):
    """Weights and masks of the rollout correction. Each is off by default, and all may be combined.

    `weights`: the ratio of the `token`, of the `sequence` (product over its model tokens) or its `geometric` mean.
    `weight_bound`: `truncate` (TIS) caps weights at `weight_high`; `icepop` sets 0 outside [weight_low, weight_high].
    `self_normalize`: divide by the mean weight of the optimizer step.
    `ratio_mask` (MIS): keep tokens or sequences whose ratio is within [ratio_low, ratio_high]. With 0.5 and 1.5, a
    ratio of 1.8 is rejected and 0.6 is kept. (A well-known implementation inverts this condition.)
    `divergence_mask`: keep tokens or sequences whose divergence is at most `divergence_high`. The divergence is `k2`
    log_rho^2 / 2 or `k3` rho - log_rho - 1. `divergence_level` selects the divergence of each token, or the mean or
    the maximum over the tokens of a sequence.
    """

    weights: str | None = checked_option(None, check_choice, (None, *RATIO_LEVELS))
    weight_bound: str = checked_option("truncate", check_choice, WEIGHT_BOUNDS)
    weight_low: float = checked_option(0.5, check_range, 0.0)
    weight_high: float = checked_option(2.0, check_positive)
    self_normalize: bool = False
    ratio_mask: str | None = checked_option(None, check_choice, (None, *RATIO_LEVELS))
    ratio_low: float = checked_option(0.5, check_range, 0.0)
    ratio_high: float = checked_option(2.0, check_positive)
    divergence_mask: str | None = checked_option(None, check_choice, (None, *DIVERGENCES))
    divergence_level: str = checked_option("token", check_choice, DIVERGENCE_LEVELS)
    divergence_high: float = checked_option(0.1, check_positive)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_bound == "icepop":
            check_order("weight_low", self.weight_low, "weight_high", self.weight_high)
        check_order("ratio_low", self.ratio_low, "ratio_high", self.ratio_high)
        if self.self_normalize and self.weights is None:
            raise InvalidOptionError("self_normalize=True has no weights to normalize: set weights")

    @property
    def step_wide(self) -> bool:
        """True if the loss mask or the weights depend on the log-probabilities of the whole step."""
        return self.self_normalize or self.ratio_mask is not None or self.divergence_mask is not None


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Result of the rollout correction, detached. `weights` [B, T] multiply the per-token loss after clipping.

    `weights` are 0 outside the response mask. `loss_mask` [B, T] bool: the tokens that remain in the loss. `metrics`:
    see `rollout_correction`.
    """

    weights: Tensor
    loss_mask: Tensor
    metrics: dict[str, Tensor]

    @property
    def importance_weights(self) -> Tensor:
        """weights * loss_mask, the `AdvantageInputs.importance_weights` for the energies of a baseline."""
        return torch.where(self.loss_mask, self.weights, 0.0)


@torch.no_grad()
def rollout_correction(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    loss_mask: Tensor | None = None,
    normalizer: Tensor | None = None,
    **options: object,
) -> Correction:
    """Compute weights, loss mask and diagnostics from log-probabilities [B, T]. Each row is a whole sequence.

    Options: the fields of `CorrectionOptions`. Sequence ratios are over `response_mask`. The result's mask is a subset
    of `loss_mask` (default: the response mask). With `self_normalize`, weights are divided by their mean over the
    tokens in the loss (`token`) or over the sequences with a token in the loss. `normalizer` is the sum of
    `correction_weight_sums` over the step's micro-batches and ranks. Without it, this call counts as the whole step.

    Metrics are float64 scalars over the model tokens of this call. They include the metrics of `mismatch_metrics` and
    `perplexity_metrics`, `rho_min`, `rho_max`, `truncated_fraction` (weight capped or set to 0), `masked_fraction`
    (fraction of the tokens in `loss_mask` that this call rejects) and `weight_mean` (over the kept tokens, before
    normalization).

    Values outside the response mask have no effect. Raises UnknownNameError or InvalidOptionError for invalid options,
    and InvalidInputError for invalid tensors.
    """
    record = correction_options(**options)
    log_rho, model_mask = _log_ratios(train_log_probs, rollout_log_probs, response_mask)
    given = loss_mask_or_response_mask(loss_mask, model_mask)
    kept = given & _mask_by_ratio(log_rho, model_mask, record) & _mask_by_divergence(log_rho, model_mask, record)
    weights, changed_by_bound = _bounded_importance_weights(log_rho, model_mask, record)
    inside = log_rho[model_mask] if bool(model_mask.any()) else log_rho.new_zeros(1)
    metrics = {
        **mismatch_metrics(train_log_probs, rollout_log_probs, model_mask),
        **perplexity_metrics(train_log_probs, rollout_log_probs, model_mask),
        "rho_min": _exp_without_overflow(inside.min()),
        "rho_max": _exp_without_overflow(inside.max()),
        "truncated_fraction": changed_by_bound.sum().double() / model_mask.sum().clamp(min=1),
        "masked_fraction": (given & ~kept).sum().double() / given.sum().clamp(min=1),
        "weight_mean": torch.where(kept, weights, 0.0).sum() / kept.sum().clamp(min=1),
    }
    if record.self_normalize:
        total, count = _weight_sums(weights, kept, record) if normalizer is None else normalizer.double()
        weights = weights * torch.where(total > 0, count / total, 1.0)
    dtype = torch.float64 if train_log_probs.dtype == torch.float64 else torch.float32
    return Correction(weights=weights.to(dtype), loss_mask=kept, metrics=metrics)


@torch.no_grad()
def correction_weight_sums(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    loss_mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Return [sum of weights, number of weights] (float64) of this part of the step, to be summed for `normalizer`."""
    record = correction_options(**options)
    log_rho, model_mask = _log_ratios(train_log_probs, rollout_log_probs, response_mask)
    given = loss_mask_or_response_mask(loss_mask, model_mask)
    kept = given & _mask_by_ratio(log_rho, model_mask, record) & _mask_by_divergence(log_rho, model_mask, record)
    weights, _ = _bounded_importance_weights(log_rho, model_mask, record)
    return _weight_sums(weights, kept, record)


def correction_options(**options: object) -> CorrectionOptions:
    """Check and return the options. Raises UnknownNameError for unknown names and InvalidOptionError for bad values."""
    return make_options(CorrectionOptions, "the rollout correction", options)


def _weight_sums(weights: Tensor, kept: Tensor, record: CorrectionOptions) -> Tensor:
    weights = torch.where(kept, weights, 0.0)
    if record.weights == "token":
        return torch.stack([weights.sum(), kept.sum().double()])
    lengths = kept.sum(-1)
    each = weights.sum(-1) / lengths.clamp(min=1)  # all tokens of a sequence have the same weight
    return torch.stack([each.sum(), (lengths > 0).sum().double()])


def _log_ratios(train: Tensor, rollout: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Check the inputs. Returns (log_rho, mask of the model tokens), [B, T]; log_rho is 0 outside the mask."""
    model_mask = validated_response_mask(train, rollout, response_mask)
    return torch.where(model_mask, train.double(), 0.0) - torch.where(model_mask, rollout.double(), 0.0), model_mask


def _bounded_importance_weights(
    log_rho: Tensor, model_mask: Tensor, record: CorrectionOptions
) -> tuple[Tensor, Tensor]:
    """Return (weights, mask of the weights that the bound changed)."""
    if record.weights is None:
        return model_mask.double(), torch.zeros_like(model_mask)
    ratio = _importance_ratios(log_rho, model_mask, record.weights)
    outside = ratio > record.weight_high
    if record.weight_bound == "icepop":
        outside = outside | (ratio < record.weight_low)
        weights = torch.where(outside, 0.0, ratio)
    else:
        weights = ratio.clamp(max=record.weight_high)
    return torch.where(model_mask, weights, 0.0), model_mask & outside


def _mask_by_ratio(log_rho: Tensor, model_mask: Tensor, record: CorrectionOptions) -> Tensor:
    """Return the mask for masked importance sampling: True where the ratio is in [ratio_low, ratio_high]."""
    if record.ratio_mask is None:
        return torch.ones_like(model_mask)
    ratio = _importance_ratios(log_rho, model_mask, record.ratio_mask)
    return (ratio >= record.ratio_low) & (ratio <= record.ratio_high)


def _mask_by_divergence(log_rho: Tensor, model_mask: Tensor, record: CorrectionOptions) -> Tensor:
    """Return a mask that is True where the divergence estimate is at most `divergence_high`."""
    if record.divergence_mask is None:
        return torch.ones_like(model_mask)
    if record.divergence_mask == "k2":
        divergence = log_rho.square() / 2
    else:
        divergence = torch.expm1(log_rho.clamp(max=_LOG_LARGEST)) - log_rho
    if record.divergence_level == "sequence_mean":
        divergence = _row_means(divergence, model_mask)
    elif record.divergence_level == "sequence_max":
        divergence = divergence.amax(-1, keepdim=True) if model_mask.numel() else divergence
    return divergence <= record.divergence_high


def _importance_ratios(log_rho: Tensor, model_mask: Tensor, level: str) -> Tensor:
    """Return the importance ratio at every position [B, T]: per token, per sequence, or as a geometric mean."""
    if level == "sequence":
        log_rho = log_rho.sum(-1, keepdim=True).expand_as(model_mask)
    elif level == "geometric":
        log_rho = _row_means(log_rho, model_mask)
    return _exp_without_overflow(log_rho)


def _exp_without_overflow(log_rho: Tensor) -> Tensor:
    return log_rho.clamp(max=_LOG_LARGEST).exp()


def _row_means(values: Tensor, model_mask: Tensor) -> Tensor:
    """Return each row's mean over its model tokens, at every position [B, T]. Values at other tokens must be 0."""
    return (values.sum(-1, keepdim=True) / model_mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(model_mask)


@torch.no_grad()
def mismatch_metrics(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Compute mismatch metrics of log-probabilities [B, T] over model tokens. Without tokens, all are 0 except ess = 1.

    With log_rho = train - rollout (clamped to +-20 where it is exponentiated): `mean_abs_difference`; `kl_k1`
    mean(-log_rho) and `kl_k3` mean(rho - log_rho - 1), estimates of KL(rollout || train); `chi2` mean(rho^2) - 1; `ess`
    (sum rho)^2 / (n sum rho^2); `log_ppl_gap` |mean train - mean rollout| of every trajectory, averaged over
    trajectories with a model token; `tokens`, the number of model tokens.

    Raises InvalidInputError for wrong shapes and for a non-finite log-probability at a model token.
    """
    mask = validated_response_mask(train_log_probs, rollout_log_probs, response_mask)
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
        "kl_k1": -log_rho.sum() / tokens,
        "kl_k3": torch.where(mask, rho - log_rho - 1, 0.0).sum() / tokens,
        "chi2": torch.where(nothing, 0.0, squares / tokens - 1),
        "ess": torch.where(nothing, 1.0, rho.sum().square() / (tokens * squares.clamp(min=torch.finfo().tiny))),
        "log_ppl_gap": gaps.sum() / (lengths > 0).sum().clamp(min=1),
        "tokens": count,
    }


@torch.no_grad()
def perplexity_metrics(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Compute exp(-mean ln p) for both policies, averaged over the trajectories with model tokens.

    Returns `train_perplexity`, `rollout_perplexity` (with exponents of at most 20), and `trajectories`, the number of
    trajectories averaged. All are 0 without such trajectories.
    """
    mask = validated_response_mask(train_log_probs, rollout_log_probs, response_mask)
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


def validated_response_mask(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """Return the mask as bool after checking that shapes match and log-probabilities are finite where it is True."""
    mask = to_bool_mask("response_mask", response_mask)
    check_same_shape(response_mask=mask, train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs)
    check_finite("train_log_probs", train_log_probs, mask)
    check_finite("rollout_log_probs", rollout_log_probs, mask)
    return mask
