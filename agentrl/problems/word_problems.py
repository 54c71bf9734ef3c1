"""Demonstrations from human-written problems with a ``formula`` (``(25+5)/6=5``) that computes the answer.

A row is usable if its formula is one expression of integers that evaluates to the reference answer, and if every number
of the formula occurs in the statement, as digits or as English words. The demonstration is one program,
``final_answer((25+5)//6)``. Variants replace the formula's numbers in statement and formula, so that all results remain
non-negative integers. Formulas consist of integers, ``+ - * /`` and parentheses. They are parsed without ``eval``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from agentrl.problems.demonstrations import Demonstration, final_answer_turn
from agentrl.problems.rows import EmptyProblemsError, problem_from_row, read_jsonl
from agentrl_envs.types import Problem

MAX_LENGTH: Final = 200  # characters; limits the depth of the parser
MAX_VALUE: Final = 10**12

_ARITHMETIC_TEXT = re.compile(r"[\d\s()+*/.,-]+")
_NUMBER = re.compile(r"\d+")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class FormulaError(ValueError):
    """The formula cannot be computed with integers."""


@dataclass(frozen=True, slots=True)
class Formula:
    """An arithmetic expression of integers.

    >>> formula = Formula.parse("(25+5)/6=5")
    >>> formula.numbers, formula.value(), formula.to_python()
    ((25, 5, 6), 5, '(25+5)//6')
    >>> formula.with_numbers({25: 40, 5: 8}).to_python()
    '(40+8)//6'
    """

    tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Parse ``LEFT=RIGHT`` (RIGHT must be a number that equals LEFT) or ``LEFT`` alone.

        Raises FormulaError if the formula contains more than integers, ``+ - * /`` and parentheses.
        """
        left, equals, right = text.partition("=")
        if len(text) > MAX_LENGTH or not _ARITHMETIC_TEXT.fullmatch(left):
            raise FormulaError("the formula contains more than integer arithmetic")
        if equals and not _ARITHMETIC_TEXT.fullmatch(right):
            raise FormulaError("the formula contains more than integer arithmetic")
        try:
            tree = ast.parse(re.sub(r"(?<=\d),(?=\d{3})", "", left).strip(), mode="eval").body
        except SyntaxError as error:
            raise FormulaError("the formula is malformed") from error
        formula = cls(_to_integer_arithmetic(tree))
        if equals and str(formula.value()) != right.strip().replace(",", ""):
            raise FormulaError("the formula does not evaluate to its stated result")
        return formula

    @property
    def numbers(self) -> tuple[int, ...]:
        """Distinct numbers in the formula, in order of appearance."""
        return tuple(dict.fromkeys(map(int, _NUMBER.findall(self.to_python()))))

    def value(self, *, floor: bool = False) -> int:
        """Compute the value. With ``floor``, divisions round down as in Python.

        Raises FormulaError if a division without ``floor`` has a remainder, or if an intermediate result is negative or
        exceeds ``MAX_VALUE``.

        >>> Formula.parse("(50+59)//2").value(floor=True)
        54
        """
        return _evaluate(self.tree, floor)

    def to_python(self) -> str:
        """Return the formula in Python, with as few parentheses as possible."""
        return ast.unparse(self.tree).replace(" ", "")

    def with_numbers(self, replaced: Mapping[int, int]) -> Formula:
        """Return a copy in which the keys of ``replaced`` are replaced by their values. Other numbers are unchanged."""
        text = _NUMBER.sub(lambda match: str(replaced.get(int(match[0]), int(match[0]))), self.to_python())
        return Formula(ast.parse(text, mode="eval").body)


