"""The value of an expression at a point: exact where it is rational and small enough, else to so many digits.

>>> from agentrl_envs.grading.reading.reader import read_expression
>>> value_of(read_expression("2^{10} + 1/2"), {}, 40)
Fraction(2049, 2)
>>> value_of(read_expression(r"2^{7^{2023}} \\bmod 7"), {}, 40)
Fraction(2, 1)

Everything is bounded before it is calculated: the bits of an exact number, the terms of a sum, the size of an exponent.
A power modulo is calculated as such. Past the bounds, and where there is no value, it raises `NoValueError`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import mpmath
from mpmath import mp

from agentrl_envs.grading.reading.expressions import Apply, Expression, Number, Symbol

# A Fraction, or an mpmath number where the value is not rational or too large; of an expression also a Matrix of them.
Scalar: TypeAlias = Any
Matrix: TypeAlias = tuple[tuple[Scalar, ...], ...]

_BITS = 1 << 17  # of an exact number
_EXPONENT = 10**15
_EXACT_FACTORIAL = 5_000
_ROOT_DEGREE = 64  # of higher ones the principal root is taken
_TERMS = 20_000  # of sums and products, over the whole expression
_CELLS = 400
_ONE = Fraction(1)


class NoValueError(Exception):
    """It has no value here, or one that takes too much to calculate."""


def value_of(tree: Expression, point: Mapping[str, Fraction], digits: int) -> Scalar | Matrix:
    """The value with ``point`` for the symbols. Raises `NoValueError`."""
    with mp.workdps(digits):
        try:
            return _Evaluation(dict(point)).value(tree)
        except (ArithmeticError, ValueError, TypeError, mpmath.libmp.NoConvergence, RecursionError) as error:
            raise NoValueError(str(error)) from error


def exact_modulo(tree: Expression, modulus: int, value: Callable[[Expression], Scalar]) -> int:
    """An integer expression modulo an integer; its powers are never built."""
    match tree:
        case Apply("+", terms):
            return sum(exact_modulo(term, modulus, value) for term in terms) % modulus
        case Apply("neg", (term,)):
            return -exact_modulo(term, modulus, value) % modulus
        case Apply("*", factors) if not any(isinstance(part, Apply) and part.function == "over" for part in factors):
            return math.prod(exact_modulo(factor, modulus, value) for factor in factors) % modulus
        case Apply("^", (base, exponent)):
            return _power_modulo(exact_modulo(base, modulus, value), exponent, modulus, value)
    return _integer(value(tree)) % modulus


def _power_modulo(base: int, exponent: Expression, modulus: int, value: Callable[[Expression], Scalar]) -> int:
    """By Euler's theorem in the form that needs no common factor to be absent: a^n = a^(n mod L + L) for n >= L."""
    try:
        exact = value(exponent)
        if isinstance(exact, Fraction):
            return pow(base, _integer(exact), modulus)
    except NoValueError:
        pass
    period = _totient(modulus)
    return pow(base, exact_modulo(exponent, period, value) + period, modulus)


def _totient(number: int) -> int:
    if number > 10**10:
        raise NoValueError("a large modulus")
    result, rest, divisor = number, number, 2
    while divisor * divisor <= rest:
        if rest % divisor == 0:
            result -= result // divisor
            while rest % divisor == 0:
                rest //= divisor
        divisor += 1
    return result - result // rest if rest > 1 else result


class _Evaluation:
    """One walk over a tree, with its budget."""

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
        if function.startswith(("arc", "sin", "cos", "tan", "sec", "csc", "cot")):
            return _trigonometric(function, self._angle(arguments[0]))
        values = [self.value(argument) for argument in arguments]
        if function in _MATRIX_FUNCTIONS or any(isinstance(value, tuple) for value in values):
            return _of_matrices(function, values)
        if function.startswith("call "):
            return _unknown(function, values)
        return _checked(_FUNCTIONS[function](*values))

    def _angle(self, tree: Expression) -> Scalar:
        """Degrees count as such where an angle is meant."""
        if isinstance(tree, Apply) and tree.function == "degree":
            return _approximate(self.value(tree.arguments[0])) * mp.pi / 180
        return self.value(tree)

    def _modulo(self, tree: Expression, by: Expression) -> Scalar:
        modulus = self.value(by)
        if isinstance(modulus, Fraction) and modulus.denominator == 1 and modulus > 0:
            return Fraction(exact_modulo(tree, int(modulus), self.value))
        raise NoValueError("modulo what is no positive integer")

    def _series(self, tree: Apply) -> Scalar:
        body, index, low_tree, high_tree = tree.arguments
        assert isinstance(index, Symbol)
        low, high = _integer(self.value(low_tree)), _integer(self.value(high_tree))
        self._terms += max(0, high - low + 1)
        if self._terms > _TERMS:
            raise NoValueError("a long sum")
        before = self._point.get(index.name)
        result: Scalar = Fraction(int(tree.function == "product"))
        combine = _times if tree.function == "product" else _plus
        for number in range(low, high + 1):
            self._point[index.name] = Fraction(number)
            result = combine(result, self.value(body))
        if before is None:
            self._point.pop(index.name, None)
        else:
            self._point[index.name] = before
        return result


