"""Paired differences of two runs: values computed by hand, exact p-values, coverage of both intervals."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.evaluation.compare import (
    difference_on_problems_like_these,
    difference_on_this_benchmark,
    paired_difference,
)
from agentrl.evaluation.scores import Interval, avg_at_k


def test_counts_by_hand():
    # Shares 1/4, 2/4, 4/4 and 3/4, 2/4, 3/4: gains +1/2, 0, -1/4. The last two problems lack a run.
    result = paired_difference(([4, 4, 4, 0, 4], [1, 2, 4, 0, 1]), ([4, 4, 4, 4, 0], [3, 2, 3, 1, 0]))
    assert result.mean == pytest.approx(1 / 12)
    assert (result.problems, result.won, result.lost, result.tied, result.unpaired) == (3, 1, 1, 1, 2)


def test_runs_with_different_numbers_of_samples_compare_shares():
    result = paired_difference(([8, 8], [4, 2]), ([2, 4], [1, 3]))
    assert (result.mean, result.won, result.lost, result.tied) == (0.25, 1, 0, 1)


def test_this_benchmark_is_built_from_the_runs_own_intervals():
    first, second = avg_at_k([8] * 20, [2] * 20), avg_at_k([8] * 20, [4] * 20)
    one, two = first.this_benchmark, second.this_benchmark
    result = paired_difference(([8] * 20, [2] * 20), ([8] * 20, [4] * 20)).this_benchmark
    assert result.low == pytest.approx(0.25 - math.sqrt((0.5 - two.low) ** 2 + (one.high - 0.25) ** 2))
    assert result.high == pytest.approx(0.25 + math.sqrt((two.high - 0.5) ** 2 + (0.25 - one.low) ** 2))


def test_problems_like_these_by_hand():
    # Gains 1/2, 0, -1/2, 1: mean 1/4, squares about it 1.25. Four more problems with the mean square of 1/2, -1/2 and
    # 1, which is 1/2, add 2. t(3) = 3.18245.
    result = paired_difference(([4] * 4, [0, 2, 4, 0]), ([4] * 4, [2, 2, 2, 4])).problems_like_these
    half = 3.18245 * math.sqrt((1.25 + 2) / 3 / 4)
    assert (result.low, result.high) == (max(0.25 - half, -1.0), 1.0)
    # 30 problems of which one changes, by 1/4: mean 1/120, squares about it 1/16 - 1/480, plus 4/16; t(29) = 2.04523.
    result = paired_difference(([4] * 30, [1, *[4] * 29]), ([4] * 30, [2, *[4] * 29])).problems_like_these
    half = 2.04523 * math.sqrt((1 / 16 - 1 / 480 + 1 / 4) / 29 / 30)
    assert (result.low, result.high) == pytest.approx((1 / 120 - half, 1 / 120 + half), abs=1e-5)


def exact_fixed_p(n1: list[int], c1: list[int], n2: list[int], c2: list[int]) -> float:
    """Compute the p-value by enumerating every assignment of each problem's correct answers to the runs."""
    seen = abs(sum(Fraction(b, m) - Fraction(a, n) for n, a, m, b in zip(n1, c1, n2, c2, strict=True)))
    sums = {Fraction(0): Fraction(1)}
    for n, a, m, b in zip(n1, c1, n2, c2, strict=True):
        right = a + b
        new: dict[Fraction, Fraction] = {}
        for dealt in range(max(0, right - m), min(n, right) + 1):
            chance = Fraction(math.comb(right, dealt) * math.comb(n + m - right, n - dealt), math.comb(n + m, n))
            gain = Fraction(right - dealt, m) - Fraction(dealt, n)
            for total, before in sums.items():
                new[total + gain] = new.get(total + gain, Fraction(0)) + before * chance
        sums = new
    return float(sum(chance for total, chance in sums.items() if abs(total) >= seen))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (([4, 4, 4], [1, 2, 4]), ([4, 4, 4], [3, 2, 3])),
        (([4, 4, 4], [0, 0, 1]), ([4, 4, 4], [2, 3, 3])),
        (([3, 5], [0, 1]), ([4, 2], [3, 2])),
    ],
)
def test_p_value_on_this_benchmark_is_the_exact_one(first: tuple, second: tuple):
    expected = exact_fixed_p(*first, *second)
    assert paired_difference(first, second).this_benchmark_p == pytest.approx(expected, abs=0.015)


