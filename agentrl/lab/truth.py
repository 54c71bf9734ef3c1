"""Unbiased inner products with the true gradient of a problem, which itself is never computed.

The true gradient is g* = Cov(R, s), with the score s and the return R of a trajectory: the expectation of REINFORCE
with the mean of the other trajectories as baseline. A product of two covariances is a mean over four different
trajectories (i, j, k, l) of

    (R_i - R_j) (R_k - R_l) <s_i, s_k>

and needs only inner products of scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 4
"""Minimum number of trajectories for a product of two covariances."""


def covariance_product(returns: Tensor, products: Tensor) -> Tensor:
    """Unbiased <Cov(R, a), Cov(R, b)> [...] from n independent trajectories, with R [n] and <a_i, b_k> [..., n, n].

    Closed form of the mean over all different i, j, k, l. Products of the form y_i z_k give the product of two scalar
    covariances.

    >>> covariance_product(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.ones(4, 4)).item()
    0.0
    """
    count = len(returns)
    if count < LEAST:
        raise ValueError(f"{count} trajectories: a product of two covariances needs at least {LEAST}")
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
    """Coefficients [S] of the scores s_i in (1/n) sum_i (R_i - mean of the other returns) s_i over ``rows`` [n]."""
    rewards = returns[rows].double()
    coefficients = torch.zeros(len(returns), dtype=torch.float64)
    coefficients[rows] = (rewards - rewards.mean()) / (len(rows) - 1)
    return coefficients


class TrueGradient:
    """Inner products of group gradients with the true gradient."""

    def __init__(self, returns: Tensor, gram: Tensor) -> None:
        """``returns`` [S]; ``gram`` [S, S], the Gram matrix of the scores."""
        self._returns = returns.double()
        self._gram = gram
        self.squared = float(covariance_product(self._returns, gram))  # ||g*||^2

    def along(self, rows: Tensor, with_scores: Tensor) -> tuple[Tensor, float]:
        """Mean of <g_m, g*> over the groups ``rows`` [M, N], from <g_m, s_i> [E, M, S].

        Returns it for each estimator [E], and for the leave-one-out gradient. All trajectories together give a more
        precise value of the latter, so its error on these groups corrects the errors of the estimators.
        """
        same = torch.stack([leave_one_out(self._returns, group) for group in rows]) @ self._gram  # [M, S]
        outside = torch.stack([leave_one_out(self._returns, self._others(group)) for group in rows])
        return (with_scores * outside).sum(-1).mean(-1), float((same * outside).sum(-1).mean())

    def along_moments(self, rows: Tensor, with_scores: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (Var <g, g*>, <E g, g*>^2), each [E], from <g_m, s_i> [E, M, S] of E estimators.

        Returns None if too few trajectories are outside two groups.
        """
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
        """Unbiased <a, g*> <b, g*> from <a, s_i> and <b, s_i> [E, S]. Uses trajectories that are in neither a nor b."""
        outside = self._others(without)
        products = first[:, outside, None] * second[:, None, outside]
        return covariance_product(self._returns[outside], products)

    def _others(self, rows: Tensor) -> Tensor:
        """Indices of the trajectories that are not in ``rows``."""
        kept = torch.ones(len(self._returns), dtype=torch.bool)
        kept[rows] = False
        return kept.nonzero().squeeze(-1)
