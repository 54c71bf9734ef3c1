"""Exact parameter gradients of groups, sum_t A_t grad_theta ln p(y_t) over their rows, and the inner products of these.

One gradient a trajectory is kept, its score s_i = sum_t rho_t grad ln p(y_it); those of trajectories that are alike are
one. A gradient whose advantages are the same at every token of a trajectory is a combination of scores: all that is
asked about it follows from the Gram matrix of the scores, at no cost. Only the others take a backward pass, one a
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import SettingsError
from agentrl.lab.sample import ProblemSample
from agentrl.models.policy import PolicyModel


@dataclass(frozen=True, kw_only=True)
class GroupProducts:
    """What inner products say of the gradients g_m of M disjoint groups of a problem's S trajectories. float64."""

    with_scores: Tensor  # [M, S] <g_m, s_i>
    squared: Tensor  # [M] ||g_m||^2
    sum_squared: Tensor  # [] ||sum_m g_m||^2

    @property
    def variance(self) -> float:
        """Of one group's gradient, the sum over parameters, without bias."""
        count = len(self.squared)
        return float(self.squared.sum() - self.sum_squared / count) / (count - 1)

    @property
    def mean_squared(self) -> float:
        """The squared norm of the expectation, without bias: the mean of <g_m, g_m'> over m != m'."""
        count = len(self.squared)
        return float(self.sum_squared - self.squared.sum()) / (count * (count - 1))


class Gradients:
    """Gradients [P] of one problem's trajectories. The policy must not change while this lives."""

    def __init__(self, policy: PolicyModel, sample: ProblemSample, *, temperature: float, memory: int) -> None:
        """Raises SettingsError if the scores, one of P numbers a trajectory, need more than ``memory`` bytes."""
        self._policy = policy
        self._sample = sample
        self._temperature = temperature
        self._parameters = [item for item in policy.parameters() if item.requires_grad]
        self.size = sum(item.numel() for item in self._parameters)
        kind = self._parameters[0].dtype
        self._dtype = kind if kind == torch.float64 else torch.float32
        distinct, self._place = sample.alike.unique(return_inverse=True)
        needed = len(distinct) * self.size * self._dtype.itemsize
        if needed > memory:
            raise SettingsError(
                f"{len(distinct)} trajectories of a problem and {self.size} parameters: their gradients take "
                f"{needed / 2**30:.1f} GiB, of which {memory / 2**30:.1f} are allowed; lower --samples, or take a "
                "smaller model or adapters (model.lora.rank)"
            )
        width = sample.batch.response_mask.shape[1]
        self._scores = torch.empty(len(distinct), self.size, dtype=self._dtype)
        for score, row in zip(self._scores, distinct, strict=True):
            score.copy_(self._backward(row.unsqueeze(0), [torch.ones(1, width)])[0])
        self.gram = (self._scores @ self._scores.T).double()[self._place][:, self._place]  # [S, S]

    def products(self, rows: Tensor, advantages: Sequence[Tensor]) -> list[GroupProducts]:
        """For each A [M, N, T] of ``advantages``: of the gradients (1/N) sum_i sum_t A_it rho_it grad ln p_it over the
        groups ``rows`` [M, N]."""
        sums = [_RunningProducts(self.gram) for _ in advantages]
        for group, chosen in enumerate(rows):
            mask = self._sample.batch.response_mask[chosen]
            left: dict[int, Tensor] = {}
            for place, values in enumerate(advantages):
                constant = _constant_by_row(values[group], mask)
                if constant is None:
                    left[place] = values[group] / len(chosen)
                else:
                    sums[place].add_scores(chosen, constant.double() / len(chosen))
            for places, gradient in self._token_gradients(chosen, left, mask):
                products = self._with_scores(gradient), gradient.square().sum().double()
                for place in places:
                    sums[place].add(gradient, *products)
        return [item.result(self._with_scores) for item in sums]

    def hidden(self, rows: Tensor) -> Tensor:
        """States [n, D] of the model tokens of ``rows`` in row-major order."""
        with torch.no_grad():
            _, states = self._forward(rows, keep_hidden=True)
        assert states is not None  # asked for
        return states

    def _with_scores(self, gradient: Tensor) -> Tensor:
        """[S] <g, s_i>."""
        return (self._scores @ gradient).double()[self._place]

    def _token_gradients(
        self, rows: Tensor, advantages: dict[int, Tensor], mask: Tensor
    ) -> list[tuple[list[int], Tensor]]:
        """(the keys of equal A, their gradient): estimators often agree on a group."""
        different: list[tuple[list[int], Tensor]] = []
        for place, values in advantages.items():
            own = values.masked_fill(~mask, 0.0)
            same = next((places for places, other in different if torch.equal(own, other)), None)
            if same is None:
                different.append(([place], own))
            else:
                same.append(place)
        found = self._backward(rows, [values for _, values in different]) if different else []
        return [(places, gradient) for (places, _), gradient in zip(different, found, strict=True)]

    def _forward(self, rows: Tensor, *, keep_hidden: bool) -> tuple[Tensor, Tensor | None]:
        batch = self._sample.batch
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
        """One forward of the rows that differ, one backward for each A."""
        distinct, place = self._sample.alike[rows].unique(return_inverse=True)
        mask = self._sample.batch.response_mask[distinct]
        log_probs, _ = self._forward(distinct, keep_hidden=False)
        ratios = self._sample.importance_weights
        results = []
        for number, values in enumerate(advantages):
            weighted = values if ratios is None else values * ratios[rows]
            weights = weighted.new_zeros(mask.shape).index_add_(0, place, weighted)[mask].to(log_probs.dtype)
            last = number == len(advantages) - 1
            parts = torch.autograd.grad(log_probs, self._parameters, weights, retain_graph=not last)
            results.append(torch.cat([part.flatten().to(self._dtype) for part in parts]))
        return results


class _RunningProducts:
    """The products of groups that come one by one, each as a vector or as coefficients of scores."""

    def __init__(self, gram: Tensor) -> None:
        self._gram = gram
        self._with_scores: list[Tensor] = []
        self._squared: list[Tensor] = []
        self._coefficients = torch.zeros(len(gram), dtype=torch.float64)
        self._vector: Tensor | None = None

    def add_scores(self, rows: Tensor, coefficients: Tensor) -> None:
        own = torch.zeros_like(self._coefficients)
        own[rows] = coefficients
        self._coefficients += own
        self._with_scores.append(self._gram @ own)
        self._squared.append(own @ self._with_scores[-1])

    def add(self, gradient: Tensor, with_scores: Tensor, squared: Tensor) -> None:
        self._vector = gradient.clone() if self._vector is None else self._vector.add_(gradient)
        self._with_scores.append(with_scores)
        self._squared.append(squared)

    def result(self, with_scores: Callable[[Tensor], Tensor]) -> GroupProducts:
        total = self._coefficients @ self._gram @ self._coefficients
        if self._vector is not None:
            total = total + 2 * (self._coefficients @ with_scores(self._vector))
            total = total + self._vector.square().sum().double()
        return GroupProducts(
            with_scores=torch.stack(self._with_scores), squared=torch.stack(self._squared), sum_squared=total
        )


def _constant_by_row(values: Tensor, mask: Tensor) -> Tensor | None:
    """[N] if the values [N, T] are one number on every row's model tokens, else None."""
    high = torch.where(mask, values, -torch.inf).amax(-1)
    low = torch.where(mask, values, torch.inf).amin(-1)
    return high if torch.equal(high, low) else None
