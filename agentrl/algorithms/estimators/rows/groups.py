"""Rows that share a baseline, side by side: sums over groups are plain reductions, without a loop over groups."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Groups:
    """J groups of at most N of the B rows.

    >>> groups = Groups.of(torch.tensor([7, 3, 7]))
    >>> groups.stack(torch.tensor([1., 2., 3.])).tolist()  # group 3, with an empty place, and group 7
    [[2.0, 1.0], [1.0, 3.0]]
    >>> groups.present.tolist()
    [[True, False], [True, True]]
    >>> groups.mean(torch.tensor([1., 2., 3.])).tolist()
    [2.0, 2.0, 2.0]
    """

    labels: Tensor  # [B] groups renumbered 0 .. J-1
    sizes: Tensor  # [J] rows in each
    slots: Tensor  # [B] where in the flattened [J, N] a row stands
    present: Tensor  # [J, N] bool: places that hold a row
    in_order: bool  # row i stands in place i: stacking is a view

    @classmethod
    def of(cls, ids: Tensor) -> "Groups":
        """From arbitrary group ids [B], equal for the rows of a group."""
        unique, labels, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        largest = int(sizes.max()) if sizes.numel() else 1  # without rows every reduction over a group still works
        order = labels.argsort(stable=True)
        place = torch.arange(ids.numel(), device=ids.device)
        rank = place - (sizes.cumsum(0) - sizes)[labels[order]]
        slots = torch.empty_like(labels)
        slots[order] = labels[order] * largest + rank
        present = torch.zeros(unique.numel(), largest, dtype=torch.bool, device=ids.device)
        present.view(-1)[slots] = True
        in_order = present.numel() == ids.numel() and bool((slots == place).all())
        return cls(labels=labels, sizes=sizes, slots=slots, present=present, in_order=in_order)

    @property
    def members(self) -> Tensor:
        """[B] how many rows the row's group has."""
        return self.sizes[self.labels]

    def stack(self, values: Tensor) -> Tensor:
        """[B, ...] -> [J, N, ...]; an empty place repeats a row of the batch: leave it out by `present`."""
        shape = (*self.present.shape, *values.shape[1:])
        if self.in_order:
            return values.reshape(shape)
        rows = torch.zeros(self.present.numel(), dtype=torch.int64, device=values.device)
        rows[self.slots] = torch.arange(values.shape[0], device=values.device)
        return values[rows].reshape(shape)

    def unstack(self, stacked: Tensor) -> Tensor:
        """[J, N, ...] or, for what the group shares, [J, 1, ...] -> [B, ...]."""
        if stacked.shape[1] != self.present.shape[1]:
            return stacked.squeeze(1)[self.labels]
        flat = stacked.flatten(0, 1)
        return flat if self.in_order else flat[self.slots]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the row's group of values [B] -> [B]."""
        return torch.where(self.present, self.stack(values), 0).sum(1)[self.labels]

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the row's group of values [B] -> [B], exact where a group's values are all equal."""
        lowest = self.lowest(values)
        return lowest + self.sum(values - lowest) / self.members

    def lowest(self, values: Tensor) -> Tensor:
        """Smallest of the row's group of values [B] -> [B]."""
        return torch.where(self.present, self.stack(values), torch.inf).amin(1)[self.labels]
