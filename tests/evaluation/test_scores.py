"""Scores: hand-computed values, degenerate counts, and the coverage of both intervals."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.evaluation.scores import Interval, avg_at_k, pass_at_k, two_sided_student_quantile


def wilson(mean: float, samples: float, quantile: float) -> tuple[float, float]:
    """The two roots of (mean - p)^2 = quantile^2 p (1 - p) / samples, by the quadratic formula."""
    a, b, c = 1 + quantile**2 / samples, -(2 * mean + quantile**2 / samples), mean**2
    root = math.sqrt(b * b - 4 * a * c)
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def test_avg_is_the_mean_over_problems_not_over_samples():
    score = avg_at_k([4, 2, 0], [4, 0, 0])
    assert (score.mean, score.problems, score.samples, score.problems_without_samples) == (0.5, 2, 6, 1)


def test_this_benchmark_by_hand():
    # Two problems, n = 4: shares 1/2 and 1/4, mean 3/8. Unbiased variances of the shares: (1/4)/3 and (3/16)/3, in sum
    # 7/48; plus half of 1/16, over 2^2 problems: 17/384. (15/64) / (17/384) = 90/17 samples' worth, below the 8 taken.
    interval = avg_at_k([4, 4], [2, 1]).this_benchmark
    assert (interval.low, interval.high) == pytest.approx(wilson(3 / 8, 8, 1.959964), abs=1e-5)
    # Shares 1/2 and 1, n = 8: variances 1/28 and 0, plus 1/128, over 4: 39/3584. (3/16) / (39/3584) = 224/13 > 16.
    interval = avg_at_k([8, 8], [4, 8]).this_benchmark
    assert (interval.low, interval.high) == pytest.approx(wilson(3 / 4, 224 / 13, 1.959964), abs=1e-5)


def test_problems_like_these_by_hand():
    # Shares 1, 1/2, 0: variance 1/4 between problems, 1/12 of the mean; (1/4) / (1/12) = 3 samples' worth; t(2) = 4.30.
    interval = avg_at_k([8, 8, 8], [8, 4, 0]).problems_like_these
    assert (interval.low, interval.high) == pytest.approx(wilson(0.5, 3, 4.302653), abs=1e-6)


def test_nothing_and_everything_solved_still_have_intervals():
    none, all_of_them = avg_at_k([8] * 30, [0] * 30), avg_at_k([8] * 30, [8] * 30)
    assert none.this_benchmark.low == 0.0
    assert none.this_benchmark.high == pytest.approx(3.841459 / (240 + 3.841459), abs=1e-6)
    assert all_of_them.this_benchmark.high == 1.0
    assert all_of_them.this_benchmark.low == pytest.approx(240 / (240 + 3.841459), abs=1e-6)
    assert none.problems_like_these.high == pytest.approx(2.04523**2 / (30 + 2.04523**2), abs=1e-5)
    assert avg_at_k([8], [4]).problems_like_these == Interval(low=0.0, high=1.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=50))
def test_intervals_hold_the_mean_and_stay_in_range(pairs: list[tuple[int, int]]):
    samples, correct = [max(a, b) for a, b in pairs], [min(a, b) for a, b in pairs]
    if sum(samples) == 0:
        with pytest.raises(ValueError, match="no problem has a sample"):
            avg_at_k(samples, correct)
        return
    score = avg_at_k(samples, correct)
    for interval in (score.this_benchmark, score.problems_like_these):
        assert 0.0 <= interval.low <= score.mean <= interval.high <= 1.0
        assert interval.low < interval.high


@pytest.mark.parametrize("share", [0, 1])
def test_intervals_hold_a_mean_of_zero_and_of_one_exactly(share: int):
    """No bound excludes the mean, for all numbers of samples and problems with a product up to 600."""
    sizes = [(n, problems) for n in range(1, 601) for problems in range(1, 600 // n + 1)]
    assert len(sizes) == 3944
    for n, problems in sizes:
        score = avg_at_k([n] * problems, [share * n] * problems)
        for interval in (score.this_benchmark, score.problems_like_these):
            assert score.mean == share
            assert 0.0 <= interval.low <= share <= interval.high <= 1.0, (n, problems, interval)


@pytest.mark.parametrize("problems", [30, 128])
@pytest.mark.parametrize("samples", [4, 8])
@pytest.mark.parametrize("shape", [(0.5, 0.5), (8.0, 2.0), (2.0, 2.0)])
def test_coverage(problems: int, samples: int, shape: tuple[float, float]):
    """2,000 evaluations each; 0.95 has a standard error of 0.005 here, so 0.93 to 0.97 is four of them."""
    rng = np.random.default_rng(problems * samples)
    expected = shape[0] / sum(shape)
    ours = like = 0
    rounds = 2000
    for _ in range(rounds):
        rates = rng.beta(*shape, problems)
        score = avg_at_k(np.full(problems, samples), rng.binomial(samples, rates))
        ours += score.this_benchmark.low <= rates.mean() <= score.this_benchmark.high
        like += score.problems_like_these.low <= expected <= score.problems_like_these.high
    assert 0.93 <= ours / rounds <= 0.97
    assert 0.93 <= like / rounds <= 0.97


@pytest.mark.parametrize("rates", [[0.01] * 30, [0.99] * 30, [0.0] * 28 + [0.5, 0.03], [1.0] * 27 + [0.9, 0.9, 0.1]])
def test_coverage_on_this_benchmark_near_nothing_and_everything(rates: list[float]):
    """2,000 evaluations of 30 problems x 32 samples; at least nine successes and nine failures are expected."""
    rng = np.random.default_rng(1)
    samples = np.full(30, 32)
    held = 0
    for _ in range(2000):
        interval = avg_at_k(samples, rng.binomial(32, rates)).this_benchmark
        held += interval.low <= np.mean(rates) <= interval.high
    assert 0.93 <= held / 2000 <= 0.97


def test_a_scripted_sampler_gives_the_closed_forms():
    """Known success rates, 4,000 evaluations of 2 problems x 4 samples: the means are the expectations."""
    rates, rng = np.array([0.3, 0.8]), np.random.default_rng(0)
    runs = [rng.binomial(4, rates) for _ in range(4000)]
    samples = [4, 4]
    assert np.mean([avg_at_k(samples, correct).mean for correct in runs]) == pytest.approx(0.55, abs=0.01)
    at_2 = np.mean([pass_at_k(samples, correct, 2) for correct in runs])
    assert at_2 == pytest.approx(1 - (0.7**2 + 0.2**2) / 2, abs=0.01)
    at_4 = np.mean([pass_at_k(samples, correct, 4) for correct in runs])
    assert at_4 == pytest.approx(1 - (0.7**4 + 0.2**4) / 2, abs=0.01)


@pytest.mark.parametrize(("n", "c", "k"), [(6, 2, 3), (5, 0, 2), (5, 5, 5), (7, 1, 7), (6, 4, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n: int, c: int, k: int):
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k([n], [c], k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_n_with_one_correct_is_one_and_not_a_bootstrap():
    assert pass_at_k([32], [1], 32) == 1.0
    assert pass_at_k([32, 32], [1, 0], 1) == pytest.approx(1 / 64)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="0 <= correct <= samples"):
        avg_at_k([4], [5])
    with pytest.raises(ValueError, match="0 <= correct <= samples"):
        avg_at_k([4.5], [1])
    with pytest.raises(ValueError, match="equal length"):
        avg_at_k([4, 4], [1])
    with pytest.raises(ValueError, match=r"pass@5 needs .* one problem has 4"):
        pass_at_k([8, 4], [1, 1], 5)


@pytest.mark.parametrize(
    ("degrees", "table"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (29, 2.045), (120, 1.980)]
)
def test_student_quantile_against_the_printed_table(degrees: int, table: float):
    assert two_sided_student_quantile(degrees) == pytest.approx(table, abs=0.004)
