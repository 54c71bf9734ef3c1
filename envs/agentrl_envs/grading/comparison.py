r"""Whether two answers mean the same: part by part, in the kind of bracket of the gold answer.

>>> compare(r"\{1,2\}", "(1,2)"), compare("(-2,7)", "[-2,7]"), compare("1 < x < 2", "(1,2)")
(<Verdict.INCORRECT: 'incorrect'>, <Verdict.INCORRECT: 'incorrect'>, <Verdict.CORRECT: 'correct'>)
>>> compare("0", "x+y+z=0"), compare("5", "x=5"), compare("y-2x=3", "y=2x+3")
(<Verdict.INCORRECT: 'incorrect'>, <Verdict.CORRECT: 'correct'>, <Verdict.CORRECT: 'correct'>)

A list without brackets may be written in any, in the order of a tuple or interval; nothing else changes brackets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeGuard

from agentrl_envs.grading.equality import equal, is_for_algebra, proportional, read_latex, same_by_algebra
from agentrl_envs.grading.expressions import Apply, Expression, Number, Symbol, applied, quotient, symbols
from agentrl_envs.grading.spelling import squeezed
from agentrl_envs.grading.structure import (
    FLIPPED,
    INTERVALS,
    TO,
    Answer,
    Bracketed,
    Clock,
    Leaf,
    Numeral,
    Relation,
    Unread,
    Words,
    is_named,
    read_answer,
)
from agentrl_envs.grading.units import conversion
from agentrl_envs.grading.values import NoValueError, value_of
from agentrl_envs.types import Verdict

_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
_ROUGHLY = 0.05  # relative: what is called approximately equal
_UNORDERED = frozenset({"list", "set", "union"})
_RADIANS = quotient(Apply("pi", ()), Number(Fraction(180)))  # radians per degree
_OF_RADIANS = frozenset({"pi", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc"})
_ASKED_FOR = frozenset({"*", "over", "abs", "sin", "cos", "tan", "sec", "csc", "cot", "ln", "det"})


def compare(answer: str, gold: str) -> Verdict:
    """The verdict on an answer. One whose comparison needs too much memory is as wrong as one that takes too long."""
    try:
        wanted = read_answer(gold)
    except (MemoryError, RecursionError):
        return Verdict.GRADER_TIMEOUT
    try:
        said = read_answer(answer)
        if same(wanted, said) or _with_decimal_comma(answer, wanted) or _by_algebra(said, wanted):
            return Verdict.CORRECT
    except (MemoryError, RecursionError):
        return Verdict.ANSWER_TIMEOUT
    if not _understood(wanted):
        return Verdict.UNPARSABLE_GOLD
    return Verdict.INCORRECT if _understood(said) else Verdict.UNPARSABLE_ANSWER


def read_gold(gold: str) -> None:
    """Read a gold answer ahead of `compare`, which remembers it: what that takes is not the answer's fault."""
    with suppress(MemoryError, RecursionError):  # said by `compare`
        _understood(read_answer(gold))


def check_gold(gold: str) -> Verdict:
    """`Verdict.CORRECT` where the gold answer can be read and equals itself; equal texts are not enough."""
    try:
        wanted = read_answer(gold)
        _by_algebra(read_answer("7919"), wanted)  # takes as long as any comparison with it
        if isinstance(wanted, Unread):
            return Verdict.CORRECT if same_by_algebra(wanted.text, wanted.text) else Verdict.UNPARSABLE_GOLD
        return Verdict.CORRECT if same(wanted, wanted) else Verdict.UNPARSABLE_GOLD
    except (MemoryError, RecursionError):
        return Verdict.GRADER_TIMEOUT


def _understood(answer: Answer) -> bool:
    return not isinstance(answer, Unread) or (is_for_algebra(answer.text) and read_latex(answer.text) is not None)


def _by_algebra(answer: Answer, gold: Answer) -> bool:
    """Where values do not decide: a text that only math-verify reads, or sets that are written in different ways."""
    both = (answer, gold)
    unread = any(isinstance(one, Unread) for one in both)
    series = isinstance(answer, Leaf) and isinstance(gold, Leaf) and equal(gold.tree, answer.tree) is None
    sets = all(map(_is_set, both)) and any(map(_has_other_forms, both))
    return (unread or series or sets) and same_by_algebra(answer.text, gold.text)


def _is_set(answer: Answer) -> bool:
    return _has_other_forms(answer) or (isinstance(answer, Bracketed) and answer.kind in INTERVALS)


