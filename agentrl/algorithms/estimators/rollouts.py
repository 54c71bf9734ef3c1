"""Rollouts of several sequences, as one row each: what every estimator sees where an agent's history branched.

A rollout is one episode, whatever the contexts of its turns. Its row holds the model tokens of its sequences one after
the other, so sums and means over a group count every rollout once, a return is the rollout's, and the compact index of
a token-level baseline counts the tokens that the rollout sampled. No token stands in two sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from agentrl.algorithms.estimators.segments import Compact
from agentrl.algorithms.records import AdvantageInputs, Advantages


@dataclass(frozen=True)
class RolloutRows:
    """Where the model tokens of B rows stand in the R rows of their rollouts, each up to W tokens long."""

    layout: Compact
    rollout: Tensor  # [B] the rollout of each row
    start: Tensor  # [B] model tokens of the rollout before the row's own
    first: Tensor  # [R] the first row of each rollout
    last: Tensor  # [R] its last row
    width: int  # W

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> RolloutRows | None:
        """From inputs with boolean masks; None where every rollout is one row."""
        samples, branches = inputs.samples, inputs.branches
        if samples is None or branches is None or not bool((branches > 0).any()):
            return None
        order = branches.argsort(stable=True)
        for key in (samples, inputs.groups):
            order = order[key[order].argsort(stable=True)]
        names = torch.stack([inputs.groups[order], samples[order]])
        begins = torch.ones_like(order, dtype=torch.bool)
        begins[1:] = (names[:, 1:] != names[:, :-1]).any(0)
        number = begins.cumsum(0) - 1  # of the rollout, in this order
        counts = inputs.response_mask.sum(-1)[order]
        before = counts.cumsum(0) - counts
        rollout, start = torch.empty_like(order), torch.empty_like(order)
        rollout[order], start[order] = number, before - before[begins][number]
        ends = torch.ones_like(begins)
        ends[:-1] = begins[1:]
        totals = torch.zeros_like(before[begins]).index_add_(0, number, counts)
        return cls(Compact.of(inputs.response_mask), rollout, start, order[begins], order[ends], int(totals.max()))

    def merged(self, inputs: AdvantageInputs) -> AdvantageInputs:
        """The inputs with a row for each rollout."""
        tokens = {
            field.name: self._joined(getattr(inputs, field.name))
            for field in fields(inputs)
            if getattr(inputs, field.name) is not None and getattr(inputs, field.name).dim() == 2
        }
        merged = replace(inputs, **tokens, groups=inputs.groups[self.first], samples=None, branches=None)
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

    def _places(self) -> Tensor:
        """[B, K] where a row's model tokens stand in its rollout's row."""
        return self.start.unsqueeze(-1) + torch.arange(self.layout.valid.shape[1], device=self.start.device)

    def _joined(self, tensor: Tensor) -> Tensor:
        valid = self.layout.valid
        joined = tensor.new_zeros(len(self.first), self.width)
        rollout = self.rollout.unsqueeze(-1).expand_as(valid)
        joined[rollout[valid], self._places()[valid]] = self.layout.gather(tensor)[valid]
        return joined

    def _apart(self, tensor: Tensor) -> Tensor:
        places = self._places().clamp(max=self.width - 1)
        return self.layout.scatter(tensor[self.rollout].gather(-1, places))
