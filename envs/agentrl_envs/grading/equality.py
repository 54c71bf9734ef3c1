r"""Equality of two expressions by value, or by math-verify if the values are inconclusive.

>>> from agentrl_envs.grading.reader import read_expression as read
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
    LEADING,
    ROUNDED,
    Expression,
    FunctionCall,
    Number,
    functions_in,
    in_canonical_order,
    is_rounded,
    symbol_names,
)
from agentrl_envs.grading.values import NoValueError, Scalar, evaluate_expression, number_from_name, to_mpmath

_DIGITS = (40, 100)
_MOST_DIGITS = 3_000
_AGREE = 0.7  # computed values count as equal if they agree in this fraction of the digits
_WITHOUT_CANCELLATION = frozenset({"*", "over", "^", "neg", "root", "factorial", "binomial", "pi", "e", "exp"})
_SMALL = Fraction(1, 10)
_FLOAT = Fraction(1, 10**14)


def expressions_equal(left: Expression, right: Expression) -> bool | None:
    """Return True if two expressions are equal, False if they differ, and None if their values are inconclusive."""
    if left == right:
        return True
    if "percent" in functions_in(left) ^ functions_in(right):  # data sets write 9 % both as 9 and as 0.09
        bare = [_without_percent(tree) for tree in (left, right)]
        if bare != [left, right] and expressions_equal(*bare):
            return True
    agreed = False
    for point, positive in _points(symbol_names(left) | symbol_names(right)):
        said = _agree_at(left, right, point, positive=positive)
        if said is False:
            return False
        agreed = agreed or said is True
    return agreed or (True if in_canonical_order(left) == in_canonical_order(right) else None)


def proportionality_factor(left: Expression, right: Expression) -> Fraction | None:
    """Return the rational number q with left = q right at all points, or None if there is none."""
    ratio: Scalar = None
    for point, _ in _points(symbol_names(left) | symbol_names(right)):
        try:
            over, under = evaluate_expression(left, point, _DIGITS[0]), evaluate_expression(right, point, _DIGITS[0])
        except NoValueError:
            continue
        if isinstance(over, tuple) or isinstance(under, tuple) or under == 0 or over == 0:
            return None
        with mp.workdps(_DIGITS[0]):
            exact = isinstance(over, Fraction) and isinstance(under, Fraction)
            here = over / under if exact else to_mpmath(over) / to_mpmath(under)
        if ratio is not None and not _near(here, ratio, _DIGITS[0]):
            return None
        ratio = here
    return _rational(ratio)


def _rational(value: Scalar) -> Fraction | None:
    if value is None or isinstance(value, Fraction):
        return value
    return None if mp.im(value) != 0 else Fraction(str(mp.nstr(mp.re(value), 30)))


def _without_percent(tree: Expression) -> Expression:
    return tree.arguments[0] if isinstance(tree, FunctionCall) and tree.function == "percent" else tree


def _points(names: frozenset[str]) -> Iterator[tuple[dict[str, Fraction], bool]]:
    """Yield each point of the comparison with a flag that is True if all coordinates are positive.

    Without symbols there is one point.
    """
    yield {name: number_from_name(name) for name in names}, True
    if names:
        yield {name: -number_from_name(f"{name} turned") for name in names}, False
        mixed = {name: number_from_name(f"{name} mixed") * 3 for name in names}
        yield {name: value if value.numerator % 2 else -value for name, value in mixed.items()}, False
        yield {name: 2 + number_from_name(f"{name} more") * 5 for name in names}, True


def _agree_at(left: Expression, right: Expression, point: dict[str, Fraction], *, positive: bool) -> bool | None:
    try:
        first, second = evaluate_expression(left, point, _DIGITS[0]), evaluate_expression(right, point, _DIGITS[0])
        if isinstance(first, tuple) or isinstance(second, tuple):
            return _matrices_agree(left, right, first, second)
        real = _is_real(first), _is_real(second)
        if any(real) and not all(real):
            return False if positive else None
        if not any(real) and not positive:
            return True if _near(first, second, _DIGITS[0]) else None
        if is_rounded(left) or is_rounded(right):
            return _rounds_to(left, right, first, second, scaled=bool(point))
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        exact = (
            functions_in(left) | functions_in(right) <= _WITHOUT_CANCELLATION
        )  # without cancellation, a tiny value is not zero
        if not _near(first, second, _DIGITS[0], relative=exact):
            return False
        digits = _digits_for(first)
        if digits is None:  # too large to show digits after the decimal point
            return True if exact else None
        return _near(
            evaluate_expression(left, point, digits), evaluate_expression(right, point, digits), digits, relative=exact
        )
    except NoValueError:
        return None


def _digits_for(value: Scalar) -> int | None:
    """Return the digits of precision needed to compare numbers of this size, or None if they would be too many.

    The precision covers digits after the decimal point: 2^{2005} + 1 agrees with 2^{2005} in its first 600 digits.
    """
    with mp.workdps(_DIGITS[0]):
        size = abs(to_mpmath(value))
        before = int(mp.log10(size)) if size > 1 and not mp.isinf(size) else 0
    return None if before > _MOST_DIGITS else _DIGITS[1] + int(before / _AGREE)


def _matrices_agree(left: Expression, right: Expression, first: Scalar, second: Scalar) -> bool:
    if not isinstance(first, tuple) or not isinstance(second, tuple):
        return False
    if (len(first), len(first[0])) != (len(second), len(second[0])):
        return False
    decimals = is_rounded(left) or is_rounded(right)
    return all(
        _within_rounding(*cells, scaled=False) if decimals else _near(*cells, _DIGITS[0])
        for rows in zip(first, second, strict=True)
        for cells in zip(*rows, strict=True)
    )


def _is_real(value: Scalar) -> bool:
    return isinstance(value, Fraction) or abs(mp.im(value)) <= mp.mpf(10) ** (-_DIGITS[0] * _AGREE) * abs(value)


def _near(first: Scalar, second: Scalar, digits: int, *, relative: bool = False) -> bool:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    with mp.workdps(digits):
        first, second = to_mpmath(first), to_mpmath(second)
        if mp.isinf(first) or mp.isinf(second):
            return bool(first == second)
        size = max(mp.zero if relative else mp.one, abs(first), abs(second))
        return bool(abs(first - second) <= mp.mpf(10) ** (-digits * _AGREE) * size)


def _rounds_to(left: Expression, right: Expression, first: Scalar, second: Scalar, *, scaled: bool) -> bool:
    if _within_rounding(first, second, scaled=scaled):
        return True
    printed = any(isinstance(tree, Number) and tree.digits >= FLOAT_DIGITS for tree in (left, right))
    with mp.workdps(_DIGITS[0]):
        first, second = to_mpmath(first), to_mpmath(second)
        return printed and bool(abs(first - second) <= to_mpmath(_FLOAT) * max(abs(first), abs(second)))


def _within_rounding(first: Scalar, second: Scalar, *, scaled: bool) -> bool:
    """Return True if two values agree after rounding.

    ``scaled`` is true for values at a chosen point of the symbols, whose magnitude is arbitrary.
    """
    exact = isinstance(first, Fraction) and isinstance(second, Fraction)
    with mp.workdps(_DIGITS[0]):
        rounded, small, leading = (value if exact else to_mpmath(value) for value in (ROUNDED, _SMALL, LEADING))
        if not exact:
            first, second = to_mpmath(first), to_mpmath(second)
            if mp.isinf(first) or mp.isinf(second):
                return bool(first == second)
        size = max(abs(first), abs(second))
        if size < small:
            return bool(abs(first - second) <= leading * size)
        return bool(abs(first - second) <= rounded * (size if scaled and size > 1 else 1))


_NORMAL = replace(LatexExtractionConfig().normalization_config, units=False)
_CONVERSION = latex2sympy2.ConversionConfig(lowercase_symbols=False)
_NEEDED = re.compile(
    r"\\(?:i*int|lim|cap|setminus|backslash|mathbb|ne|neq|notin|Gamma|partial|sum|prod|det|le|leq|ge|geq)(?![A-Za-z])|[<>|]"
)
_DROPPED = re.compile(
    r"['\"$]|\\[lc]?dots|\\text|\\mbox|\\x1e|\\x1f|\\approx|[A-Z]{2}|\d\s+\d"
)  # math-verify silently drops these, so it would compare less than the whole text


def equal_by_algebra(answer: str, reference: str) -> bool:
    """Return True if math-verify considers two normalized texts equal.

    At least one text must contain notation that requires math-verify.
    """
    if not (needs_algebra(answer) or needs_algebra(reference)):
        return False
    wanted, said = parse_latex(reference), parse_latex(answer)
    if wanted is None or said is None:
        return False
    return bool(verify(wanted, said, timeout_seconds=None, allow_set_relation_comp=True))


def needs_algebra(text: str) -> bool:
    """Return True if a text contains notation that cannot be compared by value."""
    return _NEEDED.search(text) is not None


@lru_cache(maxsize=512)
def parse_latex(text: str) -> Basic | None:
    """Return the SymPy object of a LaTeX text, or None if the text cannot be parsed."""
    return None if _DROPPED.search(text) else _read(latex2sympy2.normalize_latex(text, config=_NORMAL))


def _read(text: str) -> Basic | None:
    read = _parsed(text)
    if read is None:
        last = get_last_eq(text)  # the last side of a = b = c
        read = _parsed(last) if last != text else None
    return read


def _parsed(text: str) -> Basic | None:
    try:
        return _LatexReader(is_real=not should_treat_as_complex(text), convert_degrees=False, config=_CONVERSION).parse(
            text
        )
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


class _LatexReader(latex2sympy2._Latex2Sympy):
    def create_parser(self, text: str) -> object:
        tokens = super().create_parser(text).getTokenStream()
        # Tokenize the whole text now, so that an unknown command raises here. During the parse, the error would count
        # as a failure of the cheap lookahead, and the second parse would continue after the unknown command.
        tokens.fill()
        two_stage = _TwoStageParser(tokens)
        two_stage.removeErrorListeners()
        two_stage.addErrorListener(self.MathErrorListener(text))
        return two_stage