def _has_other_forms(answer: Answer) -> bool:
    """Whether it is an inequality or a union, which may be written in many ways."""
    match answer:
        case Relation():
            return "=" not in answer.signs
        case Bracketed():
            return answer.kind == "union"
    return False


def _with_decimal_comma(answer: str, gold: Answer) -> bool:
    """A decimal comma is read in answers only; in a gold answer it separates."""
    answer = answer.strip()
    return _DECIMAL_COMMA.fullmatch(answer) is not None and same(gold, read_answer(answer.replace(",", ".")))


def same(gold: Answer, answer: Answer) -> bool:
    """Whether an answer means what the gold answer does."""
    if squeezed(gold.text) == squeezed(answer.text) and gold.text:
        return True
    match gold, answer:
        case (Unread(), _) | (_, Unread()):
            return False
        case (Words(), _) | (_, Words()):
            return _same_words(gold, answer)
        case (Numeral(), _) | (_, Numeral()):
            return _same_numeral(gold, answer)
        case Relation(), Relation():
            return _same_relation(gold, answer)
        case Relation(), _:
            return is_named(gold.parts[0]) and _is_assignment(gold) and same(gold.parts[-1], answer)
        case _, Relation():
            return _gives_its_right_side(answer) and same(gold, answer.parts[-1])
        case (Clock(), _) | (_, Clock()):
            return _same_time(gold, answer)
        case Bracketed(), Bracketed():
            return _same_group(gold, answer)
        case Bracketed(), _:
            return _same_parts(gold, answer)
        case _, Bracketed():
            return _same_as_group(gold, answer)
        case Leaf(), Leaf():
            return _same_leaf(gold, answer)
    return False


def _same_words(gold: Answer, answer: Answer) -> bool:
    trees = [_number_of(one) if isinstance(one, Words) else getattr(one, "tree", None) for one in (gold, answer)]
    if trees[0] is not None and trees[1] is not None:
        return equal(trees[0], trees[1]) is True
    first, second = (one.text.casefold() for one in (gold, answer))
    return first == second


def _number_of(words: Words) -> Number | None:
    return None if words.number is None else Number(words.number)


def _same_time(gold: Answer, answer: Answer) -> bool:
    """Compare times of day. A missing ``am`` or ``pm`` may be either, and 22:30 equals 10:30 pm.

    ``3:10`` also equals the ratio or fraction 3/10, and ``9 a.m.`` equals 9.
    """
    if isinstance(gold, Clock) and isinstance(answer, Clock):
        if not (gold.half and answer.half) and gold.seconds == answer.seconds:
            return True
        return (gold.half or answer.half) != "" and _second_of_day(gold) == _second_of_day(answer)
    clock, other = (gold, answer) if isinstance(gold, Clock) else (answer, gold)
    assert isinstance(clock, Clock)
    numbers = [Leaf(digits, Number(Fraction(digits))) for digits in re.findall(r"\d+", clock.text)]
    if isinstance(other, Bracketed):
        return (
            len(numbers) == 3 and not clock.half and _same_group(Bracketed(clock.text, "ratio", tuple(numbers)), other)
        )
    if not isinstance(other, Leaf) or len(numbers) != (1 if clock.half else 2):
        return False
    return other.tree == (numbers[0].tree if clock.half else quotient(numbers[0].tree, numbers[1].tree))


def _second_of_day(clock: Clock) -> int:
    return clock.seconds % 43_200 + 43_200 * (clock.half == "pm") if clock.half else clock.seconds


def _same_numeral(gold: Answer, answer: Answer) -> bool:
    """Digits of some base; the base may be left out on either side, where the rest is nothing but digits."""
    if isinstance(gold, Numeral) and isinstance(answer, Numeral):
        return (gold.digits, gold.base) == (answer.digits, answer.base)
    numeral, other = (gold, answer) if isinstance(gold, Numeral) else (answer, gold)
    return isinstance(numeral, Numeral) and isinstance(other, Leaf) and other.text.upper() == numeral.digits


def _same_leaf(gold: Leaf, answer: Leaf) -> bool:
    factor = conversion(answer.unit, gold.unit)
    if factor is not None:
        wanted = gold.tree if factor == 1 else Apply("*", (gold.tree, Number(factor)))
        if equal(wanted, answer.tree) is True or _same_angle(gold, answer):
            return True
    elif _same_angle(gold, answer):
        return True
    return answer.measured is not None and not symbols(gold.tree) and _same_leaf(gold, answer.measured)


