"""Demonstrations from human-written problems: rows whose ``formula`` (``(25+5)/6=5``) computes the answer.

A row is usable if its formula is one expression of integers that evaluates to the reference answer, and if every number
of the formula appears in the statement. The demonstration is one program, ``final_answer((25+5)//6)``. Variants replace
these numbers in both, so that all results remain non-negative integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from agentrl.problems.demonstrations.demonstration import Demonstration, ShownTurn, program
from agentrl.problems.demonstrations.formulas import Formula, FormulaError
from agentrl.problems.fields import problem_of
from agentrl.problems.numbers import Mention, number_mentions, replace_mentions
from agentrl.problems.problem_errors import EmptyProblemsError
from agentrl.problems.rows import read_jsonl
from agentrl_envs.types import Problem

TRIES = 200  # attempts to sample other numbers for a variant
MAGNITUDES = ((2, 12), (13, 99), (100, 999), (1000, 9999), (10_000, 99_999))


@dataclass(frozen=True, kw_only=True, slots=True)
class FormulaReport:
    """Numbers of ``usable`` rows, of unusable rows by reason, and of demonstrations made from the usable ones."""

    rows: int
    usable: int
    demonstrations: int
    unusable: Mapping[str, int]

    def describe(self) -> str:
        """Summarise the report in one line for the console."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.unusable.items()))
        return (
            f"{self.usable} of {self.rows} problems usable, {self.demonstrations} demonstrations; left out: {reasons}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Solved:
    """A problem, its formula, and the positions of the formula's numbers in the statement."""

    problem: Problem
    formula: Formula
    mentions: tuple[Mention, ...]


def formula_demonstrations(
    path: str | Path, *, variants: int = 1, seed: int = 0
) -> tuple[list[Demonstration], FormulaReport]:
    """Make demonstrations of the usable rows of a JSONL file: ``variants`` per row, all but the first renumbered.

    Ids of variants end in ``~1``, ``~2``, ... Raises ProblemFileError (missing file, malformed line),
    ProblemFieldError (no statement) and EmptyProblemsError (no usable row).
    """
    if variants < 1:
        raise ValueError(f"variants must be at least 1, got {variants}")
    unusable: Counter[str] = Counter()
    made: list[Demonstration] = []
    rows = 0
    for location, row in read_jsonl(Path(path)):
        rows += 1
        solved = _solve(problem_of(row, location, source=Path(path).stem, fields={}), row.get("formula"))
        if isinstance(solved, str):
            unusable[solved] += 1
        else:
            made.extend(_variants(solved, variants, seed))
    if not made:
        raise EmptyProblemsError(f"{path}: none of the {rows} rows has a formula that a program can compute")
    usable = rows - unusable.total()
    return made, FormulaReport(rows=rows, usable=usable, demonstrations=len(made), unusable=dict(unusable))


def _solve(problem: Problem, formula: object) -> _Solved | str:
    """Return the solved problem, or the reason why the row is unusable."""
    if problem.answer is None:
        return "without an answer"
    if not isinstance(formula, str) or not formula.strip():
        return "without a formula"
    try:
        parsed = Formula.parse(formula)
        if str(parsed.value()) != problem.answer:
            return "whose formula gives another answer"
    except FormulaError as error:
        return error.reason
    mentions = tuple(mention for mention in number_mentions(problem.statement) if mention.value in parsed.numbers)
    if {mention.value for mention in mentions} != set(parsed.numbers):
        return "whose statement lacks a number of the formula"
    return _Solved(problem=problem, formula=parsed, mentions=mentions)


def _variants(solved: _Solved, variants: int, seed: int) -> Iterator[Demonstration]:
    yield _demonstration(solved.problem, solved.formula)
    seen = {solved.problem.statement}
    for number in range(1, variants):
        rng = Random(f"{seed}:{solved.problem.id}:{number}")
        renumbered = _renumber(solved, rng)
        if renumbered is None:
            continue
        formula, statement = renumbered
        if statement in seen:
            continue
        seen.add(statement)
        problem = Problem(
            id=f"{solved.problem.id}~{number}",
            statement=statement,
            answer=str(formula.value()),
            source=solved.problem.source,
            family=solved.problem.family,
        )
        yield _demonstration(problem, formula)


def _renumber(solved: _Solved, rng: Random) -> tuple[Formula, str] | None:
    """Replace numbers by others of the same magnitude. Equal numbers stay equal."""
    # 0 and 1 stay, because they are often words of another meaning ("each one").
    fixed = {0, 1}
    values = [value for value in solved.formula.numbers if value not in fixed]
    original = solved.formula.value()
    if not values:
        return None
    for _ in range(TRIES):
        drawn = {value: rng.randint(*_magnitude(value)) for value in values}
        if len(set(drawn.values())) < len(values):
            continue
        formula = solved.formula.with_numbers(drawn)
        try:
            if formula.value() > 0 or original == 0:
                return formula, replace_mentions(solved.problem.statement, solved.mentions, drawn)
        except FormulaError:
            continue
    return None


def _magnitude(value: int) -> tuple[int, int]:
    return next((bounds for bounds in MAGNITUDES if value <= bounds[1]), (value // 2, value * 2))


def _demonstration(problem: Problem, formula: Formula) -> Demonstration:
    return Demonstration(problem=problem, turns=(ShownTurn(model=program(f"final_answer({formula.python()})")),))
