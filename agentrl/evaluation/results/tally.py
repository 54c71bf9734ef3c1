"""What is kept in memory of each rollout while thousands are played, and the results that are made of it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.evaluation.data.problem_sets import ProblemSet
from agentrl.evaluation.records.transcript import Sample, Transcript
from agentrl.evaluation.results.kinds import KINDS, kind_of
from agentrl.evaluation.results.scores import avg_at_k, pass_at_k
from agentrl.evaluation.results.voting import Grades, maj_at_n, tally
from agentrl_envs.types import Ended, Verdict


@dataclass(frozen=True, slots=True)
class Brief:
    """A rollout without its conversation."""

    correct: bool
    no_data: bool
    kind: str
    ended: Ended
    verdict: Verdict | None
    answer: str | None
    attempt: int
    turns: int
    outcomes: tuple[str, ...]
    prompt_tokens: int
    model_tokens: int
    tokens: int
    seconds: float

    @classmethod
    def of(cls, transcript: Transcript) -> Brief:
        return cls(
            correct=transcript.correct,
            no_data=transcript.no_data,
            kind=kind_of(transcript),
            ended=transcript.ended,
            verdict=transcript.verdict,
            answer=transcript.answer,
            attempt=transcript.attempt,
            turns=transcript.model_turns,
            outcomes=tuple(call.outcome for call in transcript.tool_calls),
            prompt_tokens=transcript.prompt_tokens,
            model_tokens=transcript.model_tokens,
            tokens=transcript.tokens,
            seconds=transcript.seconds,
        )


class Ledger:
    """What has been played. A later attempt takes the place of an earlier one."""

    def __init__(self) -> None:
        self._briefs: dict[tuple[str, str, int], Brief] = {}
        self.correct = self.data = self.turns = 0

    def add(self, transcript: Transcript) -> None:
        before = self._briefs.get(transcript.key)
        brief = self._briefs[transcript.key] = Brief.of(transcript)
        for one, sign in ((before, -1), (brief, 1)):
            if one is not None and not one.no_data:
                self.data += sign
                self.correct += sign * one.correct
                self.turns += sign * one.turns

    def by_problem(self, benchmark: str) -> dict[str, list[Brief]]:
        """Every problem's rollouts by their number."""
        found: dict[str, list[tuple[int, Brief]]] = defaultdict(list)
        for (name, problem, number), brief in self._briefs.items():
            if name == benchmark:
                found[problem].append((number, brief))
        return {
            problem: [brief for _, brief in sorted(part, key=lambda item: item[0])] for problem, part in found.items()
        }

    @property
    def finished(self) -> int:
        """Rollouts that need not be played again."""
        return sum(brief.ended is not Ended.INFRASTRUCTURE_FAILURE for brief in self._briefs.values())

    def missing(self, sets: Iterable[ProblemSet], n: int) -> list[Sample]:
        """What is to be played: what was not, and, afresh, what failed for reasons outside the policy.

        Sample by sample, not problem by problem: what an interrupted evaluation holds is spread over all problems.
        """
        chosen = list(sets)
        found = []
        for number in range(n):
            for one in chosen:
                for problem in one.problems:
                    brief = self._briefs.get((one.name, problem.id, number))
                    if brief is None:
                        found.append(Sample(benchmark=one.name, problem=problem, number=number))
                    elif brief.ended is Ended.INFRASTRUCTURE_FAILURE:
                        again = brief.attempt + 1
                        found.append(Sample(benchmark=one.name, problem=problem, number=number, attempt=again))
        return found