def _same_angle(gold: Leaf, answer: Leaf) -> bool:
    """Compare degrees with radians. A number counts as radians by its unit, or if it contains pi or an arc function."""
    degrees = [leaf for leaf in (gold, answer) if leaf.unit is not None and leaf.unit.dimension == (("°", 1),)]
    if len(degrees) != 1:
        return False
    other = answer if degrees[0] is gold else gold
    radians = (
        not applied(other.tree).isdisjoint(_OF_RADIANS) if other.unit is None else other.unit.dimension == (("rad", 1),)
    )
    return radians and equal(Apply("*", (degrees[0].tree, _RADIANS)), other.tree) is True


def _same_group(gold: Bracketed, answer: Bracketed) -> bool:
    if gold.variable is not None and answer.variable is not None and not _same_name(gold.variable, answer.variable):
        return False
    if gold.kind == answer.kind == "ratio":
        return _same_ratio(gold, answer)
    if gold.kind == answer.kind:
        return _same_parts(gold, answer, ordered=gold.kind not in _UNORDERED)
    if {gold.kind, answer.kind} <= _UNORDERED:
        return _same_parts(gold, answer, ordered=False)
    ordered = {"()", "<>", "list"}
    if gold.kind in ordered and answer.kind in ordered:
        return _same_parts(gold, answer, ordered=True)
    return gold.kind == "list" and answer.kind == "[]" and _same_parts(gold, answer, ordered=False)


