"""Results of an evaluation: index of its rollouts, ``results.json``, and tables for the terminal and Markdown."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from operator import attrgetter
from typing import cast

import agentrl
from agentrl.errors import WorldError
from agentrl.evaluation.benchmarks import ProblemSet
from agentrl.evaluation.formats import BenchmarkResults, PassRecord, Provenance, Results, RolloutStatistics
from agentrl.evaluation.scores import AnswerGrader, avg_at_k, count_votes, maj_at_n, pass_at_k
from agentrl.evaluation.transcripts import RESULT_KINDS, Sample, Transcript
from agentrl.telemetry.records import IntervalRecord, ScoreRecord
from agentrl_envs.types import Ended, Verdict


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """Properties of a rollout's :class:`Transcript`, without the conversation."""

    correct: bool
    is_excluded: bool
    result_kind: str
    ended: Ended
    verdict: Verdict | None
    answer: str | None
    attempt: int
    model_turns: int
    outcomes: tuple[str, ...]
    prompt_tokens: int
    model_tokens: int
    tokens: int
    seconds: float


_summary_fields = attrgetter(*(field.name for field in fields(RolloutSummary)))


class RolloutIndex:
    """Index of the finished rollouts. A later attempt replaces an earlier one."""

    def __init__(self, transcripts: Iterable[Transcript] = ()) -> None:
        self._rollouts: dict[tuple[str, str, int], RolloutSummary] = {}
        for transcript in transcripts:
            self.add(transcript)

    def add(self, transcript: Transcript) -> None:
        self._rollouts[transcript.key] = RolloutSummary(*_summary_fields(transcript))

    def counted_rollouts(self) -> list[RolloutSummary]:
        """Return the rollouts of all benchmarks that are not excluded."""
        return [rollout for rollout in self._rollouts.values() if not rollout.is_excluded]

    def rollouts_by_problem(self, benchmark: str) -> dict[str, list[RolloutSummary]]:
        """Return the rollouts of a benchmark by problem, sorted by sample number."""
        rollouts: dict[str, list[tuple[int, RolloutSummary]]] = defaultdict(list)
        for (name, problem, number), rollout in self._rollouts.items():
            if name == benchmark:
                rollouts[problem].append((number, rollout))
        return {
            problem: [rollout for _, rollout in sorted(part, key=lambda item: item[0])]
            for problem, part in rollouts.items()
        }

    @property
    def finished_count(self) -> int:
        """Number of rollouts that need no further attempt."""
        return sum(rollout.ended is not Ended.INFRASTRUCTURE_FAILURE for rollout in self._rollouts.values())

    def samples_to_run(self, sets: Iterable[ProblemSet], n: int) -> list[Sample]:
        """Return the samples still to run: new samples, and retries of infrastructure failures.

        Samples are ordered by number, not by problem, so that an interrupted evaluation covers all problems evenly.
        """
        chosen = list(sets)
        missing = []
        for number in range(n):
            for one in chosen:
                for problem in one.problems:
                    rollout = self._rollouts.get((one.name, problem.id, number))
                    if rollout is None:
                        missing.append(Sample(benchmark=one.name, problem=problem, number=number))
                    elif rollout.ended is Ended.INFRASTRUCTURE_FAILURE:
                        again = rollout.attempt + 1
                        missing.append(Sample(benchmark=one.name, problem=problem, number=number, attempt=again))
        return missing