def _approximate(value: Scalar) -> Scalar:
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _bounded(value: Fraction) -> Scalar:
    size = value.numerator.bit_length() + value.denominator.bit_length()
    return value if size <= _BITS else _approximate(value)


def _plus(left: Scalar, right: Scalar) -> Scalar:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _bounded(left + right)
    return _approximate(left) + _approximate(right)


def _times(left: Scalar, right: Scalar) -> Scalar:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _bounded(left * right)
    return _approximate(left) * _approximate(right)


def _over(value: Scalar) -> Scalar:
    if value == 0:
        raise NoValueError("a division by zero")
    return 1 / value


def _power(base: Scalar, exponent: Scalar) -> Scalar:
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return _integer_power(base, int(exponent))
        if exponent.denominator <= _ROOT_DEGREE:
            return _integer_power(_root(base, Fraction(exponent.denominator)), exponent.numerator)
        exponent = _approximate(exponent)
    if base == 0:
        raise NoValueError("zero to the power of what is not rational")
    if abs(mp.re(exponent)) > _EXPONENT:
        raise NoValueError("a large exponent")
    return mp.power(_approximate(base), exponent)


def _integer_power(base: Scalar, exponent: int) -> Scalar:
    if base == 0 and exponent < 0:
        raise NoValueError("a division by zero")
    if isinstance(base, Fraction):
        if abs(base) in (0, 1):
            return base ** (exponent if exponent == 0 else 2 - exponent % 2) if exponent else _ONE
        if (base.numerator.bit_length() + base.denominator.bit_length()) * abs(exponent) <= _BITS:
            return base**exponent
    if abs(exponent) > _EXPONENT:
        raise NoValueError("a large exponent")
    return mp.power(_approximate(base), exponent)


def _root(value: Scalar, degree: Scalar) -> Scalar:
    """Of odd degree the real one."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 0 < degree <= _ROOT_DEGREE:
        return _power(value, _over(degree))
    number = int(degree)
    if isinstance(value, Fraction):
        if value < 0 and number % 2:
            return -_root(-value, degree)
        over, under = (_exact_root(part, number) for part in (value.numerator, value.denominator))
        if over is not None and under is not None:
            return Fraction(over, under)
    elif mp.im(value) == 0 and mp.re(value) < 0 and number % 2:
        return -_root(-mp.re(value), degree)
    return mp.root(_approximate(value), number)


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
            raise NoValueError("the factorial of a negative number")
        if value <= _EXACT_FACTORIAL:
            return Fraction(math.factorial(int(value)))
    if abs(mp.re(_approximate(value))) > _EXPONENT:
        raise NoValueError("a large factorial")
    return mp.factorial(_approximate(value))


def _binomial(over: Scalar, under: Scalar) -> Scalar:
    whole = all(isinstance(value, Fraction) and value.denominator == 1 for value in (over, under))
    if whole and 0 <= under <= over <= _EXACT_FACTORIAL:
        return Fraction(math.comb(int(over), int(under)))
    if any(abs(mp.re(_approximate(value))) > _EXPONENT for value in (over, under)):
        raise NoValueError("a large binomial coefficient")
    return mp.binomial(_approximate(over), _approximate(under))


def _floor(value: Scalar) -> Scalar:
    if isinstance(value, Fraction):
        return Fraction(math.floor(value))
    _real(value)
    nearest = mp.nint(value)
    return Fraction(int(nearest if abs(value - nearest) < mp.mpf(10) ** (-mp.dps // 2) else mp.floor(value)))


def _logarithm(value: Scalar) -> Scalar:
    if value == 0:
        raise NoValueError("the logarithm of zero")
    return Fraction(0) if value == 1 else mp.log(_approximate(value))


def _trigonometric(name: str, value: Scalar) -> Scalar:
    if name not in _TRIGONOMETRIC:
        raise NoValueError(name)
    angle = _approximate(value)
    if abs(angle) > _EXPONENT:
        raise NoValueError("a large angle")
    return _checked(_TRIGONOMETRIC[name](angle))


def _of_integers(function: Callable[..., int]) -> Callable[..., Scalar]:
    return lambda *values: Fraction(function(*map(_integer, values)))


def _most(function: Callable[..., object]) -> Callable[..., Scalar]:
    def chosen(*values: Scalar) -> Scalar:
        exact = all(isinstance(value, Fraction) for value in values)
        return function(*(value if exact else _real(_approximate(value)) for value in values))

    return chosen


def _integer(value: Scalar) -> int:
    if isinstance(value, Fraction) and value.denominator == 1:
        return int(value)
    raise NoValueError("no integer")


def _real(value: Scalar) -> Scalar:
    if mp.im(value) != 0:
        raise NoValueError("no real number")
    return mp.re(value)


def _checked(value: Scalar) -> Scalar:
    if not isinstance(value, Fraction) and mp.isnan(value):
        raise NoValueError("undefined")
    return value


def _unknown(name: str, values: Sequence[Scalar]) -> Scalar:
    """A function that nobody knows has some value, the same for the same arguments."""
    said = name + ",".join(str(value) if isinstance(value, Fraction) else mp.nstr(value, 20) for value in values)
    return random_number(said)


def random_number(name: str) -> Fraction:
    """A number between 0.4 and 1.7 that is always the same for a name, and no other name's."""
    drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
    return Fraction(4_001 + drawn % 12_007, 9_973)


