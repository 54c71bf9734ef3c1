"""Losses on each token's own ratio: reinforce, ppo, dual_clip, cispo, sapo."""

import torch
from torch import Tensor

from agentrl.algorithms.losses.definitions import LossInputs, LossTraits, register_loss
from agentrl.algorithms.losses.options import ClipOptions, DualClipOptions, GateOptions, WeightClipOptions
from agentrl.algorithms.registry import NoOptions


@register_loss("reinforce")
def reinforce(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-A ln p (Williams 1992); on fresh data its gradient is that of `ppo`."""
    return -inputs.advantages * inputs.log_probs, {}


@register_loss("ppo", options=ClipOptions, traits=LossTraits(aggregation="seq_mean_token_mean"))
def ppo(inputs: LossInputs, options: ClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) (Schulman et al., arXiv 1707.06347)."""
    return clipped(inputs.ratio, inputs.advantages, options), clip_fractions(inputs, inputs.ratio, options)


@register_loss("dual_clip", options=DualClipOptions, traits=LossTraits(aggregation="seq_mean_token_mean"))
def dual_clip(inputs: LossInputs, options: DualClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo`, and for A < 0 never more than -A c, so a large ratio cannot push without bound (arXiv 1912.09729)."""
    negative = inputs.advantages < 0
    bound = -inputs.advantages * options.dual_clip
    loss = clipped(inputs.ratio, inputs.advantages, options)
    metrics = clip_fractions(inputs, inputs.ratio, options)
    metrics["dual_clip_fraction"] = inputs.fraction(negative & (loss > bound))
    return torch.where(negative, torch.minimum(loss, bound), loss), metrics


@register_loss("cispo", options=WeightClipOptions)
def cispo(inputs: LossInputs, options: WeightClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg[clip(ratio, 1 - low, 1 + high)] A ln p: every token keeps its gradient (MiniMax, arXiv 2506.13585)."""
    ratio = inputs.ratio.detach()
    low, high = 1 - options.clip_low, 1 + options.clip_high
    metrics = {
        "clip_fraction_low": inputs.fraction(ratio < low),
        "clip_fraction_high": inputs.fraction(ratio > high),
    }
    return -ratio.clamp(low, high) * inputs.advantages * inputs.log_probs, metrics


@register_loss("sapo", options=GateOptions, traits=LossTraits(aggregation="seq_mean_token_mean"))
def sapo(inputs: LossInputs, options: GateOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-A (4 / t) sigmoid(t (ratio - 1)), t by the sign of A: a soft clip (Gao et al., arXiv 2511.20347)."""
    positive, negative = (
        inputs.ratio.new_tensor(t) for t in (options.temperature_positive, options.temperature_negative)
    )
    steepness = torch.where(inputs.advantages > 0, positive, negative)
    gate = 4 / steepness * torch.sigmoid(steepness * (inputs.ratio - 1))
    return -inputs.advantages * gate, {}


def clipped(ratio: Tensor, advantages: Tensor, options: ClipOptions) -> Tensor:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high))."""
    inside = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return torch.maximum(-advantages * ratio, -advantages * inside)


def clipped_sides(ratio: Tensor, advantages: Tensor, options: ClipOptions) -> tuple[Tensor, Tensor]:
    """Where the lower and where the upper bound of `clipped` counts, so that no gradient flows."""
    low = (advantages < 0) & (ratio < 1 - options.clip_low)
    return low, (advantages > 0) & (ratio > 1 + options.clip_high)


def clip_fractions(inputs: LossInputs, ratio: Tensor, options: ClipOptions) -> dict[str, Tensor]:
    """Shares of the tokens that the lower and the upper bound silence."""
    low, high = clipped_sides(ratio.detach(), inputs.advantages, options)
    return {"clip_fraction_low": inputs.fraction(low), "clip_fraction_high": inputs.fraction(high)}
