"""Two evaluations paired by problem: whether they can be compared, and their difference."""

from __future__ import annotations

from agentrl.errors import SettingsError
from agentrl.evaluation.formats import BenchmarkResults, Results
from agentrl.evaluation.records.changes import COMPARABLE, differences, flat
from agentrl.evaluation.results.differences import Difference, paired_difference


def compare(first: Results, second: Results) -> dict[str, Difference]:
    """The difference, second minus first, on each benchmark in both ``results.json``.

    Raises SettingsError if the protocols differ (it names every differing setting), if the problems of a benchmark
    differ, and if no benchmark is in both.
    """
    changed = differences(first["provenance"], second["provenance"], but=COMPARABLE)
    if changed:
        lines = "\n".join(f"  {key}: {before!r} in A, {after!r} in B" for key, before, after in changed)
        raise SettingsError(f"these results come from different protocols and cannot be compared:\n{lines}")
    common = [name for name in first["benchmarks"] if name in second["benchmarks"]]
    if not common:
        raise SettingsError(
            f"no benchmark is in both: A holds {', '.join(first['benchmarks'])}; B holds "
            f"{', '.join(second['benchmarks'])}"
        )
    for name in common:
        one, other = (results["benchmarks"][name]["sha256"] for results in (first, second))
        if one != other:
            raise SettingsError(f"{name}: the problems of A and B differ (sha256 {one[:12]} and {other[:12]})")
    return {name: paired_difference(*_counts(first["benchmarks"][name], second["benchmarks"][name])) for name in common}


def _counts(
    first: BenchmarkResults, second: BenchmarkResults
) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """The numbers of samples and of correct samples of each problem, in the same order."""
    problems = list(first["per_problem"])
    parts = [[one["per_problem"][key] for key in problems] for one in (first, second)]
    one, two = (([part["samples"] for part in run], [part["correct"] for part in run]) for run in parts)
    return one, two


def comparison_notes(first: Results, second: Results) -> list[str]:
    """Differences that do not change what is measured, and benchmarks that only one of the two has."""
    notes = []
    n1, n2 = (results["provenance"]["sampling"]["n"] for results in (first, second))
    if n1 != n2:
        notes.append(f"A has {n1} samples of each problem, B {n2}: both averages are unbiased")
    fingerprints = [flat(results["provenance"]["model"])["fingerprint"] for results in (first, second)]
    if fingerprints[0] == fingerprints[1]:
        notes.append(f"both have the fingerprint {fingerprints[0]!r}")
    for label, own, other in (("A", first, second), ("B", second, first)):
        alone = [name for name in own["benchmarks"] if name not in other["benchmarks"]]
        notes += [f"only {label} holds {', '.join(alone)}"] if alone else []
    return notes
