r"""Comparison of an answer with the reference answer, part by part. The kinds of bracket must match.

>>> compare(r"\{1,2\}", "(1,2)"), compare("(-2,7)", "[-2,7]"), compare("1 < x < 2", "(1,2)")
(<Verdict.INCORRECT: 'incorrect'>, <Verdict.INCORRECT: 'incorrect'>, <Verdict.CORRECT: 'correct'>)
>>> compare("0", "x+y+z=0"), compare("5", "x=5"), compare("y-2x=3", "y=2x+3")
(<Verdict.INCORRECT: 'incorrect'>, <Verdict.CORRECT: 'correct'>, <Verdict.CORRECT: 'correct'>)

A list without brackets matches the same elements in any order in square brackets, and in the same order in parentheses.
A reference answer of two quantities in square brackets may be an interval, which matches no list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeGuard

from agentrl_envs.grading.answer_parser import (
    FLIPPED,
    INTERVALS,
    TO,
    Answer,
    Bracketed,
    Numeral,
    Quantity,
    Relation,
    TimeOfDay,
    UnparsedText,
    Words,
    is_name_answer,
    parse_answer,
)
from agentrl_envs.grading.equality import (
    equal_by_math_verify,
    expressions_equal,
    needs_math_verify,
    parse_latex,
    proportionality_factor,
)
from agentrl_envs.grading.expressions import (
    Expression,
    FunctionCall,
    Number,
    Symbol,
    divide,
    function_names_in,
    symbol_names,
)
from agentrl_envs.grading.spelling import remove_spaces_at_signs
from agentrl_envs.grading.units import conversion_factor
from agentrl_envs.grading.values import NoValueError, evaluate_expression
from agentrl_envs.types import Verdict

_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
_APPROXIMATE_TOLERANCE = 0.05  # relative difference up to which numbers are approximately equal
_UNORDERED_KINDS = frozenset({"list", "set", "union"})
_RADIANS_PER_DEGREE = divide(FunctionCall("pi", ()), Number(Fraction(180)))  # radians per degree
_RADIAN_FUNCTIONS = frozenset({"pi", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc"})
_FUNCTIONS_OF_NAMES = frozenset({"*", "over", "abs", "sin", "cos", "tan", "sec", "csc", "cot", "ln", "det"})


def compare(answer: str, reference: str) -> Verdict:
    """Return the verdict on an answer. Running out of memory is treated as a timeout."""
    try:
        parsed_reference = parse_answer(reference)
    except (MemoryError, RecursionError):
        return Verdict.GRADER_TIMEOUT
    try:
        parsed_answer = parse_answer(answer)
        if (
            answers_match(parsed_reference, parsed_answer)
            or _matches_with_decimal_comma(answer, parsed_reference)
            or _equal_by_math_verify(parsed_answer, parsed_reference)
        ):
            return Verdict.CORRECT
    except (MemoryError, RecursionError):
        return Verdict.ANSWER_TIMEOUT
    if not _is_parsable(parsed_reference):
        return Verdict.UNPARSABLE_GOLD
    return Verdict.INCORRECT if _is_parsable(parsed_answer) else Verdict.UNPARSABLE_ANSWER


def cache_reference(reference: str) -> None:
    """Parse and cache a reference answer before `compare`, so that parsing does not use the answer's CPU time."""
    with suppress(MemoryError, RecursionError):  # `compare` reports these
        _is_parsable(parse_answer(reference))


def check_reference(reference: str) -> Verdict:
    """Return `Verdict.CORRECT` if the reference answer can be parsed and equals itself by value."""
    try:
        parsed = parse_answer(reference)
        # Compare an arbitrary answer, so that the check takes as long as a real comparison.
        _equal_by_math_verify(parse_answer("7919"), parsed)
        if isinstance(parsed, UnparsedText):
            equals_itself = equal_by_math_verify(parsed.text, parsed.text)
        else:
            equals_itself = answers_match(parsed, parsed)
    except (MemoryError, RecursionError):
        return Verdict.GRADER_TIMEOUT
    return Verdict.CORRECT if equals_itself else Verdict.UNPARSABLE_GOLD


