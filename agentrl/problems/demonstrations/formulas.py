"""Arithmetic formulas of data sets, parsed without ``eval``: integers, ``+ - * /`` and parentheses."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

MAX_LENGTH: Final = 200  # characters; limits the parser's depth
MAX_VALUE: Final = 10**12

_ALLOWED = re.compile(r"[\d\s()+*/.,-]+")
_NUMBER = re.compile(r"\d+")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class FormulaError(ValueError):
    """The formula cannot be computed with integers; ``reason`` completes "problems ..."."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a formula {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Formula:
    """An arithmetic expression of integers.

    >>> formula = Formula.parse("(25+5)/6=5")
    >>> formula.numbers, formula.value(), formula.python()
    ((25, 5, 6), 5, '(25+5)//6')
    >>> formula.with_numbers({25: 40, 5: 8}).python()
    '(40+8)//6'
    """

    tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Parse ``LEFT=RIGHT`` (RIGHT must be a number that equals LEFT) or ``LEFT`` alone.

        Raises FormulaError if the formula contains more than integers, ``+ - * /`` and parentheses.
        """
        left, equals, right = text.partition("=")
        if len(text) > MAX_LENGTH or not _ALLOWED.fullmatch(left):
            raise FormulaError("whose formula is more than arithmetic")
        if equals and not _ALLOWED.fullmatch(right):
            raise FormulaError("whose formula is more than arithmetic")
        try:
            tree = ast.parse(re.sub(r"(?<=\d),(?=\d{3})", "", left).strip(), mode="eval").body
        except SyntaxError as error:
            raise FormulaError("whose formula is malformed") from error
        formula = cls(_checked(tree))
        if equals and str(formula.value()) != right.strip().replace(",", ""):
            raise FormulaError("whose formula does not add up")
        return formula

    @property
    def numbers(self) -> tuple[int, ...]:
        """Distinct numbers in the formula, in order of appearance."""
        return tuple(dict.fromkeys(map(int, _NUMBER.findall(self.python()))))

    def value(self, *, floor: bool = False) -> int:
        """Compute the value; with ``floor``, divisions round down as in Python.

        Raises FormulaError if a division without ``floor`` has a remainder, or if a step is negative or huge.

        >>> Formula.parse("(50+59)//2").value(floor=True)
        54
        """
        return _value(self.tree, floor)

    def python(self) -> str:
        """Return the formula in Python, with as few parentheses as possible."""
        return ast.unparse(self.tree).replace(" ", "")

    def with_numbers(self, replaced: Mapping[int, int]) -> Formula:
        """Return the formula with the keys of ``replaced`` replaced. Other numbers are unchanged."""
        text = _NUMBER.sub(lambda match: str(replaced.get(int(match[0]), int(match[0]))), self.python())
        return Formula(ast.parse(text, mode="eval").body)


def _checked(node: ast.expr) -> ast.expr:
    """Convert the tree to integers, and ``/`` to ``//``. Raises FormulaError for nodes that are not arithmetic."""
    if isinstance(node, ast.BinOp):
        sign = ast.FloorDiv() if isinstance(node.op, ast.Div) else node.op
        if type(sign) in _OPERATORS:
            return ast.BinOp(left=_checked(node.left), op=sign, right=_checked(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        if node.value != int(node.value):
            raise FormulaError("whose formula has decimals")
        return ast.Constant(value=int(node.value))
    raise FormulaError("whose formula is more than arithmetic")


def _value(node: ast.expr, floor: bool) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    assert isinstance(node, ast.BinOp)  # ensured by `_checked`
    left, right = _value(node.left, floor), _value(node.right, floor)
    if isinstance(node.op, ast.FloorDiv) and (right == 0 or (left % right and not floor)):
        raise FormulaError("whose division leaves a remainder")
    value = _OPERATORS[type(node.op)](left, right)
    if not 0 <= value <= MAX_VALUE:
        raise FormulaError("with a negative or huge step")
    return value
