"""The number of rollouts of each problem in a step (docs/reference/formulas.md 9).

Every problem has the same weight in the gradient, so a problem with ``n`` rollouts contributes the variance ``V / n``.
Sizes depend on earlier steps only. Therefore the gradient estimate stays unbiased if each problem's mean is weighted
equally. :attr:`.Trajectory.problem_weight` ensures equal weights.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Final

from agentrl.problems.posterior import Posteriors, reward_as_success_fraction
from agentrl.rollout.settings import Budget
from agentrl.trajectory import Trajectory

# Minimum size of a group with a baseline.
MIN_GROUP_SIZE: Final = 2


def allocate_group_sizes(scores: Sequence[float], total: int, *, most: int) -> list[int]:
    """Return the group sizes ``n`` that minimize ``sum(score**2 / n)``, with ``sum(n) = total`` and 2 <= n <= ``most``.

    Without the bounds and rounding, sizes are proportional to the scores. Sizes of equal scores differ by at most 1.

    >>> allocate_group_sizes([1.0, 3.0, 0.0], 16, most=10)
    [4, 10, 2]
    """
    # The sum is convex and separable, so it is optimal to give each further rollout to the problem with the largest
    # decrease.
    sizes = [MIN_GROUP_SIZE] * len(scores)
    decreases = [
        (-_variance_decrease(score, MIN_GROUP_SIZE), MIN_GROUP_SIZE, number) for number, score in enumerate(scores)
    ]
    heapq.heapify(decreases)
    for _ in range(total - MIN_GROUP_SIZE * len(scores)):
        _, size, number = heapq.heappop(decreases)
        sizes[number] = size + 1
        if size + 1 < most:
            heapq.heappush(decreases, (-_variance_decrease(scores[number], size + 1), size + 1, number))
    return sizes


def _variance_decrease(score: float, size: int) -> float:
    """Return the decrease of ``score**2 / size`` when one rollout is added."""
    return score**2 / (size * (size + 1))


def _expected_gradient_std(posteriors: Posteriors, key: str) -> float:
    return math.sqrt(expected_gradient_variance(posteriors, key))


def _success_variance(posteriors: Posteriors, key: str) -> float:
    success = posteriors.expected_success(key)
    return success * (1 - success)


SCORES: Final[dict[Budget, Callable[[Posteriors, str], float]]] = {
    "neyman": _expected_gradient_std,
    "variance": _success_variance,
}
"""Functions that compute a problem's score from the posteriors and the problem's key, by budget except uniform."""


def expected_gradient_variance(posteriors: Posteriors, key: str) -> float:
    """Return the expected variance ``E[W] p (1 - p)`` of one rollout's gradient with respect to the logits."""
    success = posteriors.expected_success(key)
    return posteriors.expected_energy(key) * success * (1 - success)


def expected_energy(branches: Sequence[Trajectory]) -> float:
    """Return ``sum(1 - p)`` over the sampled tokens of a rollout.

    For a forked rollout, this is the weighted mean of the sums over its paths. The expectation of the result is the
    expected energy of the rollout, because for every token ``E[1 - p] = 1 - sum(p^2) = E[1 - 2 p + sum(p^2)]``.
    """
    # The weight of a branch is the sum of the weights of the paths through it.
    return -math.fsum(
        item.rollout_fraction * math.expm1(value)
        for item in branches
        for part in item.segments
        for value in part.log_probs
    )


def success_fraction(branches: Sequence[Trajectory]) -> float:
    """Return a rollout's reward as a fraction of a success; for a forked rollout, the weighted mean over its paths."""
    return math.fsum(
        item.rollout_fraction * reward_as_success_fraction(item.reward) for item in branches if item.receives_reward
    )
