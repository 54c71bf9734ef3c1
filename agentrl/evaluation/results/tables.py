"""Tables of results, for the terminal and, in Markdown, for the directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agentrl.evaluation.formats import BenchmarkResults, Bounds, Results
from agentrl.evaluation.records.transcript import KINDS

Cells = Mapping[str, Callable[[BenchmarkResults], str]]
"""Columns of a table: name -> text for a benchmark."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, column names and rows of text. The first column contains names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) + ("---:",) * (len(self.columns) - 1), *self.rows]
        return f"**{self.title}**\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def result_tables(results: Results) -> list[Table]:
    """Build the tables of a finished evaluation: scores, pass@k, outcomes, averages, and excluded rollouts."""
    benchmarks = results["benchmarks"]
    n = results["provenance"]["sampling"]["n"]
    ks = dict.fromkeys(k for one in benchmarks.values() for k in one["pass"])

    def table(title: str, cells: Cells) -> Table:
        rows = tuple((name, *(cell(one) for cell in cells.values())) for name, one in benchmarks.items())
        return Table(title=title, columns=("benchmark", *cells), rows=rows)

    scores: Cells = {
        f"avg@{n}": lambda one: f"{one['avg']['mean']:.3f}",
        "95 % this benchmark": lambda one: _interval(one["avg"]["this_benchmark"]),
        "95 % problems like these": lambda one: _interval(one["avg"]["problems_like_these"]),
        f"maj@{n}": lambda one: "-" if one["maj"] is None else f"{one['maj']:.3f}",
        "problems": _problems,
    }
    return [
        table("Scores", scores),
        table("pass@k, unbiased", {f"pass@{k}": partial(_pass, k=k) for k in ks}),
        table(
            "Outcomes of rollouts; all except correct and excluded count as wrong",
            {shown: partial(_kind, kind=kind) for kind, shown in KINDS.items()},
        ),
        table("Averages per rollout", _CONDUCT),
        table("Failures outside the policy: retried, then excluded from all averages", _FAILURES),
    ]


def _interval(interval: Bounds) -> str:
    return f"{interval['low']:.3f} to {interval['high']:.3f}"


def _problems(one: BenchmarkResults) -> str:
    left_out = one["avg"]["problems_without_samples"]
    return f"{one['problems']}" + (f" ({left_out} excluded)" if left_out else "")


def _pass(one: BenchmarkResults, k: str) -> str:
    record = one["pass"].get(k)
    if record is None:
        return "-"
    short = "" if record["problems"] == one["problems"] else f" ({record['problems']} problems)"
    return f"{record['value']:.3f}{short}"


def _ok(outcomes: Mapping[str, int]) -> str:
    calls: Sequence[int] = list(outcomes.values())
    return f"{outcomes.get('ok', 0) / sum(calls):.1%}" if calls else "-"


def _kind(one: BenchmarkResults, kind: str) -> str:
    return str(one["kinds"][kind])


def _failed(one: BenchmarkResults) -> str:
    kinds = (f"{kind} {count}" for kind, count in one["no_data"].items() if kind not in ("total", "retried"))
    return ", ".join(kinds) or "-"


_CONDUCT: Cells = {
    "turns": lambda one: f"{one['turns']:.2f}",
    "tool calls": lambda one: f"{one['tool_calls']['mean']:.2f}",
    "successful calls": lambda one: _ok(one["tool_calls"]["outcomes"]),
    "truncated": lambda one: f"{one['truncated']['share']:.1%}",
    "void": lambda one: f"{one['void_share']:.1%}",
    "tokens": lambda one: f"{one['tokens']['response_mean']:.0f}",
    "model tokens": lambda one: f"{one['tokens']['model_mean']:.0f}",
    "seconds": lambda one: f"{one['seconds']['mean']:.1f}",
}
_FAILURES: Cells = {
    "rollouts": lambda one: str(one["rollouts"]),
    "excluded": lambda one: str(one["no_data"]["total"]),
    "kinds": _failed,
    "restarts": lambda one: str(one["no_data"]["retried"]),
}
