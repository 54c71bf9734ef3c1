"""Losses on the ratio of a whole sequence: gspo, gmpo.

A sequence is a row: all its model tokens must be in one call.
"""

import torch
from torch import Tensor

from agentrl.algorithms.losses.clip import clip_fractions, clipped
from agentrl.algorithms.losses.definitions import SEQUENCE_MEAN, LossInputs, LossTraits, register_loss
from agentrl.algorithms.losses.options import LogClipOptions, SequenceClipOptions

_LOG_LIMIT = 10.0
_TRAITS = LossTraits(aggregation="seq_mean_token_mean", aggregations=SEQUENCE_MEAN)


@register_loss("gspo", options=SequenceClipOptions, traits=_TRAITS)
def gspo(inputs: LossInputs, options: SequenceClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo` with the ratio sg[u] p / sg[p], u = exp(min(mean of log_ratio, 10)) (Zheng et al., arXiv 2507.18071).

    The mean is over the sequence's model tokens, also those that the loss mask leaves out: u is a property of the
    sequence. Only `seq_mean_token_mean` gives every sequence the same weight.
    """
    u = inputs.sequence_log_ratio.clamp(max=_LOG_LIMIT).exp()  # (B, 1)
    ratio = u * (inputs.log_probs - inputs.log_probs.detach()).exp()
    return clipped(ratio, inputs.advantages, options), clip_fractions(inputs, ratio, options)


@register_loss("gmpo", options=LogClipOptions, traits=_TRAITS)
def gmpo(inputs: LossInputs, options: LogClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-mean(A) exp(mean_t s min(s log_ratio, s clip(log_ratio, -low, high))), s = sign A (arXiv 2507.20673).

    One value a sequence, from its *mean* advantage: credit given to single tokens is discarded. The value stands on
    every token of the row's loss mask, so that `seq_mean_token_mean`, and no other aggregation, gives the mean over
    sequences. Both means are over the loss mask. Weights that vary within a sequence act through their mean.
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
