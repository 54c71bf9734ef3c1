"""Optimal baselines column by column: the shared part of `otb` and `tir_otb`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.segments import segment_min, segment_sum

TAILS = ("zero", "carry", "self")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Returns and weights laid out so that a column holds what shares one baseline within a group.

    `valid` [B, C] marks the entries that exist, `returns` is G and `weights` W + eps there; `labels` [B] are groups 0
    .. J-1.
    """

    returns: Tensor  # [B, C] float64
    weights: Tensor  # [B, C] float64, positive where valid
    valid: Tensor  # [B, C] bool
    labels: Tensor  # [B] int64
    groups: int  # J


def column_baselines(columns: Columns, *, tail: str, leave_one_out: bool) -> Tensor:
    """b [B, C]: sum W G / sum W over the group's entries of a column, 0 where invalid.

    With `leave_one_out` every entry is left out of its own sums. Where an entry is alone in its column: 0 (`zero`), the
    row's last baseline in a column with two or more, 0 if there was none (`carry`), or G itself (`self`). A group
    with one row has baseline 0 everywhere.
    """
    sums = _Sums.of(columns)
    shared = sums.excluding_own() if leave_one_out else sums.mean()
    baselines = _apply_tail(columns, sums, shared, tail)
    members = segment_sum(torch.ones_like(columns.labels), columns.labels, columns.groups)[columns.labels]
    baselines = torch.where((members > 1).unsqueeze(-1), baselines, 0.0)
    return torch.where(columns.valid, baselines, 0.0)


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Group sums of every column, returns taken above the column's lowest: equal returns give exactly themselves."""

    columns: Columns
    weights: Tensor  # [B, C], 0 where invalid
    above: Tensor  # [B, C] G - lowest, 0 where invalid
    lowest: Tensor  # [J, C], 0 in empty columns
    total: Tensor  # [J, C] sum of the weights
    moment: Tensor  # [J, C] sum of weights * above
    count: Tensor  # [J, C] contributors

    @classmethod
    def of(cls, columns: Columns) -> "_Sums":
        labels, groups = columns.labels, columns.groups
        weights = torch.where(columns.valid, columns.weights, 0.0)
        lowest = segment_min(torch.where(columns.valid, columns.returns, torch.inf), labels, groups)
        lowest = torch.where(torch.isinf(lowest), 0.0, lowest)
        above = torch.where(columns.valid, columns.returns - lowest[labels], 0.0)
        return cls(
            columns=columns,
            weights=weights,
            above=above,
            lowest=lowest,
            total=segment_sum(weights, labels, groups),
            moment=segment_sum(weights * above, labels, groups),
            count=segment_sum(columns.valid.long(), labels, groups),
        )

    def mean(self) -> Tensor:
        """The weighted mean of the row's group in every column, [B, C]; 0 in empty columns."""
        mean = self.lowest + self.moment / torch.where(self.count > 0, self.total, 1.0)
        return mean[self.columns.labels]

    def excluding_own(self) -> Tensor:
        """The same over the other rows of the group, [B, C]; meaningless where there is none.

        Total minus own cancels where own is nearly all of it, so the sums without the heaviest row are formed on
        their own.
        """
        labels, groups = self.columns.labels, self.columns.groups
        heaviest = self._heaviest()
        light = torch.where(heaviest, 0.0, self.weights)
        total_light = segment_sum(light, labels, groups)[labels]
        moment_light = segment_sum(light * self.above, labels, groups)[labels]
        total = torch.where(heaviest, total_light, self.total[labels] - self.weights)
        moment = torch.where(heaviest, moment_light, self.moment[labels] - self.weights * self.above)
        others = self.count[labels] - self.columns.valid.long() > 0
        return self.lowest[labels] + moment / torch.where(others, total, 1.0)

    def _heaviest(self) -> Tensor:
        """[B, C] True at one row of every group and column: that with the largest weight, the first of equals."""
        labels, groups = self.columns.labels, self.columns.groups
        largest = -segment_min(-self.weights, labels, groups)
        candidate = self.columns.valid & (self.weights == largest[labels])
        row = torch.arange(labels.numel(), device=labels.device).unsqueeze(-1).to(self.weights.dtype)
        chosen = segment_min(torch.where(candidate, row, torch.inf), labels, groups)
        return candidate & (row == chosen[labels])


def _apply_tail(columns: Columns, sums: _Sums, shared: Tensor, tail: str) -> Tensor:
    alone = (sums.count == 1)[columns.labels]
    if tail == "zero":
        return torch.where(alone, 0.0, shared)
    if tail == "self":
        return torch.where(alone, columns.returns, shared)
    position = torch.arange(shared.shape[-1], device=shared.device)
    last = torch.where(sums.count >= 2, position, -1)
    if last.shape[-1]:
        last = last.cummax(-1).values  # the last column, so far, with two or more contributors
    last = last[columns.labels]
    carried = torch.where(last >= 0, shared.gather(-1, last.clamp(min=0)), 0.0)
    return torch.where(alone, carried, shared)
