"""Estimates of the best number of branches after each turn, from earlier forks (docs/reference/formulas.md 10).

A rollout costs ``c1`` tokens up to a fork and ``c2`` tokens after it. The variance of its reward among the rollouts of
a problem is ``v_before + v_after``, where ``v_after`` is the variance that remains once the history up to the fork is
known. For a given number of tokens, the mean reward has the smallest variance with ``sqrt(c1 / c2 * v_after /
v_before)`` branches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from agentrl.rollout.settings import UNMEASURED_WIDTH
from agentrl.trajectory import Trajectory

# The best number of branches after a turn is estimated only if the turn's forks and trees each have at least this
# total weight. Weights decay with age.
_MIN_EVIDENCE: Final = 8.0


class ForkStatistics:
    """Decayed sums over forks, by turn. Every training step multiplies the weight of earlier forks by ``decay``.

    The estimated best numbers of branches depend on earlier steps only, so the gradient estimate stays unbiased.
    """

    def __init__(self, *, decay: float) -> None:
        self._decay = decay
        # Sums for each turn: over forks (weight, v_after, c1, c2) and over trees (weight, v_before + v_after).
        self._sums: list[list[float]] = []

    def add_step(self, groups: Iterable[Sequence[Sequence[Trajectory]]]) -> None:
        """Add the rollouts of one training step: the branches of each rollout, for each group."""
        self._sums = [[value * self._decay for value in sums] for sums in self._sums]
        for group in groups:
            # One list of forks for each tree, because the forks of one tree are not independent.
            trees = [list(_find_forks(branches)) for branches in group]
            for turn in sorted({fork.turn for tree in trees for fork in tree}):
                self._add_forks(turn, [[fork for fork in tree if fork.turn == turn] for tree in trees])

    def best_widths(self, most: int) -> tuple[int, ...]:
        """Return the estimated best number of branches after each turn, at most ``most``.

        After a turn with too few earlier forks, rollouts fork into two branches to measure the turn.
        """
        return tuple(self._best_width(sums, most) for sums in self._sums)

    def state_dict(self) -> list[list[float]]:
        """Return a JSON-serializable state, for `load_state_dict`."""
        return [list(sums) for sums in self._sums]

    def load_state_dict(self, state: list[list[float]]) -> None:
        self._sums = [list(sums) for sums in state]

    def _add_forks(self, turn: int, trees: Sequence[Sequence[_Fork]]) -> None:
        self._sums += [[0.0] * 6 for _ in range(turn - len(self._sums))]
        added = [
            (fork.weight, *(fork.weight * value for value in (fork.variance, fork.before, fork.after)))
            for tree in trees
            for fork in tree
        ]
        roots = [tuple(_weighted_mean(tree, name) for name in ("mean", "square")) for tree in trees if tree]
        total = (float(len(roots)), len(roots) * single_sample_variance(roots)) if len(roots) > 1 else (0.0, 0.0)
        evidence = (*map(math.fsum, zip(*added, strict=True)), *total)
        self._sums[turn - 1] = [old + new for old, new in zip(self._sums[turn - 1], evidence, strict=True)]

    def _best_width(self, sums: Sequence[float], most: int) -> int:
        weight, spread, before, after, trees, total = sums
        if min(weight, trees) < _MIN_EVIDENCE:
            return min(UNMEASURED_WIDTH, most)
        v_after = spread / weight
        v_before = total / trees - v_after
        if v_after <= 0:
            return 1
        # The estimate of v_before can be negative. Then all variance is assumed to arise after the fork.
        best = math.sqrt(before / after * v_after / v_before) if v_before > 0 else math.inf
        return most if best > most else max(1, round(best))


def single_sample_variance(means_and_squares: Sequence[tuple[float, ...]]) -> float:
    """Return an unbiased estimate of the variance, from the mean and mean square of each independent set of samples.

    >>> single_sample_variance([(1.0, 1.0), (0.0, 0.0)]), single_sample_variance([(0.5, 0.5), (0.5, 0.5)])
    (0.5, 0.25)
    """
    count = len(means_and_squares)
    total = math.fsum(mean for mean, _ in means_and_squares)
    products = total**2 - math.fsum(mean**2 for mean, _ in means_and_squares)
    return math.fsum(square for _, square in means_and_squares) / count - products / (count * (count - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fork:
    turn: int
    weight: float
    before: float  # tokens of the response up to the fork
    after: float  # mean number of tokens after the fork
    mean: float  # mean reward of the paths below the fork
    square: float
    variance: float  # variance of the rewards of the paths below the fork


def _find_forks(branches: Sequence[Trajectory]) -> Iterator[_Fork]:
    """Yield the forks of a rollout that have at least two branches. ``branches``: all branches, parents first."""
    turns, tokens = {-1: 0}, {-1: 0}
    for item in branches:
        turns[item.branch] = turns[item.parent] + item.turns
        tokens[item.branch] = tokens[item.parent] + item.length - len(item.prompt_ids)
    # Per branch: mean and mean square of the reward below it, and mean number of tokens on the paths through it.
    below: dict[int, tuple[float, float, float]] = {}
    children: dict[int, list[int]] = {}
    for item in branches:
        children.setdefault(item.parent, []).append(item.branch)
    for item in reversed(branches):
        parts = [below[child] for child in children.get(item.branch, ())]
        if not parts:
            below[item.branch] = item.reward, item.reward**2, tokens[item.branch]
            continue
        mean, square, length = (math.fsum(values) / len(parts) for values in zip(*parts, strict=True))
        below[item.branch] = mean, square, length
        if len(parts) > 1:
            yield _Fork(
                turn=turns[item.branch],
                weight=item.rollout_fraction,
                before=tokens[item.branch],
                after=length - tokens[item.branch],
                mean=mean,
                square=square,
                variance=single_sample_variance([part[:2] for part in parts]),
            )


def _weighted_mean(forks: Sequence[_Fork], name: str) -> float:
    return math.fsum(fork.weight * getattr(fork, name) for fork in forks) / math.fsum(fork.weight for fork in forks)
