"""One packed row on several ranks (Ulysses, arXiv 2309.14509): each holds a slice of its tokens.

Only attention mixes tokens. There the ranks exchange slices of all heads for all tokens of some heads, and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceGroup:
    """The ranks that share rows. All methods but :meth:`part` are collective, forward and backward."""

    rank: int  # among them
    size: int
    group: torch.distributed.ProcessGroup

    def part(self, length: int) -> slice:
        """This rank's slice of a row of ``length`` tokens, which the ranks divide."""
        own = length // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def by_heads(self, states: Tensor) -> Tensor:
        """From this rank's tokens [1, H, l, E] to all tokens of its heads [1, H / size, L, E]."""
        received = self._swapped(states[0].unflatten(0, (self.size, -1)))  # [size, H / size, l, E], tokens in order
        return received.transpose(0, 1).flatten(1, 2)[None]

    def keys_by_heads(self, states: Tensor) -> Tensor:
        """As :meth:`by_heads` for G heads that queries share; the ranks that need the same one get a copy each."""
        copies = math.lcm(states.shape[1], self.size) // states.shape[1]
        return self.by_heads(states.repeat_interleave(copies, 1) if copies > 1 else states)

    def by_tokens(self, states: Tensor) -> Tensor:
        """From all tokens of this rank's heads [1, L, H / size, E] to its tokens [1, l, H, E]."""
        received = self._swapped(states[0].unflatten(0, (self.size, -1)))  # [size, l, H / size, E], heads in order
        return received.transpose(0, 1).flatten(1, 2)[None]

    def total(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over the ranks, detached."""
        summed = values.detach().clone()
        torch.distributed.all_reduce(summed, group=self.group)
        return summed

    def gather(self, values: Tensor, numbers: Tensor, total: int) -> Tensor:
        """[total, ...] on every rank from each one's ``values`` [n, ...], which are those of ``numbers`` [n].

        Every rank is to compute the same loss from it. The gradient of ``values`` is that of this loss alone, not the
        sum over ranks: so the ranks' gradients of a parameter add up to the loss's.
        """
        own = values.new_zeros(total, *values.shape[1:]).index_copy(0, numbers, values)
        every = self.total(own)
        held = torch.zeros(total, dtype=torch.bool, device=values.device)
        held[numbers] = True
        return torch.where(held.view(-1, *[1] * (values.dim() - 1)), own, every)

    def _swapped(self, blocks: Tensor) -> Tensor:
        swapped: Tensor = _Swap.apply(blocks.contiguous(), self)
        return swapped


class _Context(Protocol):
    """What backward needs."""

    ranks: SequenceGroup


class _Swap(torch.autograd.Function):
    """(blocks [size, ...], ranks): block r goes to rank r, and the result's block r comes from there."""

    @staticmethod
    def forward(ctx: _Context, blocks: Tensor, ranks: SequenceGroup) -> Tensor:
        ctx.ranks = ranks
        received = torch.empty_like(blocks)
        torch.distributed.all_to_all_single(received, blocks, group=ranks.group)
        return received

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _Swap.apply(gradient.contiguous(), ctx.ranks), None
