"""The tree of a parsed expression: numbers, symbols, and functions applied to them.

>>> tree = FunctionCall("+", (Number(Fraction(1, 2)), Symbol("x")))
>>> sorted(symbol_names(tree)), contains_rounded_decimal(tree)
(['x'], False)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

MIN_ROUNDED_PLACES = 6
ROUNDING_TOLERANCE = Fraction(1, 2 * 10**6)  # decimals are equal if they agree to six decimal places
LEADING_DIGITS_TOLERANCE = Fraction(1, 10**5)  # small decimals must agree in their leading digits
FLOAT_DIGITS = 15


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number.

    For a decimal, ``digits`` is the number of significant digits and ``places`` the number of decimal places. For other
    numbers, both are 0.
    """

    value: Fraction
    digits: int = 0
    places: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable or a marked name: ``x``, ``x'``, ``a_{1}``, ``AB``, ``angle ABC``."""

    name: str


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """An operator or function with its arguments. An unknown function f is ``call f``.

    Arguments of ``sum`` and ``product``: body, index, from, to. Arguments of ``matrix``: its rows, each a ``row``.
    """

    function: str
    arguments: tuple[Expression, ...]


Expression: TypeAlias = Number | Symbol | FunctionCall


def divide(over: Expression, under: Expression) -> FunctionCall:
    """Return ``over / under``."""
    return FunctionCall("*", (over, FunctionCall("over", (under,))))


def subtrees(tree: Expression) -> Iterator[Expression]:
    """Yield the tree and all its subtrees."""
    open_trees = [tree]
    while open_trees:
        tree = open_trees.pop()
        yield tree
        if isinstance(tree, FunctionCall):
            open_trees.extend(tree.arguments)


def symbol_names(tree: Expression) -> frozenset[str]:
    """Return all names in the tree, including indices of sums and products."""
    return frozenset(part.name for part in subtrees(tree) if isinstance(part, Symbol))


def in_canonical_order(tree: Expression) -> Expression:
    """Return the tree with the terms and factors of sums and products in a canonical order."""
    if not isinstance(tree, FunctionCall):
        return tree
    arguments = tuple(map(in_canonical_order, tree.arguments))
    return FunctionCall(tree.function, tuple(sorted(arguments, key=repr)) if tree.function in ("+", "*") else arguments)


def contains_rounded_decimal(tree: Expression) -> bool:
    """Return True if the tree contains a decimal that may be rounded. Decimals with few places are exact."""
    return any(
        isinstance(part, Number) and (part.places >= MIN_ROUNDED_PLACES or part.digits >= FLOAT_DIGITS)
        for part in subtrees(tree)
    )


def function_names_in(tree: Expression) -> frozenset[str]:
    """Return the operators and functions in the tree."""
    return frozenset(part.function for part in subtrees(tree) if isinstance(part, FunctionCall))
