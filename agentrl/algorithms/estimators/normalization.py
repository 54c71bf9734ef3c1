"""Dividing advantages by their spread: by group (`group_std`) or over all model tokens of the step (`whiten`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.estimators.calls import Calls
from agentrl.algorithms.estimators.rows.groups import Groups

NORMALIZATIONS = (None, "group_std", "whiten")


def normalize_by_group(advantages: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """A / (std + 1e-6), std the unbiased one over the model tokens of the group's trajectories, [B, T].

    A group of one trajectory has std 1, and so stays as it is.
    """
    counts = groups.sum(mask.sum(-1).to(advantages.dtype))
    sums = groups.sum(advantages.masked_fill(~mask, 0.0).sum(-1))
    centred = (advantages - (sums / counts).unsqueeze(-1)).masked_fill_(~mask, 0.0)
    squares = groups.sum(centred.square_().sum(-1))
    divisor = (squares / (counts - 1).clamp(min=1)).sqrt() + 1e-6
    divisor = torch.where(groups.members > 1, divisor, 1.0)
    return (advantages / divisor.unsqueeze(-1)).masked_fill_(~mask, 0.0)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the advantages at model tokens, added up block by block."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, advantages: Tensor, mask: Tensor) -> "Moments":
        """Of advantages [b, T] at the True places of the mask, of which there is at least one."""
        count = mask.sum().to(advantages.dtype)
        mean = advantages.masked_fill(~mask, 0.0).sum() / count
        squares = (advantages - mean).masked_fill_(~mask, 0.0).square_().sum()
        return cls(count=count, mean=mean, squares=squares)

    def merge(self, other: "Moments") -> "Moments":
        """Of both parts together."""
        count = self.count + other.count
        difference = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + difference * (other.count / count),
            squares=self.squares + other.squares + difference.square() * (self.count * other.count / count),
        )

    @classmethod
    def nothing(cls, like: Tensor) -> "Moments":
        """Of no advantages."""
        zero = like.new_zeros(())
        return cls(count=zero, mean=zero, squares=zero)

    def over_step(self, calls: Calls) -> "Moments":
        """Of the parts in all calls of the step."""
        count, moment = calls.gather(torch.stack([self.count, self.count * self.mean])).sum(0).unbind()
        mean = moment / count.clamp(min=1)
        squares = calls.gather(self.squares + self.count * (self.mean - mean).square()).sum(0)
        return Moments(count=count, mean=mean, squares=squares)

    def whiten(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """(A - mean) / sqrt(var + 1e-8), var unbiased; fewer than two tokens in all: unchanged. 0 off the mask."""
        if float(self.count) < 2:
            return advantages.masked_fill(~mask, 0.0)
        spread = (self.squares / (self.count - 1) + 1e-8).sqrt()
        return advantages.sub(self.mean).div_(spread).masked_fill_(~mask, 0.0)