async def benchmark_results(one: ProblemSet, ledger: Ledger, *, ks: Sequence[int], grader: Grades) -> dict[str, Any]:
    """One benchmark's part of ``results.json``. ValueError where no rollout holds data."""
    briefs = ledger.by_problem(one.name)
    played = [briefs.get(problem.id, []) for problem in one.problems]
    data = [[brief for brief in part if not brief.no_data] for part in played]
    samples, correct = [len(part) for part in data], [sum(brief.correct for brief in part) for part in data]
    score = avg_at_k(samples, correct)
    votes = [await tally([(brief.answer, _vote(brief)) for brief in part], grader) for part in data if part]
    families = defaultdict(list)
    for problem, part in zip(one.problems, data, strict=True):
        if part:
            families[problem.family].append(sum(brief.correct for brief in part) / len(part))
    flat = [brief for part in data for brief in part]
    everything = [brief for part in played for brief in part]
    return {
        **one.record(),
        "avg": asdict(score),
        "pass": {str(k): _pass(samples, correct, k) for k in ks},
        "maj": maj_at_n(votes),
        "families": {name: math.fsum(part) / len(part) for name, part in sorted(families.items()) if name},
        "kinds": {kind: sum(brief.kind == kind for brief in everything) for kind in KINDS},
        **_conduct(flat),
        "no_data": _no_data(everything),
        "rollouts": len(everything),
        "seconds": {"mean": _mean(brief.seconds for brief in flat), "max": max(brief.seconds for brief in flat)},
        "per_problem": {
            problem.id: {"samples": n, "correct": c}
            for problem, n, c in zip(one.problems, samples, correct, strict=True)
        },
    }


def default_ks(n: int) -> tuple[int, ...]:
    """1, 2, 4 .. and n itself.

    >>> default_ks(8), default_ks(12)
    ((1, 2, 4, 8), (1, 2, 4, 8, 12))
    """
    powers = [1 << place for place in range(n.bit_length()) if 1 << place < n]
    return (*powers, n)


def _pass(samples: Sequence[int], correct: Sequence[int], k: int) -> dict[str, float] | None:
    """pass@k over the problems with k samples; None where no problem has so many."""
    enough = [(n, c) for n, c in zip(samples, correct, strict=True) if n >= k]
    if not enough:
        return None
    return {"value": pass_at_k([n for n, _ in enough], [c for _, c in enough], k), "problems": len(enough)}


def _vote(brief: Brief) -> Verdict:
    """An environment that gives rewards and no verdicts votes by them."""
    if brief.verdict is not None:
        return brief.verdict
    return Verdict.CORRECT if brief.correct else Verdict.INCORRECT


def _conduct(data: Sequence[Brief]) -> dict[str, Any]:
    """How the rollouts that hold data went."""
    ended = Counter(brief.ended.value for brief in data)
    truncated = {kind.value: ended[kind.value] for kind in Ended if kind.is_truncation}
    return {
        "ended": dict(sorted(ended.items())),
        "verdicts": dict(sorted(Counter(brief.verdict.value for brief in data if brief.verdict is not None).items())),
        "turns": _mean(brief.turns for brief in data),
        "tool_calls": {
            "mean": _mean(len(brief.outcomes) for brief in data),
            "outcomes": dict(sorted(Counter(outcome for brief in data for outcome in brief.outcomes).items())),
        },
        "truncated": {"share": sum(truncated.values()) / len(data), **truncated},
        "void_share": ended[Ended.VOID_TURN.value] / len(data),
        "tokens": {
            "prompt_mean": _mean(brief.prompt_tokens for brief in data),
            "model_mean": _mean(brief.model_tokens for brief in data),
            "response_mean": _mean(brief.tokens for brief in data),
            "model_total": sum(brief.model_tokens for brief in data),
        },
    }


def _no_data(briefs: Sequence[Brief]) -> dict[str, int]:
    """What failed outside the policy, by kind; ``retried`` are fresh starts after such failures, successful or not."""
    kinds = Counter(
        brief.ended.value if brief.ended.is_no_data else str(brief.verdict) for brief in briefs if brief.no_data
    )
    return {
        "total": sum(kinds.values()),
        "retried": sum(brief.attempt for brief in briefs),
        **dict(sorted(kinds.items())),
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)