async def compute_benchmark_results(
    problem_set: ProblemSet, index: RolloutIndex, *, ks: Sequence[int], grader: AnswerGrader
) -> BenchmarkResults:
    """Compute the results of one benchmark. Raises ValueError if all rollouts are excluded."""
    by_problem = index.rollouts_by_problem(problem_set.name)
    rollouts = [by_problem.get(problem.id, []) for problem in problem_set.problems]
    counted = [[rollout for rollout in part if not rollout.is_excluded] for part in rollouts]
    samples = [len(part) for part in counted]
    correct = [sum(rollout.correct for rollout in part) for part in counted]
    score = avg_at_k(samples, correct)
    votes = [
        await count_votes([(rollout.answer, _verdict_for_vote(rollout)) for rollout in part], grader)
        for part in counted
        if part
    ]
    families = defaultdict(list)
    for problem, n, c in zip(problem_set.problems, samples, correct, strict=True):
        if n:
            families[problem.family].append(c / n)
    all_counted = [rollout for part in counted for rollout in part]
    all_rollouts = [rollout for part in rollouts for rollout in part]
    return {
        **problem_set.record(),
        "avg": cast(ScoreRecord, asdict(score)),
        "pass": {str(k): _pass_at_k_where_sampled(samples, correct, k) for k in ks},
        "maj": maj_at_n(votes) if any(rollout.verdict is not None for rollout in all_counted) else None,
        "families": {name: math.fsum(part) / len(part) for name, part in sorted(families.items()) if name},
        "kinds": {kind: sum(rollout.result_kind == kind for rollout in all_rollouts) for kind in RESULT_KINDS},
        **_rollout_statistics(all_counted),
        "excluded": _count_excluded(all_rollouts),
        "rollouts": len(all_rollouts),
        "seconds": {
            "mean": _mean(rollout.seconds for rollout in all_counted),
            "max": max(rollout.seconds for rollout in all_counted),
        },
        "per_problem": {
            problem.id: {"samples": n, "correct": c}
            for problem, n, c in zip(problem_set.problems, samples, correct, strict=True)
        },
    }


def default_pass_ks(n: int) -> tuple[int, ...]:
    """Return the default values of k for pass@k: powers of two below n, and n.

    >>> default_pass_ks(8), default_pass_ks(12)
    ((1, 2, 4, 8), (1, 2, 4, 8, 12))
    """
    powers = [1 << exponent for exponent in range(n.bit_length()) if 1 << exponent < n]
    return (*powers, n)


def _pass_at_k_where_sampled(samples: Sequence[int], correct: Sequence[int], k: int) -> PassRecord | None:
    """Return pass@k over the problems with at least k samples, or None if there is no such problem."""
    enough = [(n, c) for n, c in zip(samples, correct, strict=True) if n >= k]
    if not enough:
        return None
    return {"value": pass_at_k([n for n, _ in enough], [c for _, c in enough], k), "problems": len(enough)}


def _verdict_for_vote(rollout: RolloutSummary) -> Verdict:
    """Return the verdict for voting, derived from the reward if the environment does not grade."""
    if rollout.verdict is not None:
        return rollout.verdict
    return Verdict.CORRECT if rollout.correct else Verdict.INCORRECT


def _rollout_statistics(counted: Sequence[RolloutSummary]) -> RolloutStatistics:
    ended = Counter(rollout.ended.value for rollout in counted)
    truncated = {kind.value: ended[kind.value] for kind in Ended if kind.is_truncation}
    return {
        "ended": dict(sorted(ended.items())),
        "verdicts": dict(
            sorted(Counter(rollout.verdict.value for rollout in counted if rollout.verdict is not None).items())
        ),
        "turns": _mean(rollout.model_turns for rollout in counted),
        "tool_calls": {
            "mean": _mean(len(rollout.outcomes) for rollout in counted),
            "outcomes": dict(sorted(Counter(outcome for rollout in counted for outcome in rollout.outcomes).items())),
        },
        "truncated": {"share": sum(truncated.values()) / len(counted), **truncated},
        "void_share": ended[Ended.VOID_TURN.value] / len(counted),
        "tokens": {
            "prompt_mean": _mean(rollout.prompt_tokens for rollout in counted),
            "model_mean": _mean(rollout.model_tokens for rollout in counted),
            "response_mean": _mean(rollout.tokens for rollout in counted),
            "model_total": sum(rollout.model_tokens for rollout in counted),
        },
    }