def _is_parsable(answer: Answer) -> bool:
    return not isinstance(answer, UnparsedText) or (
        needs_math_verify(answer.text) and parse_latex(answer.text) is not None
    )


def _equal_by_math_verify(answer: Answer, reference: Answer) -> bool:
    """Return True if math-verify considers two answers equal.

    Uses math-verify only for text that could not be parsed, for inconclusive values, and for sets in different
    notations.
    """
    both = (answer, reference)
    unread = any(isinstance(one, UnparsedText) for one in both)
    series = (
        isinstance(answer, Quantity)
        and isinstance(reference, Quantity)
        and expressions_equal(reference.tree, answer.tree) is None
    )
    sets = all(map(_is_set, both)) and any(map(_is_inequality_or_union, both))
    return (unread or series or sets) and equal_by_math_verify(answer.text, reference.text)


def _is_set(answer: Answer) -> bool:
    return _is_inequality_or_union(answer) or (isinstance(answer, Bracketed) and answer.kind in INTERVALS)


def _is_inequality_or_union(answer: Answer) -> bool:
    """Return True if the answer is of a kind with many notations: an inequality or a union."""
    match answer:
        case Relation():
            return "=" not in answer.signs
        case Bracketed():
            return answer.kind == "union"
    return False


def _matches_with_decimal_comma(answer: str, reference: Answer) -> bool:
    """Compare, reading a comma in the answer as a decimal point. In a reference answer, a comma is a separator."""
    answer = answer.strip()
    return _DECIMAL_COMMA.fullmatch(answer) is not None and answers_match(
        reference, parse_answer(answer.replace(",", "."))
    )


def answers_match(reference: Answer, answer: Answer) -> bool:
    """Return True if a parsed answer equals the parsed reference answer."""
    if remove_spaces_at_signs(reference.text) == remove_spaces_at_signs(answer.text) and reference.text:
        return True
    match reference, answer:
        case (UnparsedText(), _) | (_, UnparsedText()):
            return False
        case (Words(), _) | (_, Words()):
            return _same_words(reference, answer)
        case (Numeral(), _) | (_, Numeral()):
            return _same_numeral(reference, answer)
        case Relation(), Relation():
            return _same_relation(reference, answer)
        case Relation(), _:
            return (
                is_name_answer(reference.parts[0])
                and _is_assignment(reference)
                and answers_match(reference.parts[-1], answer)
            )
        case _, Relation():
            return _states_value_of_left_side(answer) and answers_match(reference, answer.parts[-1])
        case (TimeOfDay(), _) | (_, TimeOfDay()):
            return _same_time(reference, answer)
        case Bracketed(), Bracketed():
            return _same_bracketed(reference, answer)
        case Bracketed(), _:
            return _same_parts(reference, answer)
        case _, Bracketed():
            return _unbracketed_reference_matches(reference, answer)
        case Quantity(), Quantity():
            return _same_quantity(reference, answer)
    return False


def _same_words(reference: Answer, answer: Answer) -> bool:
    trees = [
        _number_in_words(one) if isinstance(one, Words) else getattr(one, "tree", None) for one in (reference, answer)
    ]
    if trees[0] is not None and trees[1] is not None:
        return expressions_equal(trees[0], trees[1]) is True
    first, second = (one.text.casefold() for one in (reference, answer))
    return first == second


def _number_in_words(words: Words) -> Number | None:
    return None if words.number is None else Number(words.number)


def _same_time(reference: Answer, answer: Answer) -> bool:
    """Compare times of day. A missing ``am`` or ``pm`` matches either, and 22:30 equals 10:30 pm.

    ``3:10`` also equals the ratio or fraction 3/10, and ``9 a.m.`` equals 9.
    """
    if isinstance(reference, TimeOfDay) and isinstance(answer, TimeOfDay):
        if not (reference.am_or_pm and answer.am_or_pm) and reference.seconds == answer.seconds:
            return True
        return (reference.am_or_pm or answer.am_or_pm) != "" and _second_of_day(reference) == _second_of_day(answer)
    clock, other = (reference, answer) if isinstance(reference, TimeOfDay) else (answer, reference)
    assert isinstance(clock, TimeOfDay)
    numbers = [Quantity(digits, Number(Fraction(digits))) for digits in re.findall(r"\d+", clock.text)]
    if isinstance(other, Bracketed):
        return (
            len(numbers) == 3
            and not clock.am_or_pm
            and _same_bracketed(Bracketed(clock.text, "ratio", tuple(numbers)), other)
        )
    if not isinstance(other, Quantity) or len(numbers) != (1 if clock.am_or_pm else 2):
        return False
    return other.tree == (numbers[0].tree if clock.am_or_pm else divide(numbers[0].tree, numbers[1].tree))