def _of_matrices(function: str, values: list[Scalar]) -> Scalar:
    match function:
        case "row":
            return tuple(values)
        case "matrix":
            if sum(map(len, values)) > _CELLS or any(isinstance(cell, tuple) for row in values for cell in row):
                raise NoValueError("a large matrix")
            return tuple(values)
        case "neg":
            return _scaled(values[0], Fraction(-1))
        case "transpose":
            return tuple(zip(*values[0], strict=True))
        case "+":
            return _matrix_sum(values)
        case "*":
            return _matrix_product(values)
    raise NoValueError(f"{function} of matrices")


def _scaled(matrix: Matrix, factor: Scalar) -> Matrix:
    return tuple(tuple(_times(cell, factor) for cell in row) for row in matrix)


def _matrix_sum(values: list[Scalar]) -> Matrix:
    shapes = {(len(value), len(value[0])) if isinstance(value, tuple) else None for value in values}
    if None in shapes or len(shapes) != 1:
        raise NoValueError("a sum of different shapes")
    result = values[0]
    for value in values[1:]:
        result = tuple(tuple(map(_plus, *rows)) for rows in zip(result, value, strict=True))
    return tuple(result)


def _matrix_product(values: list[Scalar]) -> Scalar:
    result = values[0]
    for value in values[1:]:
        if not isinstance(value, tuple):
            result = _scaled(result, value) if isinstance(result, tuple) else _times(result, value)
        elif not isinstance(result, tuple):
            result = _scaled(value, result)
        elif len(result[0]) != len(value):
            raise NoValueError("a product of shapes that do not fit")
        else:
            columns = list(zip(*value, strict=True))
            result = tuple(tuple(_sum(map(_times, row, column)) for column in columns) for row in result)
    return result


def _sum(values: Scalar) -> Scalar:
    result: Scalar = Fraction(0)
    for value in values:
        result = _plus(result, value)
    return result


def _all_times(*values: Scalar) -> Scalar:
    result: Scalar = _ONE
    for value in values:
        result = _times(result, value)
    return result


_MATRIX_FUNCTIONS = frozenset({"row", "matrix", "transpose"})
_FUNCTIONS: dict[str, Callable[..., Scalar]] = {
    "+": lambda *values: _sum(values),
    "*": _all_times,
    "neg": lambda value: -value,
    "over": _over,
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
    "gcd": _of_integers(math.gcd),
    "lcm": _of_integers(math.lcm),
    "max": _most(max),
    "min": _most(min),
}
_TRIGONOMETRIC_NAMES = "sin cos tan sec csc cot sinh cosh tanh arcsin arccos arctan arcsec arccsc arccot"
_TRIGONOMETRIC: dict[str, Callable[[Scalar], Scalar]] = {
    name: getattr(mp, f"a{name[3:]}" if name.startswith("arc") else name) for name in _TRIGONOMETRIC_NAMES.split()
}
