"""All policy losses with their options.

- Functions of each token's ratio: reinforce, ppo, dual_clip, cispo, sapo.
- Functions of the ratio of a whole sequence: gspo, gmpo. All model tokens of a sequence (a row) must be in one call.
- Masks by the change of a token's probability: dppo_tv, dppo_kl (arXiv 2602.04879). Both are -A sg[min(ratio, 20)] ln p
  for kept tokens and 0 for all other tokens.
- Special treatment of the few tokens whose advantage and log-probability covary most: clip_cov, kl_cov. These tokens
  drive the collapse of entropy (Cui et al., arXiv 2505.22617). They are selected over a whole optimizer step
  (`step_selection`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.losses.registry import LossInputs, LossTraits, register_loss
from agentrl.algorithms.options import (
    InvalidOptionError,
    NoOptions,
    Options,
    check_in_unit_interval,
    check_order,
    check_positive,
    check_range,
    checked_option,
    is_number,
)


@dataclass(frozen=True, kw_only=True)
class ClipOptions(Options):
    """The interval [1 - clip_low, 1 + clip_high] outside which a ratio has no gradient."""

    clip_low: float = checked_option(0.2, check_range, 0.0, 1.0)
    clip_high: float = checked_option(0.2, check_range, 0.0)


def _check_above_one(name: str, value: object) -> None:
    if not (is_number(value) and 1.0 < value < math.inf):
        raise InvalidOptionError(f"{name}={value!r} must be greater than 1 and finite")


@dataclass(frozen=True, kw_only=True)
class DualClipOptions(ClipOptions):
    """ClipOptions with a bound on the ratio of tokens with a negative advantage."""

    dual_clip: float = checked_option(3.0, _check_above_one)


@dataclass(frozen=True, kw_only=True)
class SequenceClipOptions(ClipOptions):
    """ClipOptions for the ratio of a whole sequence, which stays closer to 1. The defaults are the paper's."""

    clip_low: float = checked_option(3e-4, check_range, 0.0, 1.0)
    clip_high: float = checked_option(4e-4, check_range, 0.0)


@dataclass(frozen=True, kw_only=True)
class WeightClipOptions(ClipOptions):
    """ClipOptions for a ratio used as a weight. By default, only the upper bound 5 applies (arXiv 2510.13786)."""

    clip_low: float = checked_option(1.0, check_range, 0.0, 1.0)
    clip_high: float = checked_option(4.0, check_range, 0.0)


@dataclass(frozen=True, kw_only=True)
class LogClipOptions(Options):
    """The interval [-clip_low, clip_high] for the *logarithm* of the ratio. The defaults are the paper's."""

    clip_low: float = checked_option(0.4, check_range, 0.0)
    clip_high: float = checked_option(0.4, check_range, 0.0)


@dataclass(frozen=True, kw_only=True)
class GateOptions(Options):
    """Steepness t of the gate, for tokens with a positive advantage and for all other tokens."""

    temperature_positive: float = checked_option(1.0, check_positive)
    temperature_negative: float = checked_option(1.05, check_positive)


