"""Fenced blocks of Python in a model's text.

A fence is three backticks at the start of a line (up to three blanks before it, as in CommonMark). The opening fence
may be bare or say ``py``, ``python`` or ``python3`` in any case, with blanks or a CR before the line's end; with one of
these words it may also stand inside a line (``Code: ```python``). Backticks inside a line of the program do not close
it. Blocks in other languages are skipped as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_WORDS = frozenset({"py", "python", "python3"})
_OPENING = re.compile(
    r"^(?P<indent> {0,3})```(?P<info>[^`\n]*)\n|```(?P<inline>py|python|python3)[ \t]*\r?\n",
    re.MULTILINE | re.IGNORECASE,
)
_CLOSING = re.compile(r"^ {0,3}```", re.MULTILINE)
_FOREIGN_CLOSING = re.compile(r"^ {0,3}```[ \t]*\r?$", re.MULTILINE)


class Block(NamedTuple):
    """A Python block: where its opening fence starts and, if it is closed, its program and where that fence ends."""

    start: int
    program: str | None
    end: int


def python_blocks(text: str, *, bare: bool = True) -> Iterator[Block]:
    """The Python blocks in order; the last one may be open. ``bare``: a fence without a word opens one too."""
    words = _WORDS | {""} if bare else _WORDS
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        if opening["inline"] or opening["info"].strip().lower() in words:
            closing = _CLOSING.search(text, opening.end())
            if closing is None:
                yield Block(opening.start(), None, len(text))
                return
            body = text[opening.end() : closing.start()]
            yield Block(opening.start(), _source(body, opening["indent"] or ""), closing.end())
            position = closing.end()
            continue
        foreign = _FOREIGN_CLOSING.search(text, opening.end())
        if foreign is None:
            return
        position = foreign.end()


def first_python_block(text: str) -> Block | None:
    """The first Python block, open or closed."""
    return next(python_blocks(text), None)


def _source(body: str, indent: str) -> str:
    """The program with LF line ends and without the blanks that its fence was indented by."""
    body = body.replace("\r\n", "\n")
    return re.sub(rf"^ {{1,{len(indent)}}}", "", body, flags=re.MULTILINE) if indent else body
