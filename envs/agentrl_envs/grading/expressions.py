"""What the readers make of an expression: numbers, symbols, and functions applied to them. Nothing is calculated.

>>> tree = Apply("+", (Number(Fraction(1, 2)), Symbol("x")))
>>> sorted(symbols(tree)), is_rounded(tree)
(['x'], False)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

ROUNDED_PLACES = 6
ROUNDED = Fraction(1, 2 * 10**6)  # decimals are equal when they agree in six digits behind the point
LEADING = Fraction(1, 10**5)  # ... and, where they are small, in their leading digits
FLOAT_DIGITS = 15


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number. Of one that is written as a decimal, ``digits`` are the significant ones and ``places`` those
    behind the point; else 0."""

    value: Fraction
    digits: int = 0
    places: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, or a name with its marks: ``x``, ``x'``, ``a_{1}``, ``AB``, ``angle ABC``."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator or function with its arguments; a function that nobody knows is ``call f``.

    ``sum`` and ``product``: body, index, from, to. ``matrix``: its rows, each ``row``.
    """

    function: str
    arguments: tuple[Expression, ...]


Expression: TypeAlias = Number | Symbol | Apply


def quotient(over: Expression, under: Expression) -> Apply:
    """``over / under``."""
    return Apply("*", (over, Apply("over", (under,))))


def parts(tree: Expression) -> Iterator[Expression]:
    """The tree and everything in it."""
    open_trees = [tree]
    while open_trees:
        tree = open_trees.pop()
        yield tree
        if isinstance(tree, Apply):
            open_trees.extend(tree.arguments)


def symbols(tree: Expression) -> frozenset[str]:
    """The names in it; those of functions and indices are not told apart from others."""
    return frozenset(part.name for part in parts(tree) if isinstance(part, Symbol))


def ordered(tree: Expression) -> Expression:
    """The same sums and products with their terms and factors in one order."""
    if not isinstance(tree, Apply):
        return tree
    arguments = tuple(map(ordered, tree.arguments))
    return Apply(tree.function, tuple(sorted(arguments, key=repr)) if tree.function in ("+", "*") else arguments)


def is_rounded(tree: Expression) -> bool:
    """Whether a decimal of so many places stands in it that it may be rounded: a shorter one is meant as it stands."""
    return any(
        isinstance(part, Number) and (part.places >= ROUNDED_PLACES or part.digits >= FLOAT_DIGITS)
        for part in parts(tree)
    )


def applied(tree: Expression) -> frozenset[str]:
    """The operators and functions in it."""
    return frozenset(part.function for part in parts(tree) if isinstance(part, Apply))