def _second_of_day(clock: TimeOfDay) -> int:
    return clock.seconds % 43_200 + 43_200 * (clock.am_or_pm == "pm") if clock.am_or_pm else clock.seconds


def _same_numeral(reference: Answer, answer: Answer) -> bool:
    """Compare numerals with a base. A number without a base matches a numeral with the same digits."""
    if isinstance(reference, Numeral) and isinstance(answer, Numeral):
        return (reference.digits, reference.base) == (answer.digits, answer.base)
    numeral, other = (reference, answer) if isinstance(reference, Numeral) else (answer, reference)
    return isinstance(numeral, Numeral) and isinstance(other, Quantity) and other.text.upper() == numeral.digits


def _same_quantity(reference: Quantity, answer: Quantity) -> bool:
    factor = conversion_factor(answer.unit, reference.unit)
    if factor is not None:
        converted = reference.tree if factor == 1 else FunctionCall("*", (reference.tree, Number(factor)))
        if expressions_equal(converted, answer.tree) is True:
            return True
    if _same_angle(reference, answer):
        return True
    measured = answer.with_unit_letter
    return measured is not None and not symbol_names(reference.tree) and _same_quantity(reference, measured)


def _same_angle(reference: Quantity, answer: Quantity) -> bool:
    """Compare an angle in degrees with an angle in radians.

    A number without a unit is in radians if it contains pi or an arc function.
    """
    degrees = [leaf for leaf in (reference, answer) if leaf.unit is not None and leaf.unit.dimension == (("°", 1),)]
    if len(degrees) != 1:
        return False
    other = answer if degrees[0] is reference else reference
    if other.unit is None:
        is_radians = not function_names_in(other.tree).isdisjoint(_RADIAN_FUNCTIONS)
    else:
        is_radians = other.unit.dimension == (("rad", 1),)
    return (
        is_radians and expressions_equal(FunctionCall("*", (degrees[0].tree, _RADIANS_PER_DEGREE)), other.tree) is True
    )


def _same_bracketed(reference: Bracketed, answer: Bracketed) -> bool:
    if (
        reference.variable is not None
        and answer.variable is not None
        and not _same_assigned_name(reference.variable, answer.variable)
    ):
        return False
    if reference.kind == answer.kind == "ratio":
        return _same_ratio(reference, answer)
    if reference.kind == answer.kind:
        return _same_parts(reference, answer, ordered=reference.kind not in _UNORDERED_KINDS)
    if {reference.kind, answer.kind} <= _UNORDERED_KINDS:
        return _same_parts(reference, answer, ordered=False)
    ordered = {"()", "<>", "list"}
    if reference.kind in ordered and answer.kind in ordered:
        return _same_parts(reference, answer, ordered=True)
    if {reference.kind, answer.kind} != {"list", "[]"} or _may_be_interval(reference):
        return False
    return _same_parts(reference, answer, ordered=False)


def _may_be_interval(answer: Bracketed) -> bool:
    return answer.kind == "[]" and len(answer.parts) == 2 and all(isinstance(part, Quantity) for part in answer.parts)


