"""``agentrl compare A B``: differences between two evaluations, paired by problem."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.evaluation.formats import Results
from agentrl.evaluation.records.directory import EvaluationDirectory
from agentrl.evaluation.results.differences import Difference, compare, comparison_notes
from agentrl.evaluation.results.tables import Table
from agentrl.telemetry.console import Console
from agentrl.telemetry.settings import TelemetrySettings


def compare_command(first: Path, second: Path) -> dict[str, Difference]:
    """Print the differences, B minus A. Returns them by benchmark."""
    console = Console(TelemetrySettings())
    before, after = (EvaluationDirectory.existing(path).results() for path in (first, second))
    by_benchmark = compare(before, after)
    names = [results["provenance"]["model"]["name"] for results in (before, after)]
    console.note(f"A: {names[0]} ({first})\nB: {names[1]} ({second})")
    for line in comparison_notes(before, after):
        console.note(line)
    for table in difference_tables(before, after, by_benchmark):
        console.table(table.title, table.columns, table.rows)
    return by_benchmark


def difference_tables(first: Results, second: Results, by_benchmark: Mapping[str, Difference]) -> list[Table]:
    """Build tables with a row per benchmark: scores, differences with intervals and p-values, won and lost problems."""
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