def _same_parts(gold: Bracketed, answer: Answer, *, ordered: bool = False) -> bool:
    if not isinstance(answer, Bracketed):
        vector = _as_vector(answer)
        if vector is not None:
            return gold.kind in ("()", "<>") and _same_parts(gold, vector, ordered=True)
        if gold.kind == "ratio":
            return _same_quotient(gold, answer)
        parts = _without_repeats(gold.parts, allowed=len(gold.parts)) if gold.kind == "set" else gold.parts
        return gold.kind in ("set", "[]") and len(parts) == 1 and same(parts[0], answer)
    if ordered:
        return len(gold.parts) == len(answer.parts) and all(map(same, gold.parts, answer.parts))
    if gold.kind == answer.kind == "set":  # repeated elements do not count
        return all(any(same(part, other) for other in answer.parts) for part in gold.parts) and all(
            any(same(part, other) for part in gold.parts) for other in answer.parts
        )
    left = _without_repeats(answer.parts, allowed=len(answer.parts) - len(gold.parts))
    for part in gold.parts:
        found = next((place for place, other in enumerate(left) if same(part, other)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _without_repeats(parts: Sequence[Answer], *, allowed: int) -> list[Answer]:
    """Return the parts, without repetitions if ``allowed``, the surplus over the gold answer's parts, is positive."""
    if allowed <= 0:
        return list(parts)
    kept: list[Answer] = []
    for part in parts:
        if not any(same(other, part) for other in kept):
            kept.append(part)
    return kept


def _same_as_group(gold: Answer, answer: Bracketed) -> bool:
    """A single gold answer in brackets, or a matrix as lists."""
    matrix = _as_lists(gold)
    if matrix is not None:
        vector = _as_vector(gold)
        return same(matrix, answer) or (
            vector is not None and answer.kind in ("()", "<>", "[]") and _same_parts(vector, answer, ordered=True)
        )
    if answer.kind == "ratio":
        return _same_quotient(answer, gold)
    return answer.kind in ("set", "[]") and _same_parts(replace(answer, parts=(gold,)), answer)


def _same_quotient(ratio: Bracketed, other: Answer) -> bool:
    """Compare a ratio with a number: ``3:2`` equals 3/2. ``3 to 2`` may be a range, so it never equals 3 or 2."""
    trees = [part.tree for part in ratio.parts if isinstance(part, Leaf)]
    if len(trees) != 2 or len(ratio.parts) != 2 or not isinstance(other, Leaf):
        return False
    if TO in ratio.text and any(equal(tree, other.tree) for tree in trees):
        return False
    return equal(quotient(*trees), other.tree) is True


def _as_lists(answer: Answer) -> Bracketed | None:
    """A matrix as the list of its rows."""
    match answer:
        case Leaf(text, Apply("matrix", rows)):
            lists = [tuple(Leaf("", cell) for cell in row.arguments) for row in rows if isinstance(row, Apply)]
            return Bracketed(text, "[]", tuple(Bracketed("", "[]", cells) for cells in lists))
    return None


def _as_vector(answer: Answer) -> Bracketed | None:
    """A matrix of one row or column as a tuple."""
    matrix = _as_lists(answer)
    rows = [row.parts for row in matrix.parts if isinstance(row, Bracketed)] if matrix is not None else []
    cells = rows[0] if len(rows) == 1 else tuple(row[0] for row in rows if len(row) == 1)
    return Bracketed(answer.text, "<>", cells) if cells else None


def _same_ratio(gold: Bracketed, answer: Bracketed) -> bool:
    if len(gold.parts) != len(answer.parts):
        return False
    values = []
    for group in (gold, answer):
        trees = [part.tree for part in group.parts if isinstance(part, Leaf)]
        values.append([quotient(tree, trees[-1]) for tree in trees])
    return len(values[0]) == len(values[1]) and all(
        equal(one, other) is True for one, other in zip(*values, strict=True)
    )


def _same_relation(gold: Relation, answer: Relation) -> bool:
    if _is_assignment(gold) and _is_assignment(answer):
        if _numbers_differ(answer):
            return False
        if is_named(gold.parts[0]) and is_named(answer.parts[0]):
            names = _same_names(gold.parts[0], answer.parts[0])
            if names and same(gold.parts[-1], answer.parts[-1]):
                return True
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return gold.signs == answer.signs and all(map(same, gold.parts, answer.parts))
    wanted, said = _difference(gold), _difference(answer)
    ratio = proportional(wanted, said) if wanted is not None and said is not None else None
    if ratio is None or ratio == 0:
        return False
    sign = answer.signs[0] if ratio > 0 else FLIPPED.get(answer.signs[0], answer.signs[0])
    return sign == gold.signs[0]


def _difference(relation: Relation) -> Expression | None:
    left, right = relation.parts
    if isinstance(left, Leaf) and isinstance(right, Leaf):
        return Apply("+", (left.tree, Apply("neg", (right.tree,))))
    return None


def _is_assignment(relation: Relation) -> bool:
    return set(relation.signs) <= {"=", "~"}


def _same_names(gold: Answer, answer: Answer) -> bool:
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _same_name(gold.tree, answer.tree)
    return same(gold, answer)


def _same_name(gold: Expression, answer: Expression) -> bool:
    """``y`` is the value of every function."""
    if any(one == Symbol("y") and isinstance(other, Apply) for one, other in ((gold, answer), (answer, gold))):
        return True
    return gold == answer


def _gives_its_right_side(relation: Relation) -> bool:
    """Return whether a relation states the value of its left side: a name, a number, or sums and products of names.

    ``a + b = 7`` states 7. ``2x = 10``, ``-x = 5`` and ``x^n = 9`` are equations to solve, and ``ax + by = c`` is a
    relation of variables.
    """
    if not _is_assignment(relation) or _numbers_differ(relation):
        return False
    left, right = relation.parts[0], relation.parts[-1]
    if is_named(left) or not isinstance(left, Leaf):
        return is_named(left)
    if not symbols(left.tree):
        return True
    return _of_names(left.tree) and not (isinstance(right, Leaf) and symbols(right.tree))


def _of_names(tree: Expression) -> bool:
    match tree:
        case Apply("+", terms):
            return all(_of_names(term.arguments[0] if _is_negative(term) else term) for term in terms)
        case Apply(function, arguments):
            return function.startswith("call ") or (function in _ASKED_FOR and all(map(_of_names, arguments)))
    return isinstance(tree, Symbol)


def _is_negative(tree: Expression) -> TypeGuard[Apply]:
    return isinstance(tree, Apply) and tree.function == "neg"


def _numbers_differ(relation: Relation) -> bool:
    """Whether numbers are said to be equal that are not."""
    rounded = "~" in relation.signs
    trees = [part.tree for part in relation.parts if isinstance(part, Leaf) and not symbols(part.tree)]
    trees = [tree for tree in trees if not any(function.startswith("call ") for function in applied(tree))]
    return any(not (equal(one, other) or (rounded and _roughly(one, other))) for one, other in pairwise(trees))


def _roughly(one: Expression, other: Expression) -> bool:
    """Whether a number may be called approximately another: to the places it is given in, else to 5 %."""
    try:
        first, second = value_of(one, {}, 20), value_of(other, {}, 20)
    except NoValueError:
        return False
    if isinstance(first, tuple) or isinstance(second, tuple):
        return False
    places = other.places if isinstance(other, Number) else 0
    return bool(abs(first - second) <= (0.5001 * 10.0**-places if places else _ROUGHLY * max(abs(first), abs(second))))
