"""``agentrl compare A B``: difference of two runs on the same problems, paired by problem, with intervals and p-values.

As for the score of one run, there are two questions: *this benchmark* (fixed problems, new samples) and *problems like
these* (new problems). Each has an interval and a p-value, which come from different tests. Near p = 0.05, the interval
and the p-value may disagree about a difference of 0. ``benchmarks/coverage.py`` measures the coverage of both
intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from agentrl.errors import SettingsError
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.formats import BenchmarkResults, Results
from agentrl.evaluation.provenance import COMPARED_SECTIONS, list_differences
from agentrl.evaluation.results import Table
from agentrl.evaluation.scores import (
    Floats,
    Interval,
    check_and_convert_counts,
    interval_on_this_benchmark,
    two_sided_student_quantile,
)
from agentrl.telemetry.console import Console
from agentrl.telemetry.settings import TelemetrySettings

BOOTSTRAP_DRAWS = 20_000
"""Number of random relabellings per p-value; no p-value is below 1 / (BOOTSTRAP_DRAWS + 1)."""

_ROUNDING = 1e-9
_DRAWS_AT_ONCE = 2_000  # maximum number of relabellings in memory at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreDifference:
    """Difference of mean scores, second run minus first run, with intervals within [-1, 1].

    ``won``, ``lost`` and ``tied`` count problems. ``unpaired`` counts problems without a sample in one of the runs.
    """

    mean: float
    this_benchmark: Interval
    this_benchmark_p: float
    problems_like_these: Interval
    problems_like_these_p: float
    problems: int
    won: int
    lost: int
    tied: int
    unpaired: int


def compare_results(first: Results, second: Results) -> dict[str, ScoreDifference]:
    """Compute the difference, second minus first, on each benchmark that both runs contain.

    Raises SettingsError if the protocols differ (listing the settings), if the problems of a benchmark differ, or if
    the runs have no benchmark in common.
    """
    changed = list_differences(first["provenance"], second["provenance"], ignored_keys=COMPARED_SECTIONS)
    if changed:
        lines = "\n".join(f"  {key}: {before!r} in A, {after!r} in B" for key, before, after in changed)
        raise SettingsError(f"A and B cannot be compared, because their protocols differ:\n{lines}")
    common = [name for name in first["benchmarks"] if name in second["benchmarks"]]
    if not common:
        raise SettingsError(
            f"A and B have no benchmark in common: A has {', '.join(first['benchmarks'])}; "
            f"B has {', '.join(second['benchmarks'])}"
        )
    for name in common:
        one, other = (results["benchmarks"][name]["sha256"] for results in (first, second))
        if one != other:
            raise SettingsError(f"{name}: the problems of A and B differ (sha256 {one[:12]} and {other[:12]})")
    return {
        name: paired_difference(*_counts_per_problem(first["benchmarks"][name], second["benchmarks"][name]))
        for name in common
    }


def _counts_per_problem(
    first: BenchmarkResults, second: BenchmarkResults
) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """Return (samples, correct samples) per problem for each run, with problems in the same order."""
    problems = list(first["per_problem"])
    parts = [[one["per_problem"][key] for key in problems] for one in (first, second)]
    one, two = (([part["samples"] for part in run], [part["correct"] for part in run]) for run in parts)
    return one, two


def list_comparison_notes(first: Results, second: Results) -> list[str]:
    """List differences that do not affect the comparison, and benchmarks that only one run contains."""
    notes = []
    n1, n2 = (results["provenance"]["sampling"]["n"] for results in (first, second))
    if n1 != n2:
        notes.append(f"A has {n1} samples per problem and B has {n2}, but both averages are unbiased")
    fingerprints = [results["provenance"]["model"]["fingerprint"] for results in (first, second)]
    if fingerprints[0] == fingerprints[1]:
        notes.append(f"A and B have the same model fingerprint, {fingerprints[0]!r}")
    for label, results, other in (("A", first, second), ("B", second, first)):
        alone = [name for name in results["benchmarks"] if name not in other["benchmarks"]]
        notes += [f"only {label} has {', '.join(alone)}"] if alone else []
    return notes


def paired_difference(
    first: tuple[ArrayLike, ArrayLike], second: tuple[ArrayLike, ArrayLike], *, seed: int = 0
) -> ScoreDifference:
    """Compare two runs, each ``(samples, correct)`` with one entry per problem, in the same order.

    Problems without a sample in one of the runs are left out and counted as unpaired. ``seed`` determines the random
    draws of the p-values. Raises ValueError for invalid counts, for runs of different lengths, and if no problem is
    left.

    >>> result = paired_difference(([4, 4, 4], [1, 2, 4]), ([4, 4, 4], [3, 2, 3]))
    >>> round(result.mean, 3), result.won, result.lost, result.tied
    (0.083, 1, 1, 1)
    """
    n1, c1 = check_and_convert_counts(*first)
    n2, c2 = check_and_convert_counts(*second)
    if n1.shape != n2.shape:
        raise ValueError(
            f"both runs must have the same problems in the same order; got {len(n1)} and {len(n2)} problems"
        )
    kept = (n1 > 0) & (n2 > 0)
    if not kept.any():
        raise ValueError("the runs cannot be compared, because no problem has samples in both")
    n1, c1, n2, c2 = n1[kept], c1[kept], n2[kept], c2[kept]
    gain_P = c2 / n2 - c1 / n1
    rng = np.random.default_rng(seed)
    won, lost = int((gain_P > _ROUNDING).sum()), int((gain_P < -_ROUNDING).sum())
    return ScoreDifference(
        mean=float(gain_P.mean()),
        this_benchmark=difference_on_this_benchmark(n1, c1, n2, c2),
        this_benchmark_p=_samples_p_value(n1, c1, n2, c2, rng),
        problems_like_these=difference_on_problems_like_these(n1, c1, n2, c2),
        problems_like_these_p=_problems_p_value(gain_P, rng),
        problems=len(gain_P),
        won=won,
        lost=lost,
        tied=len(gain_P) - won - lost,
        unpaired=int((~kept).sum()),
    )


def difference_on_this_benchmark(n1: Floats, c1: Floats, n2: Floats, c2: Floats) -> Interval:
    """Compute the interval of the difference on these problems from the intervals of both runs (Zou and Donner 2008).

    Given the problems, the samples of the two runs are independent.
    """
    mean1, mean2 = float((c1 / n1).mean()), float((c2 / n2).mean())
    one, two = interval_on_this_benchmark(n1, c1), interval_on_this_benchmark(n2, c2)
    below = math.hypot(mean2 - two.low, one.high - mean1)
    above = math.hypot(two.high - mean2, mean1 - one.low)
    return Interval(low=max(mean2 - mean1 - below, -1.0), high=min(mean2 - mean1 + above, 1.0))


def difference_on_problems_like_these(n1: Floats, c1: Floats, n2: Floats, c2: Floats) -> Interval:
    """Return Student's t interval over problems, widened by four pseudo-problems: two gains and two losses.

    The pseudo-problems increase the variance and leave the mean unchanged. The size of each gain and loss is the root
    mean square of the nonzero gains, or 1 if all gains are 0. If few problems change, a sample often contains few or
    none of these problems, so Student's interval alone is too narrow (``benchmarks/coverage.py``). Agresti and Coull
    (1998) add two successes and two failures to a proportion for the same reason.
    """
    problems = len(n1)
    if problems == 1:
        return Interval(low=-1.0, high=1.0)  # one problem gives no information about other problems
    gain_P = c2 / n2 - c1 / n1
    mean = float(gain_P.mean())
    changed = gain_P[np.abs(gain_P) > _ROUNDING]
    added = 4 * float((changed**2).mean()) if len(changed) else 4.0
    variance = (float(((gain_P - mean) ** 2).sum()) + added) / (problems - 1)
    half = two_sided_student_quantile(problems - 1) * math.sqrt(variance / problems)
    return Interval(low=max(mean - half, -1.0), high=min(mean + half, 1.0))


def _samples_p_value(n1: Floats, c1: Floats, n2: Floats, c2: Floats, rng: np.random.Generator) -> float:
    """Compute the two-sided p-value of a permutation test of equal success rates on every problem."""
    right, wrong = (c1 + c2).astype(np.int64), (n1 + n2 - c1 - c2).astype(np.int64)
    taken = n1.astype(np.int64)

    def relabelled_means(draws: int) -> Floats:
        dealt = rng.hypergeometric(right, wrong, taken, size=(draws, len(right)))  # [draws, P] correct samples of run 1
        return np.asarray(((right - dealt) / n2 - dealt / n1).mean(axis=1))

    return _p_value(float((c2 / n2 - c1 / n1).mean()), relabelled_means)


def _problems_p_value(gain_P: Floats, rng: np.random.Generator) -> float:
    """Compute the two-sided p-value of a sign-flip test of gains that are symmetric around 0."""

    def relabelled_means(draws: int) -> Floats:
        signs = rng.integers(0, 2, size=(draws, len(gain_P))) * 2 - 1
        return np.asarray(signs @ gain_P / len(gain_P))

    return _p_value(float(gain_P.mean()), relabelled_means)


def _p_value(observed: float, relabelled_means: Callable[[int], Floats]) -> float:
    far = sum(
        int((np.abs(relabelled_means(_DRAWS_AT_ONCE)) >= abs(observed) - _ROUNDING).sum())
        for _ in range(BOOTSTRAP_DRAWS // _DRAWS_AT_ONCE)
    )
    return (far + 1) / (BOOTSTRAP_DRAWS + 1)


def compare_command(first: Path, second: Path) -> dict[str, ScoreDifference]:
    """Print and return the differences by benchmark, B minus A."""
    console = Console(TelemetrySettings())
    before, after = (EvaluationDirectory.open_existing(path).results() for path in (first, second))
    by_benchmark = compare_results(before, after)
    names = [results["provenance"]["model"]["name"] for results in (before, after)]
    console.note(f"A: {names[0]} ({first})\nB: {names[1]} ({second})")
    for line in list_comparison_notes(before, after):
        console.note(line)
    for table in difference_tables(before, after, by_benchmark):
        console.table(table.title, table.columns, table.rows)
    return by_benchmark


def difference_tables(first: Results, second: Results, by_benchmark: Mapping[str, ScoreDifference]) -> list[Table]:
    """Build a table of scores and differences and a table of won and lost problems, with a row per benchmark."""
    columns = ("benchmark", "A", "B", "B - A", "95 % this benchmark", "p", "95 % problems like these", "p like these")
    rows = []
    for name, one in by_benchmark.items():
        ours, like = one.this_benchmark, one.problems_like_these
        rows.append(
            (
                name,
                *(f"{results['benchmarks'][name]['avg']['mean']:.3f}" for results in (first, second)),
                f"{one.mean:+.3f}",
                f"{ours.low:+.3f} to {ours.high:+.3f}",
                f"{one.this_benchmark_p:.2g}",
                f"{like.low:+.3f} to {like.high:+.3f}",
                f"{one.problems_like_these_p:.2g}",
            )
        )
    counts = tuple(
        (name, str(one.problems), str(one.won), str(one.lost), str(one.tied), str(one.unpaired))
        for name, one in by_benchmark.items()
    )
    return [
        Table(title="Differences, paired by problem", columns=columns, rows=tuple(rows)),
        Table(
            title="Problems",
            columns=("benchmark", "compared", "B won", "B lost", "tied", "excluded in one"),
            rows=counts,
        ),
    ]
