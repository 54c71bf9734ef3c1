"""Exact parameter gradients of weighed log-probabilities: sum_t A_t grad_theta ln p(y_t) over the rows of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.lab.sample import row_blocks
from agentrl.models.policy import PolicyModel
from agentrl.trajectory import Batch


class Gradients:
    """Gradients [P] of one problem's trajectories. The policy must not change while this lives."""

    def __init__(self, policy: PolicyModel, batch: Batch, *, temperature: float, score_memory: int) -> None:
        """One gradient a trajectory is kept if all fit in ``score_memory`` bytes: then an advantage that is the same at
        every token of a trajectory needs no backward pass."""
        self._policy = policy
        self._batch = batch
        self._temperature = temperature
        self._parameters = [item for item in policy.parameters() if item.requires_grad]
        self.size = sum(item.numel() for item in self._parameters)
        rows = batch.input_ids.shape[0]
        self._scores = None
        if rows * self.size * 4 <= score_memory:
            ones = [[torch.ones(1, batch.response_mask.shape[1])]] * rows
            self._scores = torch.stack([self._backward(torch.tensor([row]), ones[row])[0] for row in range(rows)])

    def weighed(self, rows: Tensor, advantages: Sequence[Tensor]) -> list[Tensor]:
        """For each A [N, T] of ``advantages``: (1/N) sum_i sum_t A_it grad ln p_it over ``rows`` [N], as a vector."""
        mask = self._batch.response_mask[rows]
        results: list[Tensor | None] = [None] * len(advantages)
        if self._scores is not None:
            for place, values in enumerate(advantages):
                constant = _constant_by_row(values, mask)
                if constant is not None:
                    results[place] = constant.to(self._scores.dtype) @ self._scores[rows] / len(rows)
        left = [place for place, found in enumerate(results) if found is None]
        found = self._backward(rows, [advantages[place] for place in left]) if left else []
        for place, gradient in zip(left, found, strict=True):
            results[place] = gradient / len(rows)
        return [item for item in results if item is not None]

    def sum_over_all(self, advantages: Tensor, budget: int) -> Tensor:
        """sum_i sum_t A_it grad ln p_it over every row, for A [S, T], in micro-batches."""
        total = torch.zeros(self.size)
        for block in row_blocks(self._batch, budget):
            rows = torch.arange(block.start, block.stop)
            total += self.weighed(rows, [advantages[block]])[0] * len(rows)
        return total

    def hidden(self, rows: Tensor) -> Tensor:
        """States [n, D] of the model tokens of ``rows`` in row-major order."""
        with torch.no_grad():
            _, states = self._forward(rows, keep_hidden=True)
        return states

    def _forward(self, rows: Tensor, *, keep_hidden: bool) -> tuple[Tensor, Tensor]:
        batch = self._batch
        statistics, hidden = self._policy(
            batch.input_ids[rows],
            batch.prompt_lengths[rows],
            batch.response_ids[rows],
            batch.response_mask[rows],
            self._temperature,
            keep_hidden,
        )
        return statistics.log_probs, hidden

    def _backward(self, rows: Tensor, advantages: Sequence[Tensor]) -> list[Tensor]:
        """One forward of the rows, one backward for each A."""
        mask = self._batch.response_mask[rows]
        log_probs, _ = self._forward(rows, keep_hidden=False)
        results = []
        for place, values in enumerate(advantages):
            weights = values[mask].to(log_probs.dtype)
            if not bool(weights.any()):
                results.append(torch.zeros(self.size))
                continue
            last = place == len(advantages) - 1
            parts = torch.autograd.grad(log_probs, self._parameters, weights, retain_graph=not last)
            results.append(torch.cat([part.flatten().float() for part in parts]))
        return results


def _constant_by_row(values: Tensor, mask: Tensor) -> Tensor | None:
    """[N] if the values [N, T] are one number on every row's model tokens, else None."""
    high = torch.where(mask, values, -torch.inf).amax(-1)
    low = torch.where(mask, values, torch.inf).amin(-1)
    return high if torch.equal(high, low) else None
