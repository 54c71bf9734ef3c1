r"""Evaluation of an expression at a point: exact if the value is rational and short, otherwise to a given precision.

>>> from agentrl_envs.grading.expression_parser import parse_expression
>>> evaluate_expression(parse_expression("2^{10} + 1/2"), {}, 40)
Fraction(2049, 2)
>>> evaluate_expression(parse_expression(r"2^{7^{2023}} \bmod 7"), {}, 40)
Fraction(2, 1)

All costs are bounded in advance: the bits of an exact number, the terms of a sum, the size of an exponent. A power
modulo an integer is computed without computing the power. Raises `NoValueError` if a bound is exceeded or an
expression is undefined.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any, TypeAlias

import mpmath
from mpmath import mp

from agentrl_envs.grading.expressions import Expression, FunctionCall, Number, Symbol

# A Fraction, or an mpmath number if the value is irrational or too large. A matrix consists of such values.
Scalar: TypeAlias = Any
Matrix: TypeAlias = tuple[tuple[Scalar, ...], ...]

_MAX_BITS = 1 << 17  # maximum size of an exact number
_MAX_ARGUMENT = 10**15  # largest argument of a function that mpmath evaluates
_MAX_EXACT_FACTORIAL = 5_000
_MAX_ROOT_DEGREE = 64  # roots of a higher degree are principal roots
_MAX_TERMS = 20_000  # maximum number of terms in all sums and products of an expression
_MAX_MATRIX_CELLS = 400
_ONE = Fraction(1)


class NoValueError(Exception):
    """The expression is undefined at this point, or too expensive to evaluate."""


def evaluate_expression(tree: Expression, point: Mapping[str, Fraction], digits: int) -> Scalar | Matrix:
    """Return the value of an expression at ``point``, which maps symbols to values.

    Raises NoValueError if the expression is undefined at this point or too expensive to evaluate.
    """
    with mp.workdps(digits):
        try:
            return _ExpressionEvaluator(dict(point)).value(tree)
        except (ArithmeticError, ValueError, TypeError, mpmath.libmp.NoConvergence, RecursionError) as error:
            raise NoValueError(str(error)) from error


def evaluate_modulo(tree: Expression, modulus: int, value: Callable[[Expression], Scalar]) -> int:
    """Return the value of an integer expression modulo an integer, without computing powers."""
    match tree:
        case FunctionCall("+", terms):
            return sum(evaluate_modulo(term, modulus, value) for term in terms) % modulus
        case FunctionCall("neg", (term,)):
            return -evaluate_modulo(term, modulus, value) % modulus
        case FunctionCall("*", factors) if not any(
            isinstance(part, FunctionCall) and part.function == "over" for part in factors
        ):
            return math.prod(evaluate_modulo(factor, modulus, value) for factor in factors) % modulus
        case FunctionCall("^", (base, exponent)):
            return _power_modulo(evaluate_modulo(base, modulus, value), exponent, modulus, value)
    return _require_integer(value(tree)) % modulus


def _power_modulo(base: int, exponent: Expression, modulus: int, value: Callable[[Expression], Scalar]) -> int:
    """Return ``base ** exponent`` modulo ``modulus``."""
    # Euler's theorem, in the form for a base and modulus with common factors: a^n = a^(n mod L + L) for n >= L.
    try:
        exact = value(exponent)
        if isinstance(exact, Fraction):
            return pow(base, _require_integer(exact), modulus)
    except NoValueError:
        pass
    period = _totient(modulus)
    return pow(base, evaluate_modulo(exponent, period, value) + period, modulus)


def _totient(number: int) -> int:
    if number > 10**10:
        raise NoValueError("the modulus is too large")
    result, rest, divisor = number, number, 2
    while divisor * divisor <= rest:
        if rest % divisor == 0:
            result -= result // divisor
            while rest % divisor == 0:
                rest //= divisor
        divisor += 1
    return result - result // rest if rest > 1 else result


class _ExpressionEvaluator:
    """One traversal of a tree, with a budget of terms."""

    def __init__(self, point: dict[str, Fraction]) -> None:
        self._point = point
        self._terms = 0

    def value(self, tree: Expression) -> Scalar:
        match tree:
            case Number(value):
                return value
            case Symbol(name):
                if name not in self._point:
                    raise NoValueError(name)
                return self._point[name]
        function, arguments = tree.function, tree.arguments
        if function in ("sum", "product"):
            return self._series(tree)
        if function == "mod":
            return self._modulo(*arguments)
        if function in _ANGLE_FUNCTIONS:
            return _require_defined(_trigonometric(function, self._angle_in_radians(arguments[0])))
        values = [self.value(argument) for argument in arguments]
        if function in _MATRIX_FUNCTIONS or any(isinstance(value, tuple) for value in values):
            return _matrix_function(function, values)
        if function.startswith("call "):
            return _value_of_unknown_function(function, values)
        if function not in _FUNCTIONS:
            raise NoValueError(function)
        return _require_defined(_FUNCTIONS[function](*values))

    def _angle_in_radians(self, tree: Expression) -> Scalar:
        """Return the value of an angle in radians."""
        if isinstance(tree, FunctionCall) and tree.function == "degree":
            return to_mpmath(self.value(tree.arguments[0])) * mp.pi / 180
        return self.value(tree)

    def _modulo(self, tree: Expression, by: Expression) -> Scalar:
        modulus = self.value(by)
        if isinstance(modulus, Fraction) and modulus.denominator == 1 and modulus > 0:
            return Fraction(evaluate_modulo(tree, int(modulus), self.value))
        raise NoValueError("the modulus is not a positive integer")

    def _series(self, tree: FunctionCall) -> Scalar:
        body, index, low_tree, high_tree = tree.arguments
        assert isinstance(index, Symbol)
        low, high = _require_integer(self.value(low_tree)), _require_integer(self.value(high_tree))
        self._terms += max(0, high - low + 1)
        if self._terms > _MAX_TERMS:
            raise NoValueError("the sums and products have too many terms")
        before = dict(self._point)
        result: Scalar = Fraction(int(tree.function == "product"))
        combine = _times if tree.function == "product" else _plus
        for number in range(low, high + 1):
            self._point[index.name] = Fraction(number)
            result = combine(result, self.value(body))
        self._point = before
        return result


def to_mpmath(value: Scalar) -> Scalar:
    """Convert a Fraction to an mpmath number."""
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _exact_if_possible(operation: Callable[[Scalar, Scalar], Scalar]) -> Callable[[Scalar, Scalar], Scalar]:
    """Wrap an operation to compute exactly if both operands are exact and the result is short enough."""

    def calculate(left: Scalar, right: Scalar) -> Scalar:
        if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
            return operation(to_mpmath(left), to_mpmath(right))
        exact = operation(left, right)
        size = exact.numerator.bit_length() + exact.denominator.bit_length()
        return exact if size <= _MAX_BITS else to_mpmath(exact)

    return calculate


_plus, _times = _exact_if_possible(operator.add), _exact_if_possible(operator.mul)


def _require_small(value: Scalar) -> Scalar:
    number = to_mpmath(value)
    if abs(number) > _MAX_ARGUMENT:
        raise NoValueError("the argument is too large")
    return number


def _reciprocal(value: Scalar) -> Scalar:
    if value == 0:
        raise NoValueError("division by zero")
    return 1 / value


def _power(base: Scalar, exponent: Scalar) -> Scalar:
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return _integer_power(base, int(exponent))
        if exponent.denominator <= _MAX_ROOT_DEGREE:
            return _integer_power(_root(base, Fraction(exponent.denominator)), exponent.numerator)
        exponent = to_mpmath(exponent)
    if base == 0:
        raise NoValueError("zero cannot be raised to an irrational power")
    return mp.power(to_mpmath(base), _require_small(exponent))


def _integer_power(base: Scalar, exponent: int) -> Scalar:
    if base == 0 and exponent < 0:
        raise NoValueError("division by zero")
    if isinstance(base, Fraction):
        if abs(base) in (0, 1):
            return base ** (exponent % 2 or 2) if exponent else _ONE
        if (base.numerator.bit_length() + base.denominator.bit_length()) * abs(exponent) <= _MAX_BITS:
            return base**exponent
    return mp.power(to_mpmath(base), _require_small(exponent))


def _root(value: Scalar, degree: Scalar) -> Scalar:
    """Return the root of degree ``degree``. Roots of odd degree are real."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 0 < degree <= _MAX_ROOT_DEGREE:
        return _power(value, _reciprocal(degree))
    number = int(degree)
    if isinstance(value, Fraction):
        if value < 0 and number % 2:
            return -_root(-value, degree)
        over, under = (_exact_root(part, number) for part in (value.numerator, value.denominator))
        if over is not None and under is not None:
            return Fraction(over, under)
    elif mp.im(value) == 0 and mp.re(value) < 0 and number % 2:
        return -_root(-mp.re(value), degree)
    return mp.root(to_mpmath(value), number)


