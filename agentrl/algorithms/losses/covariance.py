"""Losses that hold back the few tokens whose advantage and log-probability go together most: clip_cov, kl_cov.

Such tokens drive the collapse of entropy (Cui et al., arXiv 2505.22617). They are chosen over a whole optimizer step:
see `step_selection`.
"""

import torch
from torch import Tensor

from agentrl.algorithms.losses.clip import clip_fractions, clipped, clipped_sides
from agentrl.algorithms.losses.definitions import LossInputs, LossTraits, register_loss
from agentrl.algorithms.losses.options import ClipCovarianceOptions, KLCovarianceOptions


def covariance(inputs: LossInputs) -> Tensor:
    """(A - mean A) (ln p - mean ln p) [B, T] float64, the means over the loss mask; 0 off it."""
    count = inputs.mask.sum().clamp(min=1)
    advantages, log_probs = inputs.advantages.double(), inputs.log_probs.detach().double()
    product = (advantages - advantages.sum() / count) * (log_probs - log_probs.sum() / count)
    return torch.where(inputs.mask, product, 0.0)


def select_for_clip_cov(inputs: LossInputs, options: ClipCovarianceOptions, draws: Tensor) -> Tensor:
    """Random tokens among those that ppo does not clip and whose covariance lies in (low, high), [B, T] bool.

    As many as `covariance_fraction` of *all* tokens, at least one, if there are so many.
    """
    product = covariance(inputs)
    inside = (product > options.covariance_low) & (product < options.covariance_high)
    low, high = clipped_sides(inputs.ratio, inputs.advantages, options)
    eligible = inputs.mask & inside & ~(low | high)
    return _first(eligible, torch.zeros_like(product), draws, _share(inputs, options.covariance_fraction))


def select_for_kl_cov(inputs: LossInputs, options: KLCovarianceOptions, draws: Tensor) -> Tensor:
    """The `covariance_fraction` of tokens with the largest covariance, at least one, [B, T] bool.

    Among equal covariances the draws decide, so that the order of rows does not.
    """
    return _first(inputs.mask, -covariance(inputs), draws, _share(inputs, options.covariance_fraction))


@register_loss("clip_cov", options=ClipCovarianceOptions, traits=LossTraits(selection=select_for_clip_cov))
def clip_cov(inputs: LossInputs, options: ClipCovarianceOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo`, and 0 on the selected tokens, which keep their place in the normalizer."""
    selected = _selected(inputs)
    loss = torch.where(selected, 0.0, clipped(inputs.ratio, inputs.advantages, options))
    fractions = clip_fractions(inputs, inputs.ratio, options)
    return loss, {**fractions, "selected_fraction": inputs.fraction(selected)}


@register_loss("kl_cov", options=KLCovarianceOptions, traits=LossTraits(selection=select_for_kl_cov))
def kl_cov(inputs: LossInputs, options: KLCovarianceOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-A ratio, and on the selected tokens + coefficient |log_ratio|."""
    selected = _selected(inputs)
    penalty = torch.where(selected, options.kl_coefficient * inputs.log_ratio.abs(), 0.0)
    return -inputs.advantages * inputs.ratio + penalty, {"selected_fraction": inputs.fraction(selected)}


def _selected(inputs: LossInputs) -> Tensor:
    if inputs.selected is None:
        raise AssertionError("policy_loss fills in the selection of a loss that has one")
    return inputs.selected


def _share(inputs: LossInputs, fraction: float) -> int:
    """`fraction` of the tokens, rounded down (past the error of products like 0.29 * 100), at least one."""
    return max(1, int(fraction * int(inputs.mask.sum()) + 1e-9))


def _first(eligible: Tensor, rank: Tensor, draws: Tensor, count: int) -> Tensor:
    """The `count` eligible entries of smallest (rank, draw), or all if they are fewer; bool of the same shape."""
    places = eligible.flatten().nonzero().squeeze(-1)
    by_draw = draws.flatten()[places].argsort()
    places = places[by_draw]
    places = places[rank.flatten()[places].argsort(stable=True)][:count]
    chosen = torch.zeros_like(eligible).flatten()
    chosen[places] = True
    return chosen.view_as(eligible)