def _to_integer_arithmetic(node: ast.expr) -> ast.expr:
    """Convert constants to integers and ``/`` to ``//``. Raises FormulaError for nodes that are not arithmetic."""
    if isinstance(node, ast.BinOp):
        sign = ast.FloorDiv() if isinstance(node.op, ast.Div) else node.op
        if type(sign) in _OPERATORS:
            return ast.BinOp(left=_to_integer_arithmetic(node.left), op=sign, right=_to_integer_arithmetic(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        if node.value != int(node.value):
            raise FormulaError("the formula contains decimals")
        return ast.Constant(value=int(node.value))
    raise FormulaError("the formula contains more than integer arithmetic")


def _evaluate(node: ast.expr, floor: bool) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    assert isinstance(node, ast.BinOp)  # ensured by `_to_integer_arithmetic`
    left, right = _evaluate(node.left, floor), _evaluate(node.right, floor)
    if isinstance(node.op, ast.FloorDiv) and (right == 0 or (left % right and not floor)):
        raise FormulaError("a division leaves a remainder")
    value = _OPERATORS[type(node.op)](left, right)
    if not 0 <= value <= MAX_VALUE:
        raise FormulaError("an intermediate result is negative or very large")
    return value


# fmt: off
UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on
SCALES = {"hundred": 100, "thousand": 1000, "million": 1_000_000}

_SMALL_NUMBER_WORDS = {word: value for value, word in enumerate(UNITS)} | {
    word: 10 * (2 + i) for i, word in enumerate(TENS)
}
_NUMBER_WORD = "|".join(sorted([*_SMALL_NUMBER_WORDS, *SCALES], key=len, reverse=True))

DIGITS_PATTERN = r"\d+(?:,\d{3})*(?:\.\d+)?"
WORDS_PATTERN = rf"\b(?:{_NUMBER_WORD})(?:(?:\s+and\s+|[\s-]+)(?:{_NUMBER_WORD}))*\b"
NUMBER = re.compile(rf"(?P<digits>{DIGITS_PATTERN})|(?P<words>{WORDS_PATTERN})", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberMention:
    """The integer ``value`` at ``text[start:end]``."""

    start: int
    end: int
    value: int


def number_mentions(text: str) -> tuple[NumberMention, ...]:
    """Return every integer in ``text``, in order. Skips decimals, ordinals and numbers inside words.

    >>> [mention.value for mention in number_mentions("Twenty-six pens, 1,250 cups, 2.5 kg and the 3rd of two dozen.")]
    [26, 1250, 2]
    """
    mentions = []
    for match in NUMBER.finditer(text):
        value = _integer_or_none(match["digits"]) if match["digits"] else number_from_words(match["words"])
        if value is not None and not _is_part_of_word(text, match.start(), match.end()):
            mentions.append(NumberMention(start=match.start(), end=match.end(), value=value))
    return tuple(mentions)


def replace_mentions(text: str, mentions: Sequence[NumberMention], new_by_old: Mapping[int, int]) -> str:
    """Return ``text`` with each mention of a key of ``new_by_old`` replaced by the value, in digits.

    >>> replace_mentions("Two cups and 2 pens", number_mentions("Two cups and 2 pens"), {2: 31})
    '31 cups and 31 pens'
    """
    parts = []
    position = 0
    for mention in mentions:
        if mention.value in new_by_old:
            parts += [text[position : mention.start], str(new_by_old[mention.value])]
            position = mention.end
    return "".join([*parts, text[position:]])


def number_from_words(words: str) -> int | None:
    """Return the value of a number in English words, or None if the words are several consecutive numbers.

    >>> [number_from_words(text) for text in ("three hundred and forty-nine", "two thousand", "two three")]
    [349, 2000, None]
    """
    total = group = 0
    previous = SCALES["million"] * 10  # the next small number must be less than the previous one
    for word in re.split(r"[\s-]+", words.lower()):
        if word == "and":
            continue
        if word in SCALES:
            scale = SCALES[word]
            group = max(group, 1) * scale
            if scale > 100:
                total, group = total + group, 0
            previous = scale
            continue
        value = _SMALL_NUMBER_WORDS[word]
        if value >= previous or (previous < 100 and (previous < 20 or value > 9)):
            return None
        group += value
        previous = value
    return total + group


def _integer_or_none(digits: str) -> int | None:
    plain = digits.replace(",", "")
    return None if "." in plain else int(plain)


def _is_part_of_word(text: str, start: int, end: int) -> bool:
    """Return True if the match is part of a word or a larger number: ``3rd``, ``A4``, ``.5``, ``1/2``."""
    before, after = text[start - 1 : start], text[end : end + 1]
    if before.isalnum() or before in {".", "/"} or after.isalpha() or after == "/":
        return True
    return after == "-" and text[end + 1 : end + 2].isdigit()


MAX_TRIES = 200  # attempts to sample numbers that keep every result a non-negative integer
MAGNITUDES = ((2, 12), (13, 99), (100, 999), (1000, 9999), (10_000, 99_999))


@dataclass(frozen=True, kw_only=True, slots=True)
class FormulaReport:
    """Number of rows, usable rows and demonstrations, and number of unusable rows by reason."""

    rows: int
    usable: int
    demonstrations: int
    unusable: Mapping[str, int]

    def describe(self) -> str:
        """Summarize the report in one line for the console."""
        reasons = ", ".join(f"{count} ({reason})" for reason, count in sorted(self.unusable.items()))
        return (
            f"{self.usable} of {self.rows} problems are usable and yield {self.demonstrations} demonstrations; "
            f"left out: {reasons}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _UsableProblem:
    """A problem, its formula, and the positions of the formula's numbers in the statement."""

    problem: Problem
    formula: Formula
    mentions: tuple[NumberMention, ...]


def formula_demonstrations(
    path: str | Path, *, variants: int = 1, seed: int = 0
) -> tuple[list[Demonstration], FormulaReport]:
    """Create up to ``variants`` demonstrations from each usable row of a JSONL file.

    The first variant of a row is the original. The other variants have new numbers, and their ids end in ``~1``,
    ``~2``, ... Raises ProblemFileError for a missing file or a malformed line, ProblemFieldError for a row without a
    statement, and EmptyProblemsError if no row is usable.
    """
    if variants < 1:
        raise ValueError(f"variants must be at least 1, got {variants}")
    unusable: Counter[str] = Counter()
    made: list[Demonstration] = []
    rows = 0
    for location, row in read_jsonl(Path(path)):
        rows += 1
        solved = _usable_problem(problem_from_row(row, location, source=Path(path).stem, fields={}), row.get("formula"))
        if isinstance(solved, str):
            unusable[solved] += 1
        else:
            made.extend(_make_variants(solved, variants, seed))
    if not made:
        raise EmptyProblemsError(f"{path}: none of the {rows} rows has a formula that a program can compute")
    usable = rows - unusable.total()
    return made, FormulaReport(rows=rows, usable=usable, demonstrations=len(made), unusable=dict(unusable))


def _usable_problem(problem: Problem, formula: object) -> _UsableProblem | str:
    """Return the usable problem, or the reason why the row is unusable."""
    if problem.answer is None:
        return "there is no answer"
    if not isinstance(formula, str) or not formula.strip():
        return "there is no formula"
    try:
        parsed = Formula.parse(formula)
        if str(parsed.value()) != problem.answer:
            return "the formula does not equal the answer"
    except FormulaError as error:
        return str(error)
    mentions = tuple(mention for mention in number_mentions(problem.statement) if mention.value in parsed.numbers)
    if {mention.value for mention in mentions} != set(parsed.numbers):
        return "the statement lacks a number of the formula"
    return _UsableProblem(problem=problem, formula=parsed, mentions=mentions)


def _make_variants(solved: _UsableProblem, variants: int, seed: int) -> Iterator[Demonstration]:
    yield _demonstration(solved.problem, solved.formula)
    seen = {solved.problem.statement}
    for number in range(1, variants):
        rng = Random(f"{seed}:{solved.problem.id}:{number}")
        renumbered = _with_new_numbers(solved, rng)
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


def _with_new_numbers(solved: _UsableProblem, rng: Random) -> tuple[Formula, str] | None:
    """Replace numbers with random numbers of the same magnitude. Equal numbers stay equal."""
    # Keep 0 and 1, because their words often have another meaning ("each one").
    fixed = {0, 1}
    values = [value for value in solved.formula.numbers if value not in fixed]
    original = solved.formula.value()
    if not values:
        return None
    for _ in range(MAX_TRIES):
        drawn = {value: rng.randint(*_bounds_of_magnitude(value)) for value in values}
        if len(set(drawn.values())) < len(values):
            continue
        formula = solved.formula.with_numbers(drawn)
        try:
            if formula.value() > 0 or original == 0:
                return formula, replace_mentions(solved.problem.statement, solved.mentions, drawn)
        except FormulaError:
            continue
    return None


def _bounds_of_magnitude(value: int) -> tuple[int, int]:
    return next((bounds for bounds in MAGNITUDES if value <= bounds[1]), (value // 2, value * 2))


def _demonstration(problem: Problem, formula: Formula) -> Demonstration:
    return Demonstration(problem=problem, turns=(final_answer_turn(formula.to_python()),))
