"""Compiles a program so that the value of its last expression is printed, as in a notebook.

If the last statement of the syntax tree is an expression, it is compiled as in the interactive interpreter, which
passes its value to ``sys.displayhook``: the representation is printed, or nothing for None. A semicolon after the
expression suppresses this.
"""

from __future__ import annotations
import __future__

import ast
import functools
import io
import operator
import re
import tokenize
from types import CodeType

_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
_LINES = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|\Z)")


def compile_with_echo(text: str, name: str) -> list[CodeType]:
    """The code objects to execute in order. Raises what ``compile`` raises, before anything runs."""
    tree = compile(text, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or _is_silenced(text, last):
        return [compile(tree, name, "exec", dont_inherit=True)]
    before = compile(ast.Module(body=tree.body[:-1], type_ignores=[]), name, "exec", dont_inherit=True)
    shown = compile(ast.Interactive(body=[last]), name, "single", before.co_flags & _FUTURE, dont_inherit=True)
    return [before, shown]


def _is_silenced(text: str, last: ast.Expr) -> bool:
    """Whether the first token after the last statement is a semicolon."""
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    lines = _LINES.findall(text.encode("utf-8", "surrogatepass"))[last.end_lineno - 1 :]
    rest = lines[0][last.end_col_offset :] + b"".join(lines[1:])
    for token in tokenize.generate_tokens(io.StringIO(rest.decode().lstrip()).readline):
        if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT):
            return token.string == ";"
    return False
