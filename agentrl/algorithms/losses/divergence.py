"""Losses that stop a token by how far its probability has moved, not by its ratio: dppo_tv, dppo_kl (arXiv 2602.04879).

Both are -A sg[min(ratio, 20)] ln p for the tokens they keep, 0 for the others.
"""

import torch
from torch import Tensor

from agentrl.algorithms.losses.definitions import LossInputs, register_loss
from agentrl.algorithms.losses.options import DivergenceClipOptions, ProbabilityClipOptions

_RATIO_LIMIT = 20.0


@register_loss("dppo_tv", options=ProbabilityClipOptions)
def dppo_tv(inputs: LossInputs, options: ProbabilityClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Keeps A > 0 while p - p_old <= high, and the others while p - p_old >= -low (binary total variation)."""
    moved = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()
    keep = torch.where(inputs.advantages > 0, moved <= options.clip_high, moved >= -options.clip_low)
    return _kept(inputs, keep)


@register_loss("dppo_kl", options=DivergenceClipOptions)
def dppo_kl(inputs: LossInputs, options: DivergenceClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Keeps A > 0 while KL <= high or p <= p_old, the others while KL <= low or p >= p_old; KL the binary one."""
    log_p, old = inputs.log_probs.detach(), inputs.old_log_probs
    divergence = binary_kl(old, log_p)
    rising = (divergence <= options.clip_high) | (log_p <= old)
    falling = (divergence <= options.clip_low) | (log_p >= old)
    return _kept(inputs, torch.where(inputs.advantages > 0, rising, falling))


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of Bernoulli(p) from Bernoulli(q): p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)); inf where q = 1 > p."""
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)  # rounding
    rest = -torch.expm1(log_p)  # 1 - p
    log_rest_ratio = torch.log(rest) - torch.log(-torch.expm1(log_q))
    return log_p.exp() * (log_p - log_q) + torch.where(rest > 0, rest * log_rest_ratio, 0.0)


def _kept(inputs: LossInputs, keep: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = inputs.ratio.detach().clamp(max=_RATIO_LIMIT)
    loss = torch.where(keep, -inputs.advantages * ratio * inputs.log_probs, 0.0)
    return loss, {"clip_fraction": inputs.fraction(~keep & (inputs.advantages != 0))}
