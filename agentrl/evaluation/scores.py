"""avg@k with two intervals, pass@k and maj@n, from counts of samples and correct samples per problem.

Dimensions: P problems, n[p] samples of problem p, c[p] correct ones. Infrastructure failures and grader timeouts are
already excluded from n and c. A problem without any sample is excluded from the score and counted.

Two 95 % intervals answer two questions. *This benchmark* refers to the same P problems with new samples, *problems like
these* to new problems from the same distribution. Both are Wilson's score interval with an effective number of samples
``mean (1 - mean) / variance``, so they neither leave [0, 1] nor have zero width at 0 and 1.

``benchmarks/coverage.py`` measures their coverage; ``docs/concepts/grading.md`` summarizes it. With n = 1 the variance
within a problem cannot be estimated and is bounded instead: *this benchmark* then covers more than 95 %, up to 100 %.

maj@n is the correctness of the most frequent answer. Answers are grouped by mathematical equality. Samples without an
answer and excluded samples do not vote. An answer whose comparison times out is grouped only with identical text. Ties
are split evenly, so a problem's score can be a fraction and is never a random draw. All correct answers form one group.
The grader decides which of the other answers are equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentrl_envs.types import Verdict

Floats = NDArray[np.float64]

CONFIDENCE_LEVEL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A 95 % confidence interval within [0, 1]."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """avg@k with both intervals. ``mean`` is the fraction of correct samples, averaged over problems."""

    mean: float
    this_benchmark: Interval
    problems_like_these: Interval
    problems: int
    samples: int
    problems_without_samples: int


def avg_at_k(samples: ArrayLike, correct: ArrayLike) -> Score:
    """Compute avg@k of ``correct`` out of ``samples`` ([P] each).

    Raises ValueError for counts that are negative or above the samples, for unequal shapes, and if no problem has any
    sample.

    >>> score = avg_at_k([8, 8, 8, 0], [8, 4, 0, 0])
    >>> score.mean, score.problems, score.problems_without_samples
    (0.5, 3, 1)
    """
    n, c = check_and_convert_counts(samples, correct)
    kept = n > 0
    if not kept.any():
        raise ValueError("no problem has a sample, so there is no score")
    n_P, c_P = n[kept], c[kept]
    mean = float((c_P / n_P).mean())
    return Score(
        mean=mean,
        this_benchmark=interval_on_this_benchmark(n_P, c_P),
        problems_like_these=_interval_on_problems_like_these(n_P, c_P, mean),
        problems=len(n_P),
        samples=int(n_P.sum()),
        problems_without_samples=int((~kept).sum()),
    )


def pass_at_k(samples: ArrayLike, correct: ArrayLike, k: int) -> float:
    r"""Compute the unbiased pass@k: the mean of ``1 - C(n-c, k) / C(n, k)`` over problems (Chen et al. 2021, eq. 1).

    Raises ValueError if a problem has fewer than ``k`` samples, because no unbiased estimate exists for it.

    >>> pass_at_k([4, 4], [1, 4], 2)
    0.75
    """
    n, c = check_and_convert_counts(samples, correct)
    if k < 1 or len(n) == 0 or n.min() < k:
        least = int(n.min()) if len(n) else 0
        raise ValueError(f"pass@{k} needs k >= 1 and at least k samples of every problem; one problem has {least}")
    missed = [math.comb(int(a - b), k) / math.comb(int(a), k) for a, b in zip(n, c, strict=True)]
    return 1.0 - math.fsum(missed) / len(missed)


def check_and_convert_counts(samples: ArrayLike, correct: ArrayLike) -> tuple[Floats, Floats]:
    """Convert samples and correct samples to float vectors. Raises ValueError for invalid counts."""
    n, c = np.asarray(samples, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if n.ndim != 1 or n.shape != c.shape:
        raise ValueError(f"samples and correct must be vectors of equal length; got shapes {n.shape} and {c.shape}")
    whole = np.isfinite(n).all() and np.isfinite(c).all() and (n == np.floor(n)).all() and (c == np.floor(c)).all()
    if not whole or (c < 0).any() or (c > n).any():
        raise ValueError("counts must be whole numbers with 0 <= correct <= samples for every problem")
    return n, c


def interval_on_this_benchmark(n_P: Floats, c_P: Floats) -> Interval:
    """Compute the interval for these problems, with a binomial variance within each problem.

    Every problem must have samples. The unbiased variance of the mean, ``sum p(1-p)/(n-1) / P^2``, is zero if every
    problem is always or never solved, and on average too small if few problems are in between. Half a disagreeing
    sample is therefore added, and the minimum is one disagreeing sample. The variance of a problem with a single sample
    cannot be estimated and is replaced by ``mean (1 - mean)``, which bounds it on average.
    """
    problems, per_problem = len(n_P), float(n_P.mean())
    share = c_P / n_P
    mean = float(share.mean())
    often = n_P > 1
    within = np.where(often, share * (1 - share) / np.where(often, n_P - 1, 1), mean * (1 - mean))
    one = 1 / per_problem**2
    variance = max(float(within.sum()) + one / 2, one) / problems**2
    total = float(n_P.sum())
    effective = max(mean * (1 - mean) / variance, total) if 0 < mean < 1 else total
    return _wilson_interval(mean, effective, NormalDist().inv_cdf(0.5 + CONFIDENCE_LEVEL / 2))


def _interval_on_problems_like_these(n_P: Floats, c_P: Floats, mean: float) -> Interval:
    """Compute the interval from the variance between problems, with Student's t and P - 1 degrees of freedom."""
    problems = len(n_P)
    if problems == 1:
        return Interval(low=0.0, high=1.0)  # one problem gives no information about other problems
    share = c_P / n_P
    variance = float(share.var(ddof=1)) / problems
    total = float(n_P.sum())
    effective = min(max(mean * (1 - mean) / variance, 1.0), total) if variance > 0 else float(problems)
    return _wilson_interval(mean, effective, two_sided_student_quantile(problems - 1))