def _exact_root(value: int, degree: int) -> int | None:
    if value < 0:
        return None
    if degree == 2:
        root = math.isqrt(value)
    else:
        if value.bit_length() > 4096:
            return None
        root = int(mpmath.floor(mpmath.root(mpmath.mpf(value), degree) + mpmath.mpf("0.5")))
    return root if root**degree == value else None


def _factorial(value: Scalar) -> Scalar:
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise NoValueError("the factorial of a negative number is undefined")
        if value <= _MAX_EXACT_FACTORIAL:
            return Fraction(math.factorial(int(value)))
    return mp.factorial(_require_small(value))


def _binomial(over: Scalar, under: Scalar) -> Scalar:
    whole = all(isinstance(value, Fraction) and value.denominator == 1 for value in (over, under))
    if whole and 0 <= under <= over <= _MAX_EXACT_FACTORIAL:
        return Fraction(math.comb(int(over), int(under)))
    return mp.binomial(_require_small(over), _require_small(under))


def _floor(value: Scalar) -> Scalar:
    if isinstance(value, Fraction):
        return Fraction(math.floor(value))
    _require_real(value)
    nearest = mp.nint(value)
    return Fraction(int(nearest if abs(value - nearest) < mp.mpf(10) ** (-mp.dps // 2) else mp.floor(value)))


def _logarithm(value: Scalar) -> Scalar:
    if value == 0:
        raise NoValueError("the logarithm of zero is undefined")
    return Fraction(0) if value == 1 else mp.log(to_mpmath(value))


def _trigonometric(name: str, value: Scalar) -> Scalar:
    return getattr(mp, name.replace("arc", "a"))(_require_small(value))


def _integer_function(function: Callable[..., int]) -> Callable[..., Scalar]:
    return lambda *values: Fraction(function(*map(_require_integer, values)))


def _extremum(function: Callable[..., object]) -> Callable[..., Scalar]:
    def chosen(*values: Scalar) -> Scalar:
        exact = all(isinstance(value, Fraction) for value in values)
        return function(*(value if exact else _require_real(to_mpmath(value)) for value in values))

    return chosen


def _require_integer(value: Scalar) -> int:
    if isinstance(value, Fraction) and value.denominator == 1:
        return int(value)
    raise NoValueError("the value is not an integer")


def _require_real(value: Scalar) -> Scalar:
    if mp.im(value) != 0:
        raise NoValueError("the value is not a real number")
    return mp.re(value)


def _require_defined(value: Scalar) -> Scalar:
    if not isinstance(value, Fraction) and mp.isnan(value):
        raise NoValueError("the value is undefined")
    return value


def _value_of_unknown_function(name: str, values: Sequence[Scalar]) -> Scalar:
    """Return a pseudo-random value of an unknown function, equal for equal arguments."""
    key = name + ",".join(str(value) if isinstance(value, Fraction) else mp.nstr(value, 20) for value in values)
    return pseudo_random_number(key)


def pseudo_random_number(name: str) -> Fraction:
    """Return a pseudo-random number between 0.4 and 1.7 that depends only on ``name``."""
    drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
    return Fraction(4_001 + drawn % 12_007, 9_973)


def _matrix_function(function: str, values: list[Scalar]) -> Scalar:
    match function:
        case "row":
            return tuple(values)
        case "matrix":
            if sum(map(len, values)) > _MAX_MATRIX_CELLS or any(
                isinstance(cell, tuple) for row in values for cell in row
            ):
                raise NoValueError("the matrix is too large or contains matrices")
            return tuple(values)
        case "neg":
            return _matrix_times(values[0], Fraction(-1))
        case "transpose":
            return tuple(zip(*values[0], strict=True))
        case "+":
            return reduce(_matrix_plus, values)
        case "*":
            return reduce(_matrix_times, values)
    raise NoValueError(f"{function} is not supported for matrices")


def _matrix_plus(left: Matrix, right: Matrix) -> Matrix:
    rows = zip(left, right, strict=True)
    return tuple(tuple(_plus(one, other) for one, other in zip(*pair, strict=True)) for pair in rows)


def _matrix_times(left: Scalar, right: Scalar) -> Scalar:
    if not isinstance(left, tuple):
        left, right = right, left
    if not isinstance(left, tuple):
        return _times(left, right)
    if not isinstance(right, tuple):
        return tuple(tuple(_times(cell, right) for cell in row) for row in left)
    if len(left[0]) != len(right):
        raise NoValueError("matrices of incompatible shapes cannot be multiplied")
    columns = list(zip(*right, strict=True))
    return tuple(tuple(_sum(*map(_times, row, column)) for column in columns) for row in left)


def _sum(*values: Scalar) -> Scalar:
    return reduce(_plus, values, Fraction(0))


_MATRIX_FUNCTIONS = frozenset({"row", "matrix", "transpose"})
_FUNCTIONS: dict[str, Callable[..., Scalar]] = {
    "+": _sum,
    "*": lambda *values: reduce(_times, values),
    "neg": lambda value: -value,
    "over": _reciprocal,
    "^": _power,
    "root": _root,
    "percent": lambda value: _times(value, Fraction(1, 100)),
    "degree": lambda value: value,
    "pi": lambda: +mp.pi,
    "e": lambda: +mp.e,
    "i": lambda: mp.mpc(0, 1),
    "infinity": lambda: mp.inf,
    "exp": lambda value: _power(+mp.e, value),
    "ln": _logarithm,
    "abs": abs,
    "floor": _floor,
    "ceil": lambda value: -_floor(-value),
    "factorial": _factorial,
    "binomial": _binomial,
    "gcd": _integer_function(math.gcd),
    "lcm": _integer_function(math.lcm),
    "max": _extremum(max),
    "min": _extremum(min),
}
_TRIGONOMETRIC = "sin cos tan sec csc cot sinh cosh tanh arcsin arccos arctan arcsec arccsc arccot"
_ANGLE_FUNCTIONS = frozenset(_TRIGONOMETRIC.split())
