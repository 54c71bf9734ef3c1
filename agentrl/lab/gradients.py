"""Exact parameter gradients of groups, sum_t A_t grad_theta ln p(y_t), and inner products of these gradients.

The gradients of single trajectories, the scores s_i = sum_t rho_t grad ln p(y_it), are kept in memory, one for each
distinct trajectory. If the advantages are constant over each trajectory, the gradient of a group is a combination of
scores, and all inner products follow from the Gram matrix of the scores. Otherwise a group takes one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import SettingsError
from agentrl.kernels.attention import pack_padded
from agentrl.lab.sample import ProblemSample
from agentrl.models.policy import PolicyModel


@dataclass(frozen=True, kw_only=True)
class GroupProducts:
    """Inner products of the gradients g_m of M disjoint groups of a problem with S trajectories. float64."""

    with_scores: Tensor  # [M, S] <g_m, s_i>
    squared: Tensor  # [M] ||g_m||^2
    sum_squared: Tensor  # [] ||sum_m g_m||^2

    @property
    def variance(self) -> float:
        """Variance of one group's gradient, summed over parameters. Unbiased."""
        count = len(self.squared)
        return float(self.squared.sum() - self.sum_squared / count) / (count - 1)

    @property
    def mean_squared(self) -> float:
        """Squared norm of the expected gradient. Unbiased: the mean of <g_m, g_m'> over m != m'."""
        count = len(self.squared)
        return float(self.sum_squared - self.squared.sum()) / (count * (count - 1))


class Gradients:
    """Gradients [P] of one problem's trajectories. The policy must not change during the lifetime of this object."""

    def __init__(self, policy: PolicyModel, sample: ProblemSample, *, temperature: float, memory: int) -> None:
        """Raises SettingsError if the scores, P numbers for each distinct trajectory, exceed ``memory`` bytes."""
        self._policy = policy
        self._sample = sample
        self._temperature = temperature
        self._parameters = [item for item in policy.parameters() if item.requires_grad]
        self.size = sum(item.numel() for item in self._parameters)
        kind = self._parameters[0].dtype
        # Scores of half-precision parameters are stored in float32, because they are factors of inner products.
        self._dtype = kind if kind == torch.float64 else torch.float32
        distinct, self._distinct_index = sample.alike.unique(return_inverse=True)
        needed = len(distinct) * self.size * self._dtype.itemsize
        if needed > memory:
            raise SettingsError(
                f"the gradients of {len(distinct)} trajectories with {self.size} parameters take "
                f"{needed / 2**30:.1f} GiB, but {memory / 2**30:.1f} GiB are allowed; lower --samples, or use a "
                "smaller model or adapters (model.lora.rank)"
            )
        width = sample.batch.response_mask.shape[1]
        self._scores = torch.empty(len(distinct), self.size, dtype=self._dtype)
        for score, row in zip(self._scores, distinct, strict=True):
            score.copy_(self._backward(row.unsqueeze(0), [torch.ones(1, width)])[0])
        self.gram = (self._scores @ self._scores.T).double()[self._distinct_index][:, self._distinct_index]  # [S, S]

    def products(self, rows: Tensor, advantages: Sequence[Tensor]) -> list[GroupProducts]:
        """Inner products for each A [M, N, T] in ``advantages``, over the groups ``rows`` [M, N].

        The gradient of a group is (1/N) sum_i sum_t A_it rho_it grad ln p_it.
        """
        sums = [_RunningProducts(self.gram) for _ in advantages]
        for group, chosen in enumerate(rows):
            mask = self._sample.batch.response_mask[chosen]
            left: dict[int, Tensor] = {}
            for index, values in enumerate(advantages):
                constant = _constant_by_row(values[group], mask)
                if constant is None:
                    left[index] = values[group] / len(chosen)
                else:
                    sums[index].add_scores(chosen, constant.double() / len(chosen))
            for indices, gradient in self._token_gradients(chosen, left, mask):
                products = self._with_scores(gradient), gradient.square().sum().double()
                for index in indices:
                    sums[index].add(gradient, *products)
        return [item.result(self._with_scores) for item in sums]

    def hidden(self, rows: Tensor) -> Tensor:
        """Hidden states [n, D] of the model tokens of ``rows``, in row-major order."""
        with torch.no_grad():
            _, states = self._forward(rows, keep_hidden=True)
        assert states is not None  # because of keep_hidden
        return states

    def _with_scores(self, gradient: Tensor) -> Tensor:
        """[S] <g, s_i>."""
        return (self._scores @ gradient).double()[self._distinct_index]

    def _token_gradients(
        self, rows: Tensor, advantages: dict[int, Tensor], mask: Tensor
    ) -> list[tuple[list[int], Tensor]]:
        """Pairs of (keys of ``advantages`` with equal values, their gradient)."""
        # Estimators often agree on a group; equal advantages share a backward pass.
        different: list[tuple[list[int], Tensor]] = []
        for index, values in advantages.items():
            masked = values.masked_fill(~mask, 0.0)
            same = next((indices for indices, other in different if torch.equal(masked, other)), None)
            if same is None:
                different.append(([index], masked))
            else:
                same.append(index)
        gradients = self._backward(rows, [values for _, values in different]) if different else []
        return [(indices, gradient) for (indices, _), gradient in zip(different, gradients, strict=True)]

    def _forward(self, rows: Tensor, *, keep_hidden: bool) -> tuple[Tensor, Tensor | None]:
        batch = self._sample.batch
        packed = pack_padded(batch.input_ids[rows], batch.prompt_lengths[rows], batch.response_mask[rows])
        statistics, hidden = self._policy(*packed, self._temperature, keep_hidden)
        return statistics.log_probs, hidden

    def _backward(self, rows: Tensor, advantages: Sequence[Tensor]) -> list[Tensor]:
        """Gradients for each of ``advantages``: one forward pass over the distinct rows, one backward pass each."""
        distinct, inverse = self._sample.alike[rows].unique(return_inverse=True)
        mask = self._sample.batch.response_mask[distinct]
        log_probs, _ = self._forward(distinct, keep_hidden=False)
        ratios = self._sample.importance_weights
        results = []
        for number, values in enumerate(advantages):
            weighted = values if ratios is None else values * ratios[rows]
            weights = weighted.new_zeros(mask.shape).index_add_(0, inverse, weighted)[mask].to(log_probs.dtype)
            # All backward passes share one forward pass, and only the last one may free its graph.
            last = number == len(advantages) - 1
            parts = torch.autograd.grad(log_probs, self._parameters, weights, retain_graph=not last)
            results.append(torch.cat([part.flatten().to(self._dtype) for part in parts]))
        return results


class _RunningProducts:
    """Accumulates the products of groups, each added as a vector or as coefficients of scores."""

    def __init__(self, gram: Tensor) -> None:
        self._gram = gram
        self._with_scores: list[Tensor] = []
        self._squared: list[Tensor] = []
        self._coefficients = torch.zeros(len(gram), dtype=torch.float64)
        self._vector: Tensor | None = None

    def add_scores(self, rows: Tensor, coefficients: Tensor) -> None:
        vector = torch.zeros_like(self._coefficients)
        vector[rows] = coefficients
        self._coefficients += vector
        self._with_scores.append(self._gram @ vector)
        self._squared.append(vector @ self._with_scores[-1])

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
    """The value [N] of each row if ``values`` [N, T] are constant over the model tokens of every row, else None."""
    high = torch.where(mask, values, -torch.inf).amax(-1)
    low = torch.where(mask, values, torch.inf).amin(-1)
    return high if torch.equal(high, low) else None
