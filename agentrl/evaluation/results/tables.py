"""Results as tables, for the terminal and, in Markdown, for the directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.evaluation.formats import BenchmarkResults, Bounds, Results
from agentrl.evaluation.records.transcript import KINDS


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, column names and rows of text; the first column is a name."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) + ("---:",) * (len(self.columns) - 1), *self.rows]
        return f"**{self.title}**\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def result_tables(results: Results) -> list[Table]:
    """The tables of a finished evaluation: scores, pass@k, results of rollouts, statistics, and excluded rollouts."""
    benchmarks = results["benchmarks"]
    n = results["provenance"]["sampling"]["n"]
    made = (_passes, _kinds, _conduct, _failures)
    return [_scores(benchmarks, n), *(table(benchmarks) for table in made)]


def _scores(benchmarks: Mapping[str, BenchmarkResults], n: int) -> Table:
    return Table(
        title="Scores",
        columns=("benchmark", f"avg@{n}", "95 % this benchmark", "95 % problems like these", f"maj@{n}", "problems"),
        rows=tuple(
            (
                name,
                f"{one['avg']['mean']:.3f}",
                _interval(one["avg"]["this_benchmark"]),
                _interval(one["avg"]["problems_like_these"]),
                f"{one['maj']:.3f}",
                _problems(one),
            )
            for name, one in benchmarks.items()
        ),
    )


def _passes(benchmarks: Mapping[str, BenchmarkResults]) -> Table:
    ks = list(dict.fromkeys(k for one in benchmarks.values() for k in one["pass"]))
    return Table(
        title="pass@k, unbiased",
        columns=("benchmark", *(f"pass@{k}" for k in ks)),
        rows=tuple((name, *(_pass(one, k) for k in ks)) for name, one in benchmarks.items()),
    )


def _kinds(benchmarks: Mapping[str, BenchmarkResults]) -> Table:
    return Table(
        title="What rollouts came to: all but the correct ones and those without data count as wrong",
        columns=("benchmark", *KINDS.values()),
        rows=tuple((name, *(str(one["kinds"][kind]) for kind in KINDS)) for name, one in benchmarks.items()),
    )


def _conduct(benchmarks: Mapping[str, BenchmarkResults]) -> Table:
    columns = ("benchmark", "turns", "tool calls", "calls ok", "truncated", "void", "tokens", "of the model", "seconds")
    return Table(
        title="A rollout on average",
        columns=columns,
        rows=tuple(
            (
                name,
                f"{one['turns']:.2f}",
                f"{one['tool_calls']['mean']:.2f}",
                _ok(one["tool_calls"]["outcomes"]),
                f"{one['truncated']['share']:.1%}",
                f"{one['void_share']:.1%}",
                f"{one['tokens']['response_mean']:.0f}",
                f"{one['tokens']['model_mean']:.0f}",
                f"{one['seconds']['mean']:.1f}",
            )
            for name, one in benchmarks.items()
        ),
    )


def _failures(benchmarks: Mapping[str, BenchmarkResults]) -> Table:
    return Table(
        title="Failures outside the policy: retried, then excluded from all averages",
        columns=("benchmark", "rollouts", "no data", "kinds", "fresh starts"),
        rows=tuple(
            (
                name,
                str(one["rollouts"]),
                str(one["no_data"]["total"]),
                ", ".join(f"{kind} {count}" for kind, count in one["no_data"].items() if kind not in _COUNTS) or "-",
                str(one["no_data"]["retried"]),
            )
            for name, one in benchmarks.items()
        ),
    )


_COUNTS = ("total", "retried")


def _interval(interval: Bounds) -> str:
    return f"{interval['low']:.3f} to {interval['high']:.3f}"


def _problems(one: BenchmarkResults) -> str:
    left_out = one["avg"]["problems_without_samples"]
    return f"{one['problems']}" + (f" ({left_out} without data)" if left_out else "")


def _pass(one: BenchmarkResults, k: str) -> str:
    found = one["pass"].get(k)
    if found is None:
        return "-"
    short = "" if found["problems"] == one["problems"] else f" ({found['problems']} problems)"
    return f"{found['value']:.3f}{short}"


def _ok(outcomes: Mapping[str, int]) -> str:
    calls: Sequence[int] = list(outcomes.values())
    return f"{outcomes.get('ok', 0) / sum(calls):.1%}" if calls else "-"