def _same_parts(reference: Bracketed, answer: Answer, *, ordered: bool = False) -> bool:
    if not isinstance(answer, Bracketed):
        vector = _matrix_as_vector(answer)
        if vector is not None:
            return reference.kind in ("()", "<>") and _same_parts(reference, vector, ordered=True)
        if reference.kind == "ratio":
            return _ratio_equals_number(reference, answer)
        parts: Sequence[Answer] = reference.parts
        if reference.kind == "set":
            parts = _remove_repeats(parts, repeats_allowed=len(parts))
        return reference.kind in ("set", "[]") and len(parts) == 1 and answers_match(parts[0], answer)
    if ordered:
        return len(reference.parts) == len(answer.parts) and all(map(answers_match, reference.parts, answer.parts))
    if reference.kind == answer.kind == "set":  # ignore repeated elements
        return all(any(answers_match(part, other) for other in answer.parts) for part in reference.parts) and all(
            any(answers_match(part, other) for part in reference.parts) for other in answer.parts
        )
    remaining = _remove_repeats(answer.parts, repeats_allowed=len(answer.parts) - len(reference.parts))
    for part in reference.parts:
        match_index = next((index for index, other in enumerate(remaining) if answers_match(part, other)), None)
        if match_index is None:
            return False
        del remaining[match_index]
    return not remaining


def _remove_repeats(parts: Sequence[Answer], *, repeats_allowed: int) -> list[Answer]:
    """Return the parts, without repeated parts if ``repeats_allowed`` is positive."""
    if repeats_allowed <= 0:
        return list(parts)
    kept: list[Answer] = []
    for part in parts:
        if not any(answers_match(other, part) for other in kept):
            kept.append(part)
    return kept


def _unbracketed_reference_matches(reference: Answer, answer: Bracketed) -> bool:
    """Return True if the reference equals a bracketed answer: a single value in brackets, or a matrix as lists."""
    matrix = _matrix_as_lists(reference)
    if matrix is not None:
        vector = _matrix_as_vector(reference)
        return (answer.kind == "[]" and answers_match(matrix, answer)) or (
            vector is not None and answer.kind in ("()", "<>", "[]") and _same_parts(vector, answer, ordered=True)
        )
    if answer.kind == "ratio":
        return _ratio_equals_number(answer, reference)
    return answer.kind in ("set", "[]") and _same_parts(replace(answer, parts=(reference,)), answer)


def _ratio_equals_number(ratio: Bracketed, other: Answer) -> bool:
    """Compare a ratio with a number: ``3:2`` equals 3/2. ``3 to 2`` may be a range, so it never equals 3 or 2."""
    trees = [part.tree for part in ratio.parts if isinstance(part, Quantity)]
    if len(trees) != 2 or len(ratio.parts) != 2 or not isinstance(other, Quantity):
        return False
    if TO in ratio.text and any(expressions_equal(tree, other.tree) for tree in trees):
        return False
    return expressions_equal(divide(*trees), other.tree) is True


def _matrix_as_lists(answer: Answer) -> Bracketed | None:
    """Return a matrix as the list of its rows, or None if the answer is not a matrix."""
    match answer:
        case Quantity(text, FunctionCall("matrix", rows)):
            lists = [
                tuple(Quantity("", cell) for cell in row.arguments) for row in rows if isinstance(row, FunctionCall)
            ]
            return Bracketed(text, "[]", tuple(Bracketed("", "[]", cells) for cells in lists))
    return None


def _matrix_as_vector(answer: Answer) -> Bracketed | None:
    """Return a matrix of one row or column as a tuple, or None for any other answer."""
    matrix = _matrix_as_lists(answer)
    rows = [row.parts for row in matrix.parts if isinstance(row, Bracketed)] if matrix is not None else []
    cells = rows[0] if len(rows) == 1 else tuple(row[0] for row in rows if len(row) == 1)
    return Bracketed(answer.text, "<>", cells) if cells else None


def _same_ratio(reference: Bracketed, answer: Bracketed) -> bool:
    if len(reference.parts) != len(answer.parts):
        return False
    values = []
    for group in (reference, answer):
        trees = [part.tree for part in group.parts if isinstance(part, Quantity)]
        values.append([divide(tree, trees[-1]) for tree in trees])
    return len(values[0]) == len(values[1]) and all(
        expressions_equal(one, other) is True for one, other in zip(*values, strict=True)
    )


