"""Rollouts of several sequences, as one row each: what every estimator sees where an agent's history branched.

A rollout is one episode, whatever the contexts of its turns. Its row holds the model tokens of its sequences one after
the other, so sums and means over a group count every rollout once, and a return is the rollout's. No token stands in
two sequences. The rows of groups without branches stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from agentrl.algorithms.estimators.rows.segments import Compact
from agentrl.algorithms.records import AdvantageInputs, Advantages


@dataclass(frozen=True, kw_only=True)
class MergedInputs(AdvantageInputs):
    """A row [W] for each of R rollouts."""

    branched: Tensor  # [R] bool: a rollout of its group has branches
    previous: Tensor  # [R, W] int64 where in the row the model token before each one stands; -1: it is the first


@dataclass(frozen=True, kw_only=True)
class RolloutRows:
    """Where the tokens of B rows stand in the R rows of their rollouts, each W wide."""

    mask: Tensor  # [B, T] the model tokens
    places: Tensor  # [B, T] where each of them stands in its rollout's row
    previous: Tensor  # [B, T] and where the one before it on its way from the root stands; -1: none
    rollout: Tensor  # [B] the rollout of each row
    first: Tensor  # [R] the first row of each rollout
    last: Tensor  # [R] its last row
    branched: Tensor  # [R] bool: a rollout of its group has branches

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> RolloutRows | None:
        """From inputs with boolean masks; None where every rollout is one row."""
        samples, branches, mask = inputs.samples, inputs.branches, inputs.response_mask
        if samples is None or branches is None or not bool((branches > 0).any()):
            return None
        order = branches.argsort(stable=True)
        for key in (samples, inputs.groups):
            order = order[key[order].argsort(stable=True)]
        names = torch.stack([inputs.groups[order], samples[order]])
        begins = torch.ones_like(order, dtype=torch.bool)
        begins[1:] = (names[:, 1:] != names[:, :-1]).any(0)
        ends = begins.roll(-1)
        number = begins.cumsum(0) - 1  # of the rollout, in this order
        counts = mask.sum(-1)[order]
        before = counts.cumsum(0) - counts
        rollout, start = torch.empty_like(order), torch.empty_like(order)
        rollout[order], start[order] = number, before - before[begins][number]
        branched = torch.isin(inputs.groups, inputs.groups[branches > 0])
        layout = Compact.of(mask)
        columns = torch.arange(mask.shape[1], device=mask.device)
        places = torch.where(branched.unsqueeze(-1), start.unsqueeze(-1) + layout.index, columns)
        return cls(
            mask=mask,
            places=places,
            previous=_previous(inputs, layout, places, _parents(inputs, branches, rollout, order)),
            rollout=rollout,
            first=order[begins],
            last=order[ends],
            branched=branched[order[begins]],
        )

    def merged(self, inputs: AdvantageInputs) -> MergedInputs:
        """The inputs with a row for each rollout."""
        given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        tokens = {
            name: self._joined(tensor) for name, tensor in given.items() if tensor is not None and tensor.dim() == 2
        }
        ungrouped = dict.fromkeys(("samples", "branches", "parents", "forks"))
        merged = MergedInputs(
            **{**given, **tokens, **ungrouped, "groups": inputs.groups[self.first]},
            branched=self.branched,
            previous=self._joined(self.previous),
        )
        if inputs.greedy_returns is not None:
            merged = replace(merged, greedy_returns=inputs.greedy_returns[self.first])
        if inputs.bootstrap_values is not None:
            merged = replace(merged, bootstrap_values=inputs.bootstrap_values[self.last])
        if inputs.trajectory_energy is not None:
            # Of a sum of gradients, their sequences' taken as orthogonal.
            energy = inputs.trajectory_energy
            merged = replace(
                merged, trajectory_energy=energy.new_zeros(len(self.first)).index_add_(0, self.rollout, energy)
            )
        return merged

    def split(self, made: Advantages) -> Advantages:
        """From results for rollouts [R, W] to results for the rows [B, T]."""
        return Advantages(
            advantages=self._apart(made.advantages),
            returns=self._apart(made.returns),
            baselines=self._apart(made.baselines),
        )

    def _joined(self, tensor: Tensor) -> Tensor:
        places, mask = self.places[self.mask], self.mask
        joined = tensor.new_zeros(len(self.first), int(places.max()) + 1)
        joined[self.rollout.unsqueeze(-1).expand_as(mask)[mask], places] = tensor[mask]
        return joined

    def _apart(self, tensor: Tensor) -> Tensor:
        places = self.places.clamp(max=tensor.shape[1] - 1)
        return tensor[self.rollout].gather(-1, places).masked_fill_(~self.mask, 0.0)


def _parents(inputs: AdvantageInputs, branches: Tensor, rollout: Tensor, order: Tensor) -> Tensor:
    """[B] the row that each row forks from; -1: none. ``order`` sorts the rows by rollout and branch."""
    if inputs.parents is None or inputs.forks is None:
        return torch.full_like(branches, -1)
    spread = int(branches.max()) + 1
    sorted_keys = (rollout * spread + branches)[order]
    wanted = rollout * spread + inputs.parents
    found = torch.searchsorted(sorted_keys, wanted).clamp_(max=len(order) - 1)
    forked = (inputs.parents >= 0) & (inputs.forks > 0) & (sorted_keys[found] == wanted)
    return torch.where(forked, order[found], -1)


def _previous(inputs: AdvantageInputs, layout: Compact, places: Tensor, parents: Tensor) -> Tensor:
    """[B, T] the place of the model token before each one: in its row, or for a row's first where its parent forks."""
    index = layout.index - 1
    source = layout.position.gather(-1, index.clamp(min=0))
    previous = places.gather(-1, source).masked_fill_(index < 0, -1)
    (rows,) = (parents >= 0).nonzero(as_tuple=True)
    if len(rows) and inputs.forks is not None:
        fork = layout.position[parents[rows], inputs.forks[rows] - 1]
        previous[rows, layout.position[rows, 0]] = places[parents[rows], fork]
    return previous
