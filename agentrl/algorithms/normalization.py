"""Dividing advantages by their spread (off by default)."""

import torch
from torch import Tensor

from agentrl.algorithms.segments import segment_sum

NORMALIZATIONS = (None, "group_std", "whiten")


def normalize_by_group(advantages: Tensor, mask: Tensor, labels: Tensor, groups: int) -> Tensor:
    """A / (std + 1e-6), std the unbiased one over the model tokens of the group's trajectories, [B, T].

    A group of one trajectory has std 1, and so stays as it is.
    """
    counts = segment_sum(mask.sum(-1).to(advantages.dtype), labels, groups)
    sums = segment_sum(torch.where(mask, advantages, 0.0).sum(-1), labels, groups)
    centred = torch.where(mask, advantages - (sums / counts)[labels].unsqueeze(-1), 0.0)
    squares = segment_sum(centred.square().sum(-1), labels, groups)
    members = segment_sum(torch.ones_like(labels), labels, groups)
    divisor = (squares / (counts - 1).clamp(min=1)).sqrt() + 1e-6
    divisor = torch.where(members > 1, divisor, 1.0)
    return torch.where(mask, advantages / divisor[labels].unsqueeze(-1), 0.0)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8), var unbiased, over all model tokens given; fewer than two tokens: unchanged.

    For the whole step over several ranks, pass the rows of all of them.
    """
    count = mask.sum()
    if int(count) < 2:
        return torch.where(mask, advantages, 0.0)
    mean = torch.where(mask, advantages, 0.0).sum() / count
    centred = torch.where(mask, advantages - mean, 0.0)
    variance = centred.square().sum() / (count - 1)
    return centred / (variance + 1e-8).sqrt()