def _same_relation(reference: Relation, answer: Relation) -> bool:
    if _is_assignment(reference) and _is_assignment(answer):
        if _equates_unequal_numbers(answer):
            return False
        if is_name_answer(reference.parts[0]) and is_name_answer(answer.parts[0]):
            names = _same_left_sides(reference.parts[0], answer.parts[0])
            if names and answers_match(reference.parts[-1], answer.parts[-1]):
                return True
    if len(reference.parts) != 2 or len(answer.parts) != 2:
        return reference.signs == answer.signs and all(map(answers_match, reference.parts, answer.parts))
    differences = _left_minus_right(reference), _left_minus_right(answer)
    if differences[0] is None or differences[1] is None:
        return False
    ratio = proportionality_factor(differences[0], differences[1])
    if ratio is None or ratio == 0:
        return False
    sign = answer.signs[0] if ratio > 0 else FLIPPED.get(answer.signs[0], answer.signs[0])
    return sign == reference.signs[0]


def _left_minus_right(relation: Relation) -> Expression | None:
    left, right = relation.parts
    if isinstance(left, Quantity) and isinstance(right, Quantity):
        return FunctionCall("+", (left.tree, FunctionCall("neg", (right.tree,))))
    return None


def _is_assignment(relation: Relation) -> bool:
    return set(relation.signs) <= {"=", "~"}


def _same_left_sides(reference: Answer, answer: Answer) -> bool:
    if isinstance(reference, Quantity) and isinstance(answer, Quantity):
        return _same_assigned_name(reference.tree, answer.tree)
    return answers_match(reference, answer)


def _same_assigned_name(reference: Expression, answer: Expression) -> bool:
    """Compare the left sides of two assignments. ``y`` matches every function."""
    if any(
        one == Symbol("y") and isinstance(other, FunctionCall)
        for one, other in ((reference, answer), (answer, reference))
    ):
        return True
    return reference == answer


def _states_value_of_left_side(relation: Relation) -> bool:
    """Return True if a relation states the value of its left side: a name, a number, or sums and products of names.

    ``a + b = 7`` states 7. ``2x = 10``, ``-x = 5`` and ``x^n = 9`` are equations to solve, and ``ax + by = c`` is a
    relation of variables.
    """
    if not _is_assignment(relation) or _equates_unequal_numbers(relation):
        return False
    left, right = relation.parts[0], relation.parts[-1]
    if is_name_answer(left) or not isinstance(left, Quantity):
        return is_name_answer(left)
    if not symbol_names(left.tree):
        return True
    return _contains_only_names(left.tree) and not (isinstance(right, Quantity) and symbol_names(right.tree))


def _contains_only_names(tree: Expression) -> bool:
    match tree:
        case FunctionCall("+", terms):
            return all(_contains_only_names(term.arguments[0] if _is_negative(term) else term) for term in terms)
        case FunctionCall(function, arguments):
            return function.startswith("call ") or (
                function in _FUNCTIONS_OF_NAMES and all(map(_contains_only_names, arguments))
            )
    return isinstance(tree, Symbol)


def _is_negative(tree: Expression) -> TypeGuard[FunctionCall]:
    return isinstance(tree, FunctionCall) and tree.function == "neg"


def _equates_unequal_numbers(relation: Relation) -> bool:
    """Return True if a relation states that unequal numbers are equal."""
    rounded = "~" in relation.signs
    trees = [part.tree for part in relation.parts if isinstance(part, Quantity) and not symbol_names(part.tree)]
    trees = [tree for tree in trees if not any(function.startswith("call ") for function in function_names_in(tree))]
    return any(
        not (expressions_equal(one, other) or (rounded and _approximately_equal(one, other)))
        for one, other in pairwise(trees)
    )


def _approximately_equal(one: Expression, other: Expression) -> bool:
    """Return True if two numbers are approximately equal: to the decimal places of the second number, or within 5 %."""
    try:
        first, second = evaluate_expression(one, {}, 20), evaluate_expression(other, {}, 20)
    except NoValueError:
        return False
    if isinstance(first, tuple) or isinstance(second, tuple):
        return False
    places = other.places if isinstance(other, Number) else 0
    return bool(
        abs(first - second)
        <= (0.5001 * 10.0**-places if places else _APPROXIMATE_TOLERANCE * max(abs(first), abs(second)))
    )