def test_p_value_over_problems_is_the_sign_test_for_equal_gains():
    # Six gains of the same size: only all plus and all minus are as far, 2 of 64.
    result = paired_difference(([4] * 6, [1] * 6), ([4] * 6, [3] * 6))
    assert result.problems_like_these_p == pytest.approx(2 / 64, abs=0.006)


def test_equal_runs_do_not_differ():
    result = paired_difference(([8] * 30, [3] * 30), ([8] * 30, [3] * 30))
    assert (result.this_benchmark_p, result.problems_like_these_p, result.tied) == (1.0, 1.0, 30)
    assert result.problems_like_these.low < 0 < result.problems_like_these.high


def test_p_values_are_reproducible_and_symmetric():
    first, second = ([4] * 5, [1, 2, 0, 4, 1]), ([4] * 5, [2, 4, 1, 3, 3])
    there, back = paired_difference(first, second), paired_difference(second, first)
    assert there == paired_difference(first, second)
    assert (there.won, there.lost) == (back.lost, back.won)
    assert there.this_benchmark.low == pytest.approx(-back.this_benchmark.high)
    assert there.problems_like_these_p == pytest.approx(back.problems_like_these_p, abs=0.02)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(1, 8), st.integers(0, 8)), min_size=1))
def test_intervals_hold_the_difference(rows: list[tuple[int, int, int, int]]):
    n1, c1 = [row[0] for row in rows], [min(row[:2]) for row in rows]
    n2, c2 = [row[2] for row in rows], [min(row[2:]) for row in rows]
    result = paired_difference((n1, c1), (n2, c2))
    for interval in (result.this_benchmark, result.problems_like_these):
        assert -1.0 <= interval.low <= result.mean + 1e-12
        assert result.mean - 1e-12 <= interval.high <= 1.0
        assert interval.low < interval.high
    assert 0 < result.this_benchmark_p <= 1
    assert 0 < result.problems_like_these_p <= 1


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.1), (0.2, 0.9)])
def test_coverage(low: float, high: float):
    """2,000 comparisons of 30 problems x 8 samples; success rates uniform in a range, the second run's 0.1 above."""
    rng = np.random.default_rng(2)
    n = np.full(30, 8.0)
    fixed = rng.uniform(low, high, 30)
    ours = like = 0
    for _ in range(2000):
        interval = difference_on_this_benchmark(n, rng.binomial(8, fixed), n, rng.binomial(8, fixed + 0.1))
        ours += interval.low <= 0.1 <= interval.high
        drawn = rng.uniform(low, high, 30)
        interval = difference_on_problems_like_these(n, rng.binomial(8, drawn), n, rng.binomial(8, drawn + 0.1))
        like += interval.low <= 0.1 <= interval.high
    assert 0.93 <= ours / 2000 <= 0.97
    assert 0.93 <= like / 2000 <= 0.98


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (0.5, 0.8)])
def test_coverage_where_few_problems_move(before: float, after: float):
    """2,000 comparisons of 30 problems x 32 samples: 45 % always right, 45 % always wrong, 10 % move."""
    rng = np.random.default_rng(3)
    n, held = np.full(30, 32.0), 0
    for _ in range(2000):
        fixed, moves = rng.integers(0, 2, 30), rng.random(30) < 0.1
        first, second = (rng.binomial(32, np.where(moves, rate, fixed)) for rate in (before, after))
        interval = difference_on_problems_like_these(n, first, n, second)
        held += interval.low <= 0.1 * (after - before) <= interval.high
    assert held / 2000 >= 0.93  # 0.88 with (0.5, 0.8) by Student's interval alone


def test_one_problem_says_nothing_of_others():
    assert paired_difference(([4], [1]), ([4], [3])).problems_like_these == Interval(low=-1.0, high=1.0)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(
        ValueError, match="both runs must have the same problems in the same order; got 2 and 1 problems"
    ):
        paired_difference(([4, 4], [1, 1]), ([4], [1]))
    with pytest.raises(ValueError, match="no problem has samples in both"):
        paired_difference(([4, 0], [1, 0]), ([0, 4], [0, 1]))
    with pytest.raises(ValueError, match="0 <= correct <= samples"):
        paired_difference(([4], [5]), ([4], [1]))