def _wilson_interval(mean: float, samples: float, quantile: float) -> Interval:
    """Compute Wilson's interval (1927) for the rate ``mean`` observed in ``samples`` samples."""
    spread = quantile**2 / samples
    centre = (mean + spread / 2) / (1 + spread)
    half = quantile / (1 + spread) * math.sqrt(mean * (1 - mean) / samples + spread / (4 * samples))
    # For a mean of 0 or 1, rounding may move a bound past the mean by 7e-18, but an interval must contain its mean.
    return Interval(low=min(max(centre - half, 0.0), mean), high=max(min(centre + half, 1.0), mean))


def two_sided_student_quantile(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t (Abramowitz and Stegun 26.7.5).

    The error is below 0.004 for 3 or more degrees of freedom.

    >>> round(two_sided_student_quantile(29), 3)
    2.045
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1; got {degrees}")
    upper = 0.5 + CONFIDENCE_LEVEL / 2
    if degrees == 1:
        return math.tan(math.pi * (upper - 0.5))
    if degrees == 2:
        return (2 * upper - 1) / math.sqrt(2 * upper * (1 - upper))
    z = NormalDist().inv_cdf(upper)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / degrees + second / degrees**2 + third / degrees**3 + fourth / degrees**4


class AnswerGrader(Protocol):
    """The part of the grader interface that scoring uses."""

    async def grade(self, answer: str | None, reference: str) -> Verdict: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemVotes:
    """Votes on one problem: for the correct answer, for each distinct wrong answer (most votes first), and abstentions.

    >>> ProblemVotes(correct=3, wrong=(3, 1), abstentions=1).majority_score
    0.5
    """

    correct: int
    wrong: tuple[int, ...]
    abstentions: int = 0

    @property
    def majority_score(self) -> float:
        """Majority-vote score: 1 if the correct answer wins, 1 / (number of tied answers) if it ties, otherwise 0."""
        most = max((self.correct, *self.wrong))
        if self.correct == 0 or self.correct < most:
            return 0.0
        return 1 / (1 + self.wrong.count(most))


async def count_votes(samples: Sequence[tuple[str | None, Verdict]], grader: AnswerGrader) -> ProblemVotes:
    """Count the votes on one problem from each sample's answer and verdict.

    Wrong answers are grouped in order of decreasing frequency of their spelling. Each joins the first group that the
    grader considers equal. The outcome therefore depends on the order of samples only for equally frequent spellings.
    """
    votes = [
        (answer.strip(), verdict)
        for answer, verdict in samples
        if answer is not None and verdict is not Verdict.NO_ANSWER and not verdict.is_excluded
    ]
    correct = sum(verdict is Verdict.CORRECT for _, verdict in votes)
    slow = Counter(answer for answer, verdict in votes if verdict is Verdict.ANSWER_TIMEOUT)
    spellings = Counter(answer for answer, verdict in votes if verdict is not Verdict.CORRECT and answer not in slow)
    groups: dict[str, int] = {}
    for answer, count in spellings.most_common():
        groups[await _find_or_add_group(answer, groups, grader)] += count
    wrong = (*groups.values(), *slow.values())
    return ProblemVotes(
        correct=correct, wrong=tuple(sorted(wrong, reverse=True)), abstentions=len(samples) - len(votes)
    )


def maj_at_n(tallies: Sequence[ProblemVotes]) -> float:
    """Compute the mean of `ProblemVotes.majority_score` over problems. Raises ValueError if there is no problem.

    >>> counts = [ProblemVotes(correct=2, wrong=(1,)), ProblemVotes(correct=1, wrong=(1,))]
    >>> maj_at_n([*counts, ProblemVotes(correct=0, wrong=(), abstentions=3)])
    0.5
    """
    if not tallies:
        raise ValueError("maj@n needs at least one problem")
    return sum(item.majority_score for item in tallies) / len(tallies)


async def _find_or_add_group(answer: str, groups: dict[str, int], grader: AnswerGrader) -> str:
    for other in groups:
        if await grader.grade(answer, other) is Verdict.CORRECT:
            return other
    groups[answer] = 0
    return answer
