r"""Find the answer in a text: the last complete ``\boxed{...}``.

>>> last_boxed(r"So \boxed{4}, no: \boxed{\frac{1}{2}}.")
'\\frac{1}{2}'
>>> last_boxed(r"an open \boxed{4 has no answer") is None
True
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"(?P<boxed>\\boxed[ \t]*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""The stripped content of the ``\boxed{...}`` that opens last among those that close, or None.

    Escaped braces (``\{``, ``\}``) do not count, a box whose braces do not balance is no answer, and neither is an
    empty one (a model that repeats the instruction writes ``\boxed{}``). One pass: linear in the length of the text.
    """
    open_boxes: list[int | None] = []  # per open brace: where the content starts if the brace is a box's
    found: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        if token["boxed"]:
            open_boxes.append(token.end())
        elif token["open"]:
            open_boxes.append(None)
        elif token["close"] and open_boxes:
            start = open_boxes.pop()
            if start is not None and (found is None or start > found[0]) and text[start : token.start()].strip():
                found = (start, token.start())
    return None if found is None else text[found[0] : found[1]].strip()
