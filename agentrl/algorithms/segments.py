"""Sums over groups, the compact layout, and reward-to-go: all without a loop over rows."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Compact:
    """Every row's model tokens moved to the left, in order: [B, K], K the largest number of model tokens.

    >>> layout = Compact.of(torch.tensor([[True, False, True], [False, True, False]]))
    >>> layout.gather(torch.tensor([[1., 2., 3.], [4., 5., 6.]])).tolist()
    [[1.0, 3.0], [5.0, 0.0]]
    >>> layout.scatter(torch.tensor([[1., 3.], [5., 9.]])).tolist()
    [[1.0, 0.0, 3.0], [0.0, 5.0, 0.0]]
    """

    mask: Tensor  # [B, T] bool: the positions that are kept
    index: Tensor  # [B, T] compact index of every position (that of the last model token before it; at least 0)
    valid: Tensor  # [B, K] bool: which entries of the compact layout exist

    @classmethod
    def of(cls, mask: Tensor) -> "Compact":
        """The compact layout of a boolean mask [B, T]."""
        count = mask.sum(-1)
        longest = int(count.max()) if count.numel() else 0
        valid = torch.arange(longest, device=mask.device) < count.unsqueeze(-1)
        return cls(mask=mask, index=(mask.cumsum(-1) - 1).clamp_(min=0), valid=valid)

    def gather(self, tensor: Tensor) -> Tensor:
        """[B, T] -> [B, K]; entries that do not exist are 0."""
        result = tensor.new_zeros(self.valid.shape)
        result[self.valid] = tensor[self.mask]
        return result

    def scatter(self, tensor: Tensor) -> Tensor:
        """[B, K] -> [B, T]; 0 off the mask."""
        result = tensor.new_zeros(self.mask.shape)
        result[self.mask] = tensor[self.valid]
        return result


def relabel(groups: Tensor) -> tuple[Tensor, int]:
    """Arbitrary group ids [B] -> (labels 0 .. J-1 [B], J)."""
    unique, labels = torch.unique(groups, return_inverse=True)
    return labels, unique.numel()


def segment_sum(values: Tensor, labels: Tensor, segments: int) -> Tensor:
    """Sum of values [n, ...] over equal labels [n] -> [segments, ...]."""
    return values.new_zeros((segments, *values.shape[1:])).index_add_(0, labels, values)


def segment_min(values: Tensor, labels: Tensor, segments: int) -> Tensor:
    """Smallest value of every segment, values [n, ...] -> [segments, ...]; inf where a segment is empty."""
    start = values.new_full((segments, *values.shape[1:]), torch.inf)
    index = labels.reshape(-1, *[1] * (values.ndim - 1)).expand_as(values)
    return start.scatter_reduce_(0, index, values, "amin")


def group_mean(values: Tensor, labels: Tensor, groups: int) -> Tensor:
    """Mean of values [B] in every group [J], exact where a group's values are all equal."""
    lowest = segment_min(values, labels, groups)
    count = segment_sum(torch.ones_like(values), labels, groups)
    return lowest + segment_sum(values - lowest[labels], labels, groups) / count


def reward_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """G_k = sum_{j >= k} gamma^(j-k) r_j along the last dimension of compact rewards [B, K].

    By doubling, so a long row neither overflows nor takes a loop over its tokens: after s rounds every entry holds
    the sum of the next 2^s rewards.
    """
    if gamma == 1.0:
        return rewards.flip(-1).cumsum(-1).flip(-1)
    result, step, factor = rewards.clone(), 1, gamma
    while step < rewards.shape[-1] and factor != 0.0:
        result[:, :-step] += factor * result[:, step:]
        step, factor = 2 * step, factor * factor
    return result
