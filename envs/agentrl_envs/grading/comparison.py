r"""Comparison of an answer with the reference answer, part by part. The kinds of bracket must match.

>>> compare(r"\{1,2\}", "(1,2)"), compare("(-2,7)", "[-2,7]"), compare("1 < x < 2", "(1,2)")
(<Verdict.INCORRECT: 'incorrect'>, <Verdict.INCORRECT: 'incorrect'>, <Verdict.CORRECT: 'correct'>)
>>> compare("0", "x+y+z=0"), compare("5", "x=5"), compare("y-2x=3", "y=2x+3")
(<Verdict.INCORRECT: 'incorrect'>, <Verdict.CORRECT: 'correct'>, <Verdict.CORRECT: 'correct'>)

If the reference answer is a list without brackets, the answer may be in any brackets; tuples and intervals must then
have the same order.
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
_ROUGHLY = 0.05  # relative difference up to which numbers are approximately equal
_UNORDERED = frozenset({"list", "set", "union"})
_RADIANS = quotient(Apply("pi", ()), Number(Fraction(180)))  # radians per degree
_OF_RADIANS = frozenset({"pi", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc"})
_ASKED_FOR = frozenset({"*", "over", "abs", "sin", "cos", "tan", "sec", "csc", "cot", "ln", "det"})


def compare(answer: str, reference: str) -> Verdict:
    """Return the verdict on an answer. Running out of memory is treated as a timeout."""
    try:
        wanted = read_answer(reference)
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


def read_reference(reference: str) -> None:
    """Parse and cache a reference answer before `compare`, so that parsing does not use the answer's CPU time."""
    with suppress(MemoryError, RecursionError):  # `compare` reports these
        _understood(read_answer(reference))


def check_reference(reference: str) -> Verdict:
    """Return `Verdict.CORRECT` if the reference answer can be parsed and equals itself by value."""
    try:
        wanted = read_answer(reference)
        _by_algebra(
            read_answer("7919"), wanted
        )  # compare an arbitrary answer, so that the check takes as long as a real comparison
        if isinstance(wanted, Unread):
            return Verdict.CORRECT if same_by_algebra(wanted.text, wanted.text) else Verdict.UNPARSABLE_GOLD
        return Verdict.CORRECT if same(wanted, wanted) else Verdict.UNPARSABLE_GOLD
    except (MemoryError, RecursionError):
        return Verdict.GRADER_TIMEOUT


def _understood(answer: Answer) -> bool:
    return not isinstance(answer, Unread) or (is_for_algebra(answer.text) and read_latex(answer.text) is not None)


def _by_algebra(answer: Answer, reference: Answer) -> bool:
    """Compare with math-verify: text that only math-verify can parse, or sets in different notations."""
    both = (answer, reference)
    unread = any(isinstance(one, Unread) for one in both)
    series = isinstance(answer, Leaf) and isinstance(reference, Leaf) and equal(reference.tree, answer.tree) is None
    sets = all(map(_is_set, both)) and any(map(_has_other_forms, both))
    return (unread or series or sets) and same_by_algebra(answer.text, reference.text)


def _is_set(answer: Answer) -> bool:
    return _has_other_forms(answer) or (isinstance(answer, Bracketed) and answer.kind in INTERVALS)


def _has_other_forms(answer: Answer) -> bool:
    """Return True if the answer is an inequality or a union, which have many notations."""
    match answer:
        case Relation():
            return "=" not in answer.signs
        case Bracketed():
            return answer.kind == "union"
    return False


def _with_decimal_comma(answer: str, reference: Answer) -> bool:
    """Compare, with the answer's comma as a decimal point. In a reference answer, a comma is always a separator."""
    answer = answer.strip()
    return _DECIMAL_COMMA.fullmatch(answer) is not None and same(reference, read_answer(answer.replace(",", ".")))


