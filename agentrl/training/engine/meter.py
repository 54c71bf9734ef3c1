"""Averages, totals and extremes of a step, over its micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from agentrl.training.engine.deepspeed_engine import TrainingEngine

Number = Tensor | float


class Meter:
    """Sums of one rank; :meth:`reduce` gives what holds for all.

    Every rank must add the same names in a step; a dummy micro-batch adds them with weight 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._negated: set[str] = set()  # of those the smallest

    def mean(self, name: str, value: Number, weight: Number) -> None:
        """``value`` is a mean over ``weight`` items: tokens, trajectories or updates."""
        weight = self._number(weight)
        self._add(self._sums, name, torch.where(weight > 0, self._number(value), 0.0) * weight)
        self._add(self._weights, name, weight)

    def total(self, name: str, value: Number) -> None:
        """``value`` is this part of a sum."""
        self._add(self._sums, name, self._number(value))

    def largest(self, name: str, value: Number, weight: Number = 1.0) -> None:
        """Keep the largest value of those with a weight above 0."""
        nothing = self._number(-math.inf)
        value = torch.where(self._number(weight) > 0, self._number(value), nothing)
        self._largest[name] = torch.maximum(self._largest.get(name, nothing), value)

    def smallest(self, name: str, value: Number, weight: Number = 1.0) -> None:
        """Keep the smallest value of those with a weight above 0."""
        self._negated.add(name)
        self.largest(name, -value, weight)

    def mean_of(self, name: str, engine: TrainingEngine[nn.Module]) -> float:
        """One mean so far, over all ranks; 0 if nothing weighs. Collective."""
        pair = torch.stack([self._sums[name], self._weights[name]])
        total, weight = engine.all_reduce(pair).tolist()
        return float(total / weight) if weight else 0.0

    def weight_of(self, name: str, engine: TrainingEngine[nn.Module]) -> float:
        """Return the total weight of one mean so far, over all ranks. Collective."""
        return float(engine.all_reduce(self._weights[name].clone()))

    def largest_of(self, name: str, engine: TrainingEngine[nn.Module]) -> float:
        """One maximum so far, over all ranks; 0 if nothing weighs. Collective."""
        value = float(engine.all_reduce_largest(self._largest[name].clone()))
        return 0.0 if value == -math.inf else value

    def reduce(self, engine: TrainingEngine[nn.Module]) -> dict[str, float]:
        """Everything over all ranks; a mean of nothing and an extreme of nothing are left out. Collective."""
        sums = self._reduced(self._sums, engine.all_reduce)
        weights = self._reduced(self._weights, engine.all_reduce)
        largest = self._reduced(self._largest, engine.all_reduce_largest)
        means = {name: sums[name] / weight for name, weight in weights.items() if weight}
        totals = {name: value for name, value in sums.items() if name not in weights}
        names = sorted((name for name in largest if math.isfinite(largest[name])), key=self._negated.__contains__)
        return totals | means | {name: -largest[name] if name in self._negated else largest[name] for name in names}

    def _reduced(self, values: dict[str, Tensor], reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        if not (names := sorted(values)):
            return {}
        return dict(zip(names, reduce(torch.stack([values[name] for name in names])).tolist(), strict=True))

    def _add(self, into: dict[str, Tensor], name: str, value: Tensor) -> None:
        into[name] = into[name] + value if name in into else value

    def _number(self, value: Number) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=self._device)