@dataclass(frozen=True, kw_only=True)
class ProbabilityClipOptions(Options):
    """Largest rise (clip_high) and fall (clip_low) of a token's probability before its loss becomes 0."""

    clip_low: float = checked_option(0.15, check_range, 0.0, 1.0)
    clip_high: float = checked_option(0.15, check_range, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class DivergenceClipOptions(Options):
    """Largest binary KL (nats) of a rise (clip_high) or fall (clip_low) of a probability before the loss becomes 0."""

    clip_low: float = checked_option(0.05, check_range, 0.0)
    clip_high: float = checked_option(0.05, check_range, 0.0)


@dataclass(frozen=True, kw_only=True)
class ClipCovarianceOptions(ClipOptions):
    """ClipOptions with the fraction of tokens to drop and the open interval of their covariances."""

    covariance_fraction: float = checked_option(2e-4, check_in_unit_interval)
    covariance_low: float = 1.0
    covariance_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order("covariance_low", self.covariance_low, "covariance_high", self.covariance_high)


@dataclass(frozen=True, kw_only=True)
class KLCovarianceOptions(Options):
    """The fraction of tokens with a KL penalty (largest covariance first), and the coefficient of the penalty."""

    covariance_fraction: float = checked_option(2e-4, check_in_unit_interval)
    kl_coefficient: float = checked_option(1.0, check_range, 0.0)


@register_loss("reinforce")
def reinforce(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -A ln p (Williams 1992). On fresh data, its gradient equals that of `ppo`."""
    return -inputs.advantages * inputs.log_probs, {}


@register_loss("ppo", options=ClipOptions, traits=LossTraits(aggregation="seq_mean_token_mean"))
def ppo(inputs: LossInputs, options: ClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) (Schulman et al., arXiv 1707.06347)."""
    return clipped_surrogate(inputs.ratio, inputs.advantages, options), clip_fractions(inputs, inputs.ratio, options)


@register_loss("dual_clip", options=DualClipOptions, traits=LossTraits(aggregation="seq_mean_token_mean"))
def dual_clip(inputs: LossInputs, options: DualClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `ppo`, bounded by -A c for A < 0, which limits the effect of a large ratio (arXiv 1912.09729)."""
    negative = inputs.advantages < 0
    bound = -inputs.advantages * options.dual_clip
    loss = clipped_surrogate(inputs.ratio, inputs.advantages, options)
    metrics = clip_fractions(inputs, inputs.ratio, options)
    metrics["dual_clip_fraction"] = inputs.fraction(negative & (loss > bound))
    return torch.where(negative, torch.minimum(loss, bound), loss), metrics


@register_loss("cispo", options=WeightClipOptions)
def cispo(inputs: LossInputs, options: WeightClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -sg[clip(ratio, 1 - low, 1 + high)] A ln p, so that every token has a gradient (arXiv 2506.13585)."""
    ratio = inputs.ratio.detach()
    low, high = 1 - options.clip_low, 1 + options.clip_high
    metrics = {
        "clip_fraction_low": inputs.fraction(ratio < low),
        "clip_fraction_high": inputs.fraction(ratio > high),
    }
    return -ratio.clamp(low, high) * inputs.advantages * inputs.log_probs, metrics


@register_loss("sapo", options=GateOptions, traits=LossTraits(aggregation="seq_mean_token_mean"))
def sapo(inputs: LossInputs, options: GateOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -A (4 / t) sigmoid(t (ratio - 1)), a soft clip; t depends on the sign of A (arXiv 2511.20347)."""
    positive, negative = (
        inputs.ratio.new_tensor(t) for t in (options.temperature_positive, options.temperature_negative)
    )
    steepness = torch.where(inputs.advantages > 0, positive, negative)
    gate = 4 / steepness * torch.sigmoid(steepness * (inputs.ratio - 1))
    return -inputs.advantages * gate, {}


def clipped_surrogate(ratio: Tensor, advantages: Tensor, options: ClipOptions) -> Tensor:
    """Compute max(-A ratio, -A clip(ratio, 1 - low, 1 + high))."""
    inside = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return torch.maximum(-advantages * ratio, -advantages * inside)


def lower_and_upper_clip_masks(ratio: Tensor, advantages: Tensor, options: ClipOptions) -> tuple[Tensor, Tensor]:
    """Return two masks: tokens at the lower and at the upper bound of `clipped_surrogate`, where no gradient flows."""
    low = (advantages < 0) & (ratio < 1 - options.clip_low)
    return low, (advantages > 0) & (ratio > 1 + options.clip_high)


def clip_fractions(inputs: LossInputs, ratio: Tensor, options: ClipOptions) -> dict[str, Tensor]:
    """Return the fractions of tokens whose gradient the lower and the upper bound set to 0."""
    low, high = lower_and_upper_clip_masks(ratio.detach(), inputs.advantages, options)
    return {"clip_fraction_low": inputs.fraction(low), "clip_fraction_high": inputs.fraction(high)}


_LOG_LIMIT = 10.0
_TRAITS = LossTraits(aggregation="seq_mean_token_mean", aggregations=("seq_mean_token_mean",))


@register_loss("gspo", options=SequenceClipOptions, traits=_TRAITS)
def gspo(inputs: LossInputs, options: SequenceClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `ppo` with the ratio sg[u] p / sg[p], u = exp(min(mean of log_ratio, 10)) (arXiv 2507.18071).

    The mean is over all model tokens of the sequence, including those outside the loss mask, because u is a property of
    the sequence. Only `seq_mean_token_mean` weights every sequence equally.
    """
    u = inputs.sequence_log_ratio.clamp(max=_LOG_LIMIT).exp()  # (B, 1)
    ratio = u * (inputs.log_probs - inputs.log_probs.detach()).exp()
    return clipped_surrogate(ratio, inputs.advantages, options), clip_fractions(inputs, ratio, options)


@register_loss("gmpo", options=LogClipOptions, traits=_TRAITS)
def gmpo(inputs: LossInputs, options: LogClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -mean(A) exp(mean_t s min(s log_ratio, s clip(log_ratio, -low, high))), s = sign A (arXiv 2507.20673).

    One value per sequence, from its *mean* advantage, so token-level credit is discarded. Every token of the row's loss
    mask has this value, so only `seq_mean_token_mean` yields the mean over sequences. Both means are over the loss
    mask. Weights that vary within a sequence have the effect of their mean.
    """
    lengths = inputs.mask.sum(-1, keepdim=True).clamp(min=1)
    s = torch.sign(inputs.advantages)
    inside = inputs.log_ratio.clamp(-options.clip_low, options.clip_high)
    held = s * torch.minimum(s * inputs.log_ratio, s * inside)
    geometric = (held.sum(-1, keepdim=True) / lengths).exp()  # (B, 1)
    value = -inputs.advantages.sum(-1, keepdim=True) / lengths * geometric
    log_ratio = inputs.log_ratio.detach()
    metrics = {
        "clip_fraction_low": inputs.fraction((s < 0) & (log_ratio < -options.clip_low)),
        "clip_fraction_high": inputs.fraction((s > 0) & (log_ratio > options.clip_high)),
    }
    return value.expand_as(inputs.log_probs), metrics


_RATIO_LIMIT = 20.0


@register_loss("dppo_tv", options=ProbabilityClipOptions)
def dppo_tv(inputs: LossInputs, options: ProbabilityClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Mask by binary total variation: keep tokens if A > 0 and p - p_old <= high, or A <= 0 and p - p_old >= -low."""
    moved = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()
    keep = torch.where(inputs.advantages > 0, moved <= options.clip_high, moved >= -options.clip_low)
    return _importance_weighted_loss(inputs, keep)


@register_loss("dppo_kl", options=DivergenceClipOptions)
def dppo_kl(inputs: LossInputs, options: DivergenceClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Mask by binary KL: keep A > 0 if KL <= high or p <= p_old, and A <= 0 if KL <= low or p >= p_old."""
    log_p, old = inputs.log_probs.detach(), inputs.old_log_probs
    divergence = binary_kl(old, log_p)
    rising = (divergence <= options.clip_high) | (log_p <= old)
    falling = (divergence <= options.clip_low) | (log_p >= old)
    return _importance_weighted_loss(inputs, torch.where(inputs.advantages > 0, rising, falling))


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(Bernoulli(p) || Bernoulli(q)) = p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)); inf if q = 1 > p."""
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)  # rounding may yield positive values
    rest = -torch.expm1(log_p)  # 1 - p
    log_rest_ratio = torch.log(rest) - torch.log(-torch.expm1(log_q))
    return log_p.exp() * (log_p - log_q) + torch.where(rest > 0, rest * log_rest_ratio, 0.0)


def _importance_weighted_loss(inputs: LossInputs, keep: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = inputs.ratio.detach().clamp(max=_RATIO_LIMIT)
    loss = torch.where(keep, -inputs.advantages * ratio * inputs.log_probs, 0.0)
    return loss, {"clip_fraction": inputs.fraction(~keep & (inputs.advantages != 0))}


def advantage_log_prob_covariances(inputs: LossInputs) -> Tensor:
    """Compute (A - mean A) (ln p - mean ln p) [B, T] float64, with means over the loss mask, and 0 outside it."""
    count = inputs.mask.sum().clamp(min=1)
    advantages, log_probs = inputs.advantages.double(), inputs.log_probs.detach().double()
    product = (advantages - advantages.sum() / count) * (log_probs - log_probs.sum() / count)
    return torch.where(inputs.mask, product, 0.0)


def select_for_clip_cov(inputs: LossInputs, options: ClipCovarianceOptions, draws: Tensor) -> Tensor:
    """Select random tokens that ppo does not clip and whose covariance is in (low, high). Returns [B, T] bool.

    Their number is `covariance_fraction` of *all* tokens, at least one, or all such tokens if there are fewer.
    """
    product = advantage_log_prob_covariances(inputs)
    inside = (product > options.covariance_low) & (product < options.covariance_high)
    low, high = lower_and_upper_clip_masks(inputs.ratio, inputs.advantages, options)
    eligible = inputs.mask & inside & ~(low | high)
    return _select_smallest(
        eligible, torch.zeros_like(product), draws, _count_for_fraction(inputs, options.covariance_fraction)
    )


def select_for_kl_cov(inputs: LossInputs, options: KLCovarianceOptions, draws: Tensor) -> Tensor:
    """Select the `covariance_fraction` of tokens with the largest covariance, at least one. Returns [B, T] bool.

    Random draws order equal covariances, so that the order of rows has no effect.
    """
    return _select_smallest(
        inputs.mask,
        -advantage_log_prob_covariances(inputs),
        draws,
        _count_for_fraction(inputs, options.covariance_fraction),
    )


@register_loss("clip_cov", options=ClipCovarianceOptions, traits=LossTraits(selection=select_for_clip_cov))
def clip_cov(inputs: LossInputs, options: ClipCovarianceOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `ppo`, with loss 0 for the selected tokens. These tokens still count in the normalizer."""
    selected = _required_selection(inputs)
    loss = torch.where(selected, 0.0, clipped_surrogate(inputs.ratio, inputs.advantages, options))
    fractions = clip_fractions(inputs, inputs.ratio, options)
    return loss, {**fractions, "selected_fraction": inputs.fraction(selected)}


@register_loss("kl_cov", options=KLCovarianceOptions, traits=LossTraits(selection=select_for_kl_cov))
def kl_cov(inputs: LossInputs, options: KLCovarianceOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -A ratio, plus coefficient |log_ratio| on the selected tokens."""
    selected = _required_selection(inputs)
    penalty = torch.where(selected, options.kl_coefficient * inputs.log_ratio.abs(), 0.0)
    return -inputs.advantages * inputs.ratio + penalty, {"selected_fraction": inputs.fraction(selected)}


def _required_selection(inputs: LossInputs) -> Tensor:
    if inputs.selected is None:
        raise AssertionError("policy_loss must set `selected` for a loss with a selection")
    return inputs.selected


def _count_for_fraction(inputs: LossInputs, fraction: float) -> int:
    """Return the token count for `fraction`, at least 1, rounded down with a tolerance for errors like 0.29 * 100."""
    return max(1, int(fraction * int(inputs.mask.sum()) + 1e-9))


def _select_smallest(eligible: Tensor, ranks: Tensor, tie_breakers: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` eligible entries with the smallest ranks, or of all if there are fewer."""
    places = eligible.flatten().nonzero().squeeze(-1)
    by_draw = tie_breakers.flatten()[places].argsort()
    places = places[by_draw]
    places = places[ranks.flatten()[places].argsort(stable=True)][:count]
    chosen = torch.zeros_like(eligible).flatten()
    chosen[places] = True
    return chosen.view_as(eligible)