def same(reference: Answer, answer: Answer) -> bool:
    """Return True if a parsed answer equals the parsed reference answer."""
    if squeezed(reference.text) == squeezed(answer.text) and reference.text:
        return True
    match reference, answer:
        case (Unread(), _) | (_, Unread()):
            return False
        case (Words(), _) | (_, Words()):
            return _same_words(reference, answer)
        case (Numeral(), _) | (_, Numeral()):
            return _same_numeral(reference, answer)
        case Relation(), Relation():
            return _same_relation(reference, answer)
        case Relation(), _:
            return is_named(reference.parts[0]) and _is_assignment(reference) and same(reference.parts[-1], answer)
        case _, Relation():
            return _gives_its_right_side(answer) and same(reference, answer.parts[-1])
        case (Clock(), _) | (_, Clock()):
            return _same_time(reference, answer)
        case Bracketed(), Bracketed():
            return _same_group(reference, answer)
        case Bracketed(), _:
            return _same_parts(reference, answer)
        case _, Bracketed():
            return _same_as_group(reference, answer)
        case Leaf(), Leaf():
            return _same_leaf(reference, answer)
    return False


def _same_words(reference: Answer, answer: Answer) -> bool:
    trees = [_number_of(one) if isinstance(one, Words) else getattr(one, "tree", None) for one in (reference, answer)]
    if trees[0] is not None and trees[1] is not None:
        return equal(trees[0], trees[1]) is True
    first, second = (one.text.casefold() for one in (reference, answer))
    return first == second


def _number_of(words: Words) -> Number | None:
    return None if words.number is None else Number(words.number)


def _same_time(reference: Answer, answer: Answer) -> bool:
    """Compare times of day. A missing ``am`` or ``pm`` matches both, and 22:30 equals 10:30 pm.

    ``3:10`` also equals the ratio or fraction 3/10, and ``9 a.m.`` equals 9.
    """
    if isinstance(reference, Clock) and isinstance(answer, Clock):
        if not (reference.half and answer.half) and reference.seconds == answer.seconds:
            return True
        return (reference.half or answer.half) != "" and _second_of_day(reference) == _second_of_day(answer)
    clock, other = (reference, answer) if isinstance(reference, Clock) else (answer, reference)
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


def _same_numeral(reference: Answer, answer: Answer) -> bool:
    """Compare numerals with a base. One side may omit the base if it consists only of digits."""
    if isinstance(reference, Numeral) and isinstance(answer, Numeral):
        return (reference.digits, reference.base) == (answer.digits, answer.base)
    numeral, other = (reference, answer) if isinstance(reference, Numeral) else (answer, reference)
    return isinstance(numeral, Numeral) and isinstance(other, Leaf) and other.text.upper() == numeral.digits


def _same_leaf(reference: Leaf, answer: Leaf) -> bool:
    factor = conversion(answer.unit, reference.unit)
    if factor is not None:
        wanted = reference.tree if factor == 1 else Apply("*", (reference.tree, Number(factor)))
        if equal(wanted, answer.tree) is True or _same_angle(reference, answer):
            return True
    elif _same_angle(reference, answer):
        return True
    return answer.measured is not None and not symbols(reference.tree) and _same_leaf(reference, answer.measured)


def _same_angle(reference: Leaf, answer: Leaf) -> bool:
    """Compare degrees with radians. A number counts as radians by its unit, or if it contains pi or an arc function."""
    degrees = [leaf for leaf in (reference, answer) if leaf.unit is not None and leaf.unit.dimension == (("°", 1),)]
    if len(degrees) != 1:
        return False
    other = answer if degrees[0] is reference else reference
    radians = (
        not applied(other.tree).isdisjoint(_OF_RADIANS) if other.unit is None else other.unit.dimension == (("rad", 1),)
    )
    return radians and equal(Apply("*", (degrees[0].tree, _RADIANS)), other.tree) is True


