"""The compact layout and reward-to-go, without a loop over rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.kernels.backends.running import running_sum

_SCAN_WIDTH = 32


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
    position: Tensor  # [B, K] where each entry came from; 0 for entries that do not exist
    valid: Tensor  # [B, K] bool: which entries of the compact layout exist

    @classmethod
    def of(cls, mask: Tensor) -> "Compact":
        """The compact layout of a boolean mask [B, T]."""
        rows, width = mask.shape
        count = mask.sum(-1)
        longest = int(count.max()) if count.numel() else 0
        valid = torch.arange(longest, device=mask.device) < count.unsqueeze(-1)
        index = (mask.cumsum(-1) - 1).clamp_(min=0)
        # What is off the mask goes to one more entry at the end, which is cut off.
        target = index.masked_fill(~mask, longest)
        source = torch.arange(width, device=mask.device).expand(rows, width)
        position = index.new_zeros(rows, longest + 1).scatter_(-1, target, source)[:, :longest]
        return cls(mask=mask, index=index, position=position, valid=valid)

    def gather(self, tensor: Tensor) -> Tensor:
        """[B, T] -> [B, K]; entries that do not exist are 0."""
        return tensor.gather(-1, self.position).masked_fill_(~self.valid, 0)

    def scatter(self, tensor: Tensor) -> Tensor:
        """[B, K] -> [B, T]; 0 off the mask."""
        if not tensor.shape[-1]:
            return tensor.new_zeros(self.mask.shape)
        return tensor.gather(-1, self.index).masked_fill_(~self.mask, 0)


def reward_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """G_k = sum_{j >= k} gamma^(j-k) r_j along the last dimension of compact rewards [B, K].

    A product with powers of gamma inside blocks, and the same over the blocks' sums: a long row neither overflows nor
    takes a loop over its tokens.
    """
    if gamma == 1.0:
        return running_sum(rewards.flip(-1)).flip(-1)
    if gamma == 0.0:
        return rewards.clone()
    rows, width = rewards.shape
    size = min(_SCAN_WIDTH, width)
    if width == 0:
        return rewards.clone()
    blocks = -(-width // size)
    padded = torch.nn.functional.pad(rewards, (0, blocks * size - width))
    step = torch.arange(size, device=rewards.device)
    distance = (step.unsqueeze(-1) - step).clamp(min=0)  # j - k at [j, k]
    powers = (gamma ** distance.to(rewards.dtype)).tril()
    inside = padded.view(rows, blocks, size) @ powers  # up to the block's end
    if blocks > 1:
        starts = reward_to_go(inside[..., 0].contiguous(), gamma**size)  # G at the start of every block
        inside[:, :-1] += gamma ** (size - step).to(rewards.dtype) * starts[:, 1:, None]
    return inside.view(rows, -1)[:, :width]
