"""The true gradient of a problem, never seen itself: unbiased products with it, from trajectories that are independent.

g* = Cov(R, s), s the score of a trajectory and R its return: what REINFORCE with the mean of the others as baseline
expects. A product of two covariances is a mean over four different trajectories (i, j, k, l) of

    (R_i - R_j) (R_k - R_l) <s_i, s_k>

which needs the products of scores alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 4
"""Trajectories that a product of two covariances needs."""


def covariance_product(returns: Tensor, products: Tensor) -> Tensor:
    """Unbiased for <Cov(R, a), Cov(R, b)> from n independent trajectories: [...] from R [n] and <a_i, b_k> [..., n, n].

    The mean over all different i, j, k, l, in closed form. With one trajectory's score times a vector, products of the
    form y_i z_k, it is the product of two covariances of numbers.

    >>> covariance_product(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.ones(4, 4)).item()
    0.0
    """
    count = len(returns)
    if count < LEAST:
        raise ValueError(f"{count} trajectories: a product of two covariances needs {LEAST}")
    rewards = returns.double()
    cross = products.double() * (1 - torch.eye(count, dtype=torch.float64))
    total, squares = rewards.sum(), rewards.square().sum()
    pair = rewards[:, None] + rewards
    both = (cross * (rewards[:, None] * rewards)).sum((-2, -1))
    one = (cross * (pair * (total - pair))).sum((-2, -1))
    others = (total - pair).square() - (squares - rewards.square()[:, None] - rewards.square())
    none = (cross * others).sum((-2, -1))
    pairs = count * (count - 1)
    return both / pairs - one / (pairs * (count - 2)) + none / (pairs * (count - 2) * (count - 3))


def leave_one_out(returns: Tensor, rows: Tensor) -> Tensor:
    """Coefficients [S] of the scores in (1/n) sum_i (R_i - mean of the others) s_i over ``rows`` [n]."""
    own = returns[rows].double()
    coefficients = torch.zeros(len(returns), dtype=torch.float64)
    coefficients[rows] = (own - own.mean()) / (len(rows) - 1)
    return coefficients


class TrueGradient:
    """Products of group gradients with the true one."""

    def __init__(self, returns: Tensor, gram: Tensor) -> None:
        """returns [S], gram [S, S] of the scores."""
        self._returns = returns.double()
        self._gram = gram
        self.squared = float(covariance_product(self._returns, gram))  # ||g*||^2

    def along(self, rows: Tensor, with_scores: Tensor) -> tuple[Tensor, float]:
        """(mean of <g_m, g*> over groups ``rows`` [M, N], [E] of E estimators from <g_m, s_i> [E, M, S]; the same of
        the leave-one-out gradient, which is known better from all trajectories: its error tells of the others')."""
        same = torch.stack([leave_one_out(self._returns, group) for group in rows]) @ self._gram  # [M, S]
        outside = torch.stack([leave_one_out(self._returns, self._others(group)) for group in rows])
        return (with_scores * outside).sum(-1).mean(-1), float((same * outside).sum(-1).mean())

    def along_moments(self, rows: Tensor, with_scores: Tensor) -> tuple[Tensor, Tensor] | None:
        """(Var <g, g*>, <E g, g*>^2), each [E], of E estimators at once, from <g_m, s_i> [E, M, S]; None if too few
        trajectories are outside of two groups."""
        count = len(rows)
        if len(self._returns) - 2 * rows.shape[1] < LEAST:
            return None
        squares = [self._product(with_scores[:, m], with_scores[:, m], rows[m]) for m in range(count)]
        pairs = [
            self._product(with_scores[:, m], with_scores[:, other], torch.cat([rows[m], rows[other]]))
            for m in range(count)
            for other in range(m)
        ]
        apart = torch.stack(pairs).mean(0)
        return torch.stack(squares).mean(0) - apart, apart

    def _product(self, first: Tensor, second: Tensor, without: Tensor) -> Tensor:
        """Unbiased for <a, g*> <b, g*> from <a, s_i> and <b, s_i> [E, S] of trajectories that a and b do not hold."""
        outside = self._others(without)
        products = first[:, outside, None] * second[:, None, outside]
        return covariance_product(self._returns[outside], products)

    def _others(self, rows: Tensor) -> Tensor:
        """The trajectories that are not among ``rows``."""
        kept = torch.ones(len(self._returns), dtype=torch.bool)
        kept[rows] = False
        return kept.nonzero().squeeze(-1)