def _same_group(reference: Bracketed, answer: Bracketed) -> bool:
    if (
        reference.variable is not None
        and answer.variable is not None
        and not _same_name(reference.variable, answer.variable)
    ):
        return False
    if reference.kind == answer.kind == "ratio":
        return _same_ratio(reference, answer)
    if reference.kind == answer.kind:
        return _same_parts(reference, answer, ordered=reference.kind not in _UNORDERED)
    if {reference.kind, answer.kind} <= _UNORDERED:
        return _same_parts(reference, answer, ordered=False)
    ordered = {"()", "<>", "list"}
    if reference.kind in ordered and answer.kind in ordered:
        return _same_parts(reference, answer, ordered=True)
    return reference.kind == "list" and answer.kind == "[]" and _same_parts(reference, answer, ordered=False)


def _same_parts(reference: Bracketed, answer: Answer, *, ordered: bool = False) -> bool:
    if not isinstance(answer, Bracketed):
        vector = _as_vector(answer)
        if vector is not None:
            return reference.kind in ("()", "<>") and _same_parts(reference, vector, ordered=True)
        if reference.kind == "ratio":
            return _same_quotient(reference, answer)
        parts = (
            _without_repeats(reference.parts, allowed=len(reference.parts))
            if reference.kind == "set"
            else reference.parts
        )
        return reference.kind in ("set", "[]") and len(parts) == 1 and same(parts[0], answer)
    if ordered:
        return len(reference.parts) == len(answer.parts) and all(map(same, reference.parts, answer.parts))
    if reference.kind == answer.kind == "set":  # ignore repeated elements
        return all(any(same(part, other) for other in answer.parts) for part in reference.parts) and all(
            any(same(part, other) for part in reference.parts) for other in answer.parts
        )
    left = _without_repeats(answer.parts, allowed=len(answer.parts) - len(reference.parts))
    for part in reference.parts:
        found = next((place for place, other in enumerate(left) if same(part, other)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _without_repeats(parts: Sequence[Answer], *, allowed: int) -> list[Answer]:
    """Return the parts, without repeated parts if ``allowed`` is positive."""
    if allowed <= 0:
        return list(parts)
    kept: list[Answer] = []
    for part in parts:
        if not any(same(other, part) for other in kept):
            kept.append(part)
    return kept


def _same_as_group(reference: Answer, answer: Bracketed) -> bool:
    """Compare a reference answer with a bracketed answer: a single value in brackets, or a matrix as lists."""
    matrix = _as_lists(reference)
    if matrix is not None:
        vector = _as_vector(reference)
        return same(matrix, answer) or (
            vector is not None and answer.kind in ("()", "<>", "[]") and _same_parts(vector, answer, ordered=True)
        )
    if answer.kind == "ratio":
        return _same_quotient(answer, reference)
    return answer.kind in ("set", "[]") and _same_parts(replace(answer, parts=(reference,)), answer)


def _same_quotient(ratio: Bracketed, other: Answer) -> bool:
    """Compare a ratio with a number: ``3:2`` equals 3/2. ``3 to 2`` may be a range, so it never equals 3 or 2."""
    trees = [part.tree for part in ratio.parts if isinstance(part, Leaf)]
    if len(trees) != 2 or len(ratio.parts) != 2 or not isinstance(other, Leaf):
        return False
    if TO in ratio.text and any(equal(tree, other.tree) for tree in trees):
        return False
    return equal(quotient(*trees), other.tree) is True


def _as_lists(answer: Answer) -> Bracketed | None:
    """Return a matrix as the list of its rows, or None if the answer is not a matrix."""
    match answer:
        case Leaf(text, Apply("matrix", rows)):
            lists = [tuple(Leaf("", cell) for cell in row.arguments) for row in rows if isinstance(row, Apply)]
            return Bracketed(text, "[]", tuple(Bracketed("", "[]", cells) for cells in lists))
    return None


def _as_vector(answer: Answer) -> Bracketed | None:
    """Return a matrix of one row or column as a tuple, or None for any other answer."""
    matrix = _as_lists(answer)
    rows = [row.parts for row in matrix.parts if isinstance(row, Bracketed)] if matrix is not None else []
    cells = rows[0] if len(rows) == 1 else tuple(row[0] for row in rows if len(row) == 1)
    return Bracketed(answer.text, "<>", cells) if cells else None


def _same_ratio(reference: Bracketed, answer: Bracketed) -> bool:
    if len(reference.parts) != len(answer.parts):
        return False
    values = []
    for group in (reference, answer):
        trees = [part.tree for part in group.parts if isinstance(part, Leaf)]
        values.append([quotient(tree, trees[-1]) for tree in trees])
    return len(values[0]) == len(values[1]) and all(
        equal(one, other) is True for one, other in zip(*values, strict=True)
    )


def _same_relation(reference: Relation, answer: Relation) -> bool:
    if _is_assignment(reference) and _is_assignment(answer):
        if _numbers_differ(answer):
            return False
        if is_named(reference.parts[0]) and is_named(answer.parts[0]):
            names = _same_names(reference.parts[0], answer.parts[0])
            if names and same(reference.parts[-1], answer.parts[-1]):
                return True
    if len(reference.parts) != 2 or len(answer.parts) != 2:
        return reference.signs == answer.signs and all(map(same, reference.parts, answer.parts))
    wanted, said = _difference(reference), _difference(answer)
    ratio = proportional(wanted, said) if wanted is not None and said is not None else None
    if ratio is None or ratio == 0:
        return False
    sign = answer.signs[0] if ratio > 0 else FLIPPED.get(answer.signs[0], answer.signs[0])
    return sign == reference.signs[0]


def _difference(relation: Relation) -> Expression | None:
    left, right = relation.parts
    if isinstance(left, Leaf) and isinstance(right, Leaf):
        return Apply("+", (left.tree, Apply("neg", (right.tree,))))
    return None


def _is_assignment(relation: Relation) -> bool:
    return set(relation.signs) <= {"=", "~"}


def _same_names(reference: Answer, answer: Answer) -> bool:
    if isinstance(reference, Leaf) and isinstance(answer, Leaf):
        return _same_name(reference.tree, answer.tree)
    return same(reference, answer)


def _same_name(reference: Expression, answer: Expression) -> bool:
    """Compare the left sides of two assignments. ``y`` matches every function."""
    if any(
        one == Symbol("y") and isinstance(other, Apply) for one, other in ((reference, answer), (answer, reference))
    ):
        return True
    return reference == answer


def _gives_its_right_side(relation: Relation) -> bool:
    """Return True if a relation states the value of its left side: a name, a number, or names added and multiplied.

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
    return _contains_only_names(left.tree) and not (isinstance(right, Leaf) and symbols(right.tree))


def _contains_only_names(tree: Expression) -> bool:
    match tree:
        case Apply("+", terms):
            return all(_contains_only_names(term.arguments[0] if _is_negative(term) else term) for term in terms)
        case Apply(function, arguments):
            return function.startswith("call ") or (
                function in _ASKED_FOR and all(map(_contains_only_names, arguments))
            )
    return isinstance(tree, Symbol)


def _is_negative(tree: Expression) -> TypeGuard[Apply]:
    return isinstance(tree, Apply) and tree.function == "neg"


def _numbers_differ(relation: Relation) -> bool:
    """Return True if a relation states that unequal numbers are equal."""
    rounded = "~" in relation.signs
    trees = [part.tree for part in relation.parts if isinstance(part, Leaf) and not symbols(part.tree)]
    trees = [tree for tree in trees if not any(function.startswith("call ") for function in applied(tree))]
    return any(not (equal(one, other) or (rounded and _roughly(one, other))) for one, other in pairwise(trees))


def _roughly(one: Expression, other: Expression) -> bool:
    """Return True if two numbers are approximately equal: to the decimal places of the second number, or within 5 %."""
    try:
        first, second = value_of(one, {}, 20), value_of(other, {}, 20)
    except NoValueError:
        return False
    if isinstance(first, tuple) or isinstance(second, tuple):
        return False
    places = other.places if isinstance(other, Number) else 0
    return bool(abs(first - second) <= (0.5001 * 10.0**-places if places else _ROUGHLY * max(abs(first), abs(second))))
