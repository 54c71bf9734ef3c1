"""Read Python notation as SymPy, without evaluating it: what a program prints is often ``sqrt(2)/2`` or ``x**2``.

LaTeX parsers read ``pi/4`` as p times i over four. The text is parsed by `ast` and only the forms below are built;
everything else is None, never an error. Imports SymPy: for the grading process alone.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from typing import Any

import sympy

_NAMES: dict[str, Any] = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I, "oo": sympy.oo, "inf": sympy.oo}
_SYMPY_FUNCTIONS = """
    sqrt cbrt root Rational Integer Float exp log sin cos tan asin acos atan sec csc cot
    binomial factorial Abs floor ceiling
"""
_FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(sympy, name) for name in _SYMPY_FUNCTIONS.split()}
_FUNCTIONS |= {"Fraction": sympy.Rational, "abs": sympy.Abs, "ln": sympy.log}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_MAX_EXPONENT = 1000  # of a number, so that 10**10**10 is not built


class _Unsupported(Exception):
    """The text is not in the notation understood here."""


def python_notation(text: str) -> Any | None:
    """The SymPy object that the text writes in Python notation, or None. Comments and 1_000 are no notation."""
    if "#" in text or "_" in text:
        return None
    try:
        return _build(ast.parse(text.strip(), mode="eval").body)
    except (_Unsupported, SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None


def _build(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool()):
            raise _Unsupported
        case ast.Constant(value=int() as value):
            return sympy.Integer(value)
        case ast.Constant(value=float() as value):
            return sympy.Rational(repr(value))
        case ast.Constant(value=complex() as value) if value.real == 0:
            return sympy.Rational(repr(value.imag)) * sympy.I
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Name(id=name) if len(name) == 1:
            return sympy.Symbol(name, real=True)  # as math-verify's LaTeX parser makes them
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _build(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _operate(type(op), _build(left), _build(right))
        case ast.Call(func=ast.Name(id="Matrix" | "array"), args=[ast.List(elts=rows)], keywords=[]):
            return sympy.ImmutableMatrix([_row(row) for row in rows])
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*_all(args))
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return sympy.Tuple(*_all(items))
        case ast.Set(elts=items):
            return sympy.FiniteSet(*_all(items))
    raise _Unsupported


def _row(node: ast.expr) -> list[Any]:
    return _all(node.elts) if isinstance(node, ast.List) else [_build(node)]


def _all(nodes: Iterable[ast.expr]) -> list[Any]:
    return [_build(node) for node in nodes]


def _operate(op: type[ast.operator], left: Any, right: Any) -> Any:
    if op is ast.Pow and left.is_number and not (right.is_number and abs(right) <= _MAX_EXPONENT):
        raise _Unsupported
    return _OPERATORS[op](left, right)
