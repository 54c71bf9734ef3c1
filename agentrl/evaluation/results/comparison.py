"""``agentrl compare A B``: where B is better or worse than A, paired by problem."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import SettingsError
from agentrl.evaluation.formats import BenchmarkResults, Results
from agentrl.evaluation.records.directory import EvaluationDirectory
from agentrl.evaluation.records.provenance import COMPARABLE, differences, flat
from agentrl.evaluation.results.differences import Difference, paired_difference
from agentrl.evaluation.results.tables import Table
from agentrl.telemetry.console import Console
from agentrl.telemetry.settings import TelemetrySettings


def compare_command(first: Path, second: Path) -> dict[str, Difference]:
    """Print the differences, B minus A; returns them by benchmark."""
    console = Console(TelemetrySettings())
    before, after = (EvaluationDirectory.existing(path).results() for path in (first, second))
    found = compare(before, after)
    names = [results["provenance"]["model"]["name"] for results in (before, after)]
    console.note(f"A: {names[0]} ({first})\nB: {names[1]} ({second})")
    for line in _notes(before, after):
        console.note(line)
    for table in difference_tables(before, after, found):
        console.table(table.title, table.columns, table.rows)
    return found


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


def difference_tables(first: Results, second: Results, found: Mapping[str, Difference]) -> list[Table]:
    """One row per benchmark: both scores, the difference with intervals and p-values, problems won and lost."""
    columns = ("benchmark", "A", "B", "B - A", "95 % this benchmark", "p", "95 % problems like these", "p like these")
    rows = []
    for name, one in found.items():
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
        for name, one in found.items()
    )
    return [
        Table(title="Differences, paired by problem", columns=columns, rows=tuple(rows)),
        Table(
            title="Problems",
            columns=("benchmark", "compared", "B won", "B lost", "tied", "without data in one"),
            rows=counts,
        ),
    ]


def _counts(
    first: BenchmarkResults, second: BenchmarkResults
) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """The numbers of samples and of correct samples of each problem, in the same order."""
    problems = list(first["per_problem"])
    parts = [[one["per_problem"][key] for key in problems] for one in (first, second)]
    one, two = (([part["samples"] for part in run], [part["correct"] for part in run]) for run in parts)
    return one, two


def _notes(first: Results, second: Results) -> list[str]:
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
