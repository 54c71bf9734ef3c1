r"""Equality of two expressions by value, or by math-verify if the values are inconclusive.

>>> from agentrl_envs.grading.expression_parser import parse_expression as read
>>> expressions_equal(read("(x+1)^2"), read("x^2+2x+1")), expressions_equal(read("0"), read(r"\sin\pi"))
(True, True)
>>> expressions_equal(read("2^{4181}"), read("2^{4181}+0.5")), expressions_equal(read("R-2r"), read("r-2R"))
(False, False)

Values are exact if possible. Otherwise they are compared with 40 digits, and with 100 or more if they seem to agree.
Expressions with symbols are compared at points of both signs. Roots and logarithms of negative numbers are complex, and
their conventions differ, so such points are inconclusive. A decimal with six or more places equals every value that
rounds to the same six places. A small decimal is compared by its leading digits, and a decimal with 15 digits by all of
its digits.

math-verify handles integrals, limits, and sets that are built by other operations. It is slow to import and to run. Its
``parse`` searches a text for an expression. Here the whole text must be parsed, because the text is the answer. Most of
the time is spent in ANTLR's full-context lookahead, which is needed only if the cheap lookahead
(``PredictionMode.SLL``) fails. A parse that succeeds with the cheap lookahead has the same result. This module uses
classes of math-verify 0.9 that are not part of its public interface.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy2
from math_verify import LatexExtractionConfig, verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq
from mpmath import mp
from sympy import Basic

from agentrl_envs.grading.expressions import (
    FLOAT_DIGITS,
    LEADING_DIGITS_TOLERANCE,
    ROUNDING_TOLERANCE,
    Expression,
    FunctionCall,
    Number,
    contains_rounded_decimal,
    function_names_in,
    in_canonical_order,
    symbol_names,
)
from agentrl_envs.grading.values import NoValueError, Scalar, evaluate_expression, pseudo_random_number, to_mpmath

_PRECISIONS = (40, 100)
_MAX_PRECISION = 3_000
_AGREEING_FRACTION = 0.7  # computed values count as equal if they agree in this fraction of the digits
_FUNCTIONS_WITHOUT_CANCELLATION = frozenset(
    {"*", "over", "^", "neg", "root", "factorial", "binomial", "pi", "e", "exp"}
)
_SMALL_DECIMAL = Fraction(1, 10)
_FLOAT_TOLERANCE = Fraction(1, 10**14)


def expressions_equal(left: Expression, right: Expression) -> bool | None:
    """Return True if two expressions are equal, False if they differ, and None if their values are inconclusive."""
    if left == right:
        return True
    if "percent" in function_names_in(left) ^ function_names_in(right):  # data sets write 9 % both as 9 and as 0.09
        bare = [_without_percent(tree) for tree in (left, right)]
        if bare != [left, right] and expressions_equal(*bare):
            return True
    agreed = False
    for point, positive in _comparison_points_and_positivity(symbol_names(left) | symbol_names(right)):
        equal_here = _equal_at_point(left, right, point, positive=positive)
        if equal_here is False:
            return False
        agreed = agreed or equal_here is True
    return agreed or (True if in_canonical_order(left) == in_canonical_order(right) else None)


def proportionality_factor(left: Expression, right: Expression) -> Fraction | None:
    """Return the rational number q with left = q right at all points, or None if there is none."""
    ratio: Scalar = None
    for point, _ in _comparison_points_and_positivity(symbol_names(left) | symbol_names(right)):
        try:
            over, under = (
                evaluate_expression(left, point, _PRECISIONS[0]),
                evaluate_expression(right, point, _PRECISIONS[0]),
            )
        except NoValueError:
            continue
        if isinstance(over, tuple) or isinstance(under, tuple) or under == 0 or over == 0:
            return None
        with mp.workdps(_PRECISIONS[0]):
            exact = isinstance(over, Fraction) and isinstance(under, Fraction)
            here = over / under if exact else to_mpmath(over) / to_mpmath(under)
        if ratio is not None and not _nearly_equal(here, ratio, _PRECISIONS[0]):
            return None
        ratio = here
    return _as_fraction(ratio)


def _as_fraction(value: Scalar) -> Fraction | None:
    if value is None or isinstance(value, Fraction):
        return value
    return None if mp.im(value) != 0 else Fraction(str(mp.nstr(mp.re(value), 30)))


def _without_percent(tree: Expression) -> Expression:
    return tree.arguments[0] if isinstance(tree, FunctionCall) and tree.function == "percent" else tree


def _comparison_points_and_positivity(names: frozenset[str]) -> Iterator[tuple[dict[str, Fraction], bool]]:
    """Yield each point of the comparison with a flag that is True if all coordinates are positive.

    Without symbols there is one point.
    """
    yield {name: pseudo_random_number(name) for name in names}, True
    if names:
        yield {name: -pseudo_random_number(f"{name} turned") for name in names}, False
        mixed = {name: pseudo_random_number(f"{name} mixed") * 3 for name in names}
        yield {name: value if value.numerator % 2 else -value for name, value in mixed.items()}, False
        yield {name: 2 + pseudo_random_number(f"{name} more") * 5 for name in names}, True


def _equal_at_point(left: Expression, right: Expression, point: dict[str, Fraction], *, positive: bool) -> bool | None:
    try:
        first, second = (
            evaluate_expression(left, point, _PRECISIONS[0]),
            evaluate_expression(right, point, _PRECISIONS[0]),
        )
        if isinstance(first, tuple) or isinstance(second, tuple):
            return _matrices_agree(left, right, first, second)
        real = _is_real(first), _is_real(second)
        if any(real) and not all(real):
            return False if positive else None
        if not any(real) and not positive:
            return True if _nearly_equal(first, second, _PRECISIONS[0]) else None
        if contains_rounded_decimal(left) or contains_rounded_decimal(right):
            return _equal_after_rounding(left, right, first, second, scaled=bool(point))
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        # Because of rounding errors, a sum that cancels to zero may be tiny. Without sums, a tiny value is exact.
        exact = function_names_in(left) | function_names_in(right) <= _FUNCTIONS_WITHOUT_CANCELLATION
        if not _nearly_equal(first, second, _PRECISIONS[0], relative=exact):
            return False
        digits = _digits_for_comparison(first)
        if digits is None:  # too large to show digits after the decimal point
            return True if exact else None
        return _nearly_equal(
            evaluate_expression(left, point, digits), evaluate_expression(right, point, digits), digits, relative=exact
        )
    except NoValueError:
        return None


def _digits_for_comparison(value: Scalar) -> int | None:
    """Return the digits of precision needed to compare numbers of this size, or None if too many are needed.

    The precision covers digits after the decimal point: 2^{2005} + 1 agrees with 2^{2005} in its first 600 digits.
    """
    with mp.workdps(_PRECISIONS[0]):
        size = abs(to_mpmath(value))
        before = int(mp.log10(size)) if size > 1 and not mp.isinf(size) else 0
    return None if before > _MAX_PRECISION else _PRECISIONS[1] + int(before / _AGREEING_FRACTION)


def _matrices_agree(left: Expression, right: Expression, first: Scalar, second: Scalar) -> bool:
    if not isinstance(first, tuple) or not isinstance(second, tuple):
        return False
    if (len(first), len(first[0])) != (len(second), len(second[0])):
        return False
    decimals = contains_rounded_decimal(left) or contains_rounded_decimal(right)
    return all(
        _values_agree_after_rounding(*cells, scaled=False) if decimals else _nearly_equal(*cells, _PRECISIONS[0])
        for rows in zip(first, second, strict=True)
        for cells in zip(*rows, strict=True)
    )


def _is_real(value: Scalar) -> bool:
    return isinstance(value, Fraction) or abs(mp.im(value)) <= mp.mpf(10) ** (
        -_PRECISIONS[0] * _AGREEING_FRACTION
    ) * abs(value)


def _nearly_equal(first: Scalar, second: Scalar, digits: int, *, relative: bool = False) -> bool:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    with mp.workdps(digits):
        first, second = to_mpmath(first), to_mpmath(second)
        if mp.isinf(first) or mp.isinf(second):
            return bool(first == second)
        size = max(mp.zero if relative else mp.one, abs(first), abs(second))
        return bool(abs(first - second) <= mp.mpf(10) ** (-digits * _AGREEING_FRACTION) * size)


def _equal_after_rounding(left: Expression, right: Expression, first: Scalar, second: Scalar, *, scaled: bool) -> bool:
    if _values_agree_after_rounding(first, second, scaled=scaled):
        return True
    printed = any(isinstance(tree, Number) and tree.digits >= FLOAT_DIGITS for tree in (left, right))
    with mp.workdps(_PRECISIONS[0]):
        first, second = to_mpmath(first), to_mpmath(second)
        return printed and bool(abs(first - second) <= to_mpmath(_FLOAT_TOLERANCE) * max(abs(first), abs(second)))


def _values_agree_after_rounding(first: Scalar, second: Scalar, *, scaled: bool) -> bool:
    """Return True if two values agree after rounding.

    ``scaled`` is true if the symbols have chosen values, so that the magnitude of the result is arbitrary.
    """
    exact = isinstance(first, Fraction) and isinstance(second, Fraction)
    with mp.workdps(_PRECISIONS[0]):
        rounded, small, leading = (
            value if exact else to_mpmath(value)
            for value in (ROUNDING_TOLERANCE, _SMALL_DECIMAL, LEADING_DIGITS_TOLERANCE)
        )
        if not exact:
            first, second = to_mpmath(first), to_mpmath(second)
            if mp.isinf(first) or mp.isinf(second):
                return bool(first == second)
        size = max(abs(first), abs(second))
        if size < small:
            return bool(abs(first - second) <= leading * size)
        return bool(abs(first - second) <= rounded * (size if scaled and size > 1 else 1))


_NORMALIZATION = replace(LatexExtractionConfig().normalization_config, units=False)
_CONVERSION_CONFIG = latex2sympy2.ConversionConfig(lowercase_symbols=False)
_MATH_VERIFY_NOTATION = re.compile(
    r"\\(?:i*int|lim|cap|setminus|backslash|mathbb|ne|neq|notin|Gamma|partial|sum|prod|det|le|leq|ge|geq)(?![A-Za-z])|[<>|]"
)
# math-verify silently drops this notation, so it would compare less than the whole text.
_DROPPED_BY_MATH_VERIFY = re.compile(r"['\"$]|\\[lc]?dots|\\text|\\mbox|\\x1e|\\x1f|\\approx|[A-Z]{2}|\d\s+\d")


def equal_by_math_verify(answer: str, reference: str) -> bool:
    """Return True if math-verify considers two normalized texts equal.

    At least one text must contain notation that requires math-verify.
    """
    if not (needs_math_verify(answer) or needs_math_verify(reference)):
        return False
    parsed_reference, parsed_answer = parse_latex(reference), parse_latex(answer)
    if parsed_reference is None or parsed_answer is None:
        return False
    return bool(verify(parsed_reference, parsed_answer, timeout_seconds=None, allow_set_relation_comp=True))


def needs_math_verify(text: str) -> bool:
    """Return True if a text contains notation that cannot be compared by value."""
    return _MATH_VERIFY_NOTATION.search(text) is not None


@lru_cache(maxsize=512)
def parse_latex(text: str) -> Basic | None:
    """Return the SymPy object of a LaTeX text, or None if the text cannot be parsed."""
    if _DROPPED_BY_MATH_VERIFY.search(text):
        return None
    return _parse_normalized(latex2sympy2.normalize_latex(text, config=_NORMALIZATION))


def _parse_normalized(text: str) -> Basic | None:
    read = _parse_or_none(text)
    if read is None:
        last = get_last_eq(text)  # the last side of a = b = c
        read = _parse_or_none(last) if last != text else None
    return read


def _parse_or_none(text: str) -> Basic | None:
    try:
        return _LatexParser(
            is_real=not should_treat_as_complex(text), convert_degrees=False, config=_CONVERSION_CONFIG
        ).parse(text)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  (the parser's own errors are plain exceptions)
        return None


class _TwoStageParser(latex2sympy2.PSParser):
    """Parses with the cheap lookahead, and again with the full lookahead if the first parse fails."""

    def math(self) -> object:
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001  (as above; the second parse decides)
            self.reset()
            self._interp.predictionMode = PredictionMode.LL
            return super().math()


class _LatexParser(latex2sympy2._Latex2Sympy):
    def create_parser(self, text: str) -> object:
        tokens = super().create_parser(text).getTokenStream()
        # Tokenize the whole text now, so that an unknown command raises here. During the parse, the error would count
        # as a failure of the cheap lookahead, and the second parse would continue after the unknown command.
        tokens.fill()
        two_stage = _TwoStageParser(tokens)
        two_stage.removeErrorListeners()
        two_stage.addErrorListener(self.MathErrorListener(text))
        return two_stage