def _count_excluded(rollouts: Sequence[RolloutSummary]) -> dict[str, int]:
    """Count excluded rollouts by kind. ``retried`` counts all retries after infrastructure failures."""
    kinds = Counter(
        rollout.ended.value if rollout.ended.is_excluded else str(rollout.verdict)
        for rollout in rollouts
        if rollout.is_excluded
    )
    return {
        "total": sum(kinds.values()),
        "retried": sum(rollout.attempt for rollout in rollouts),
        **dict(sorted(kinds.items())),
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


FORMAT = 1


async def make_results(
    provenance: Provenance, sets: Sequence[ProblemSet], index: RolloutIndex, ks: Sequence[int], grader: AnswerGrader
) -> Results:
    """Build ``results.json``. Raises WorldError if all rollouts of a benchmark are excluded."""
    benchmarks: dict[str, BenchmarkResults] = {}
    for one in sets:
        try:
            benchmarks[one.name] = await compute_benchmark_results(one, index, ks=ks, grader=grader)
        except ValueError as error:
            raise WorldError(
                f"{one.name}: every rollout failed for reasons outside the policy, so there is no score: run the same "
                f"command again to retry them ({error})"
            ) from error
    return {
        "format": FORMAT,
        "agentrl": agentrl.__version__,
        "provenance": provenance,
        "benchmarks": benchmarks,
    }


CellFormats = Mapping[str, Callable[[BenchmarkResults], str]]
"""Columns of a table, by name: functions that format the cell of a benchmark."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text: title, column names and rows. The first column contains names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) + ("---:",) * (len(self.columns) - 1), *self.rows]
        return f"**{self.title}**\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def build_result_tables(results: Results) -> list[Table]:
    """Build the tables of a finished evaluation: scores, pass@k, outcomes, averages, and excluded rollouts."""
    benchmarks = results["benchmarks"]
    n = results["provenance"]["sampling"]["n"]
    ks = dict.fromkeys(k for one in benchmarks.values() for k in one["pass"])

    def table(title: str, cells: CellFormats) -> Table:
        rows = tuple((name, *(cell(one) for cell in cells.values())) for name, one in benchmarks.items())
        return Table(title=title, columns=("benchmark", *cells), rows=rows)

    scores: CellFormats = {
        f"avg@{n}": lambda one: f"{one['avg']['mean']:.3f}",
        "95 % this benchmark": lambda one: _format_interval(one["avg"]["this_benchmark"]),
        "95 % problems like these": lambda one: _format_interval(one["avg"]["problems_like_these"]),
        f"maj@{n}": lambda one: "-" if one["maj"] is None else f"{one['maj']:.3f}",
        "problems": _format_problems,
    }
    return [
        table("Scores", scores),
        table("pass@k, unbiased", {f"pass@{k}": partial(_format_pass, k=k) for k in ks}),
        table(
            "Outcomes of rollouts; all except correct and excluded count as wrong",
            {shown: partial(_format_kind, kind=kind) for kind, shown in RESULT_KINDS.items()},
        ),
        table("Averages per rollout", _AVERAGE_CELLS),
        table("Failures outside the policy: retried, then excluded from all averages", _FAILURE_CELLS),
    ]


def _format_interval(interval: IntervalRecord) -> str:
    return f"{interval['low']:.3f} to {interval['high']:.3f}"


def _format_problems(one: BenchmarkResults) -> str:
    left_out = one["avg"]["problems_without_samples"]
    return f"{one['problems']}" + (f" ({left_out} excluded)" if left_out else "")


def _format_pass(one: BenchmarkResults, k: str) -> str:
    record = one["pass"].get(k)
    if record is None:
        return "-"
    short = "" if record["problems"] == one["problems"] else f" ({record['problems']} problems)"
    return f"{record['value']:.3f}{short}"


def _format_successful_calls(outcomes: Mapping[str, int]) -> str:
    calls: Sequence[int] = list(outcomes.values())
    return f"{outcomes.get('ok', 0) / sum(calls):.1%}" if calls else "-"


def _format_kind(one: BenchmarkResults, kind: str) -> str:
    return str(one["kinds"][kind])


def _format_excluded_kinds(one: BenchmarkResults) -> str:
    kinds = (f"{kind} {count}" for kind, count in one["excluded"].items() if kind not in ("total", "retried"))
    return ", ".join(kinds) or "-"


_AVERAGE_CELLS: CellFormats = {
    "turns": lambda one: f"{one['turns']:.2f}",
    "tool calls": lambda one: f"{one['tool_calls']['mean']:.2f}",
    "successful calls": lambda one: _format_successful_calls(one["tool_calls"]["outcomes"]),
    "truncated": lambda one: f"{one['truncated']['share']:.1%}",
    "void": lambda one: f"{one['void_share']:.1%}",
    "tokens": lambda one: f"{one['tokens']['response_mean']:.0f}",
    "model tokens": lambda one: f"{one['tokens']['model_mean']:.0f}",
    "seconds": lambda one: f"{one['seconds']['mean']:.1f}",
}
_FAILURE_CELLS: CellFormats = {
    "rollouts": lambda one: str(one["rollouts"]),
    "excluded": lambda one: str(one["excluded"]["total"]),
    "kinds": _format_excluded_kinds,
    "restarts": lambda one: str(one["excluded"]["retried"]),
}
