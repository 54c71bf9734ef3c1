r"""Extraction of fenced programs and boxed answers, and formatting of the output that the model reads.

A fence is three backticks at the start of a line, after up to three spaces as in CommonMark. An opening fence may be
bare or contain ``py``, ``python`` or ``python3`` in any case, with spaces or a CR before the end of the line. A fence
with one of these words may also follow other text in a line (``Code: ```python``). Backticks inside a line of the
program do not close the block. Blocks in other languages are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from agentrl_sandbox.client import Execution, Outcome

_OUTCOME_NOTES = {
    Outcome.TIMEOUT: "TimeoutError: the program did not finish in time",
    Outcome.MEMORY_LIMIT: "MemoryError: the program needs more memory than it may use",
    Outcome.OUTPUT_LIMIT: "OutputLimitError: the program prints more than it may",
    Outcome.KILLED: "KilledError: the program was killed",
}
_CUT_NOTE = "\n[... output cut ...]\n"


def format_execution_result(execution: Execution, limit: int) -> str:
    """Return the output or error that the model reads, shortened to ``limit`` characters.

    This is a note if the program was stopped, otherwise the last line of stderr, or stdout if stderr is empty.
    """
    return truncate_output(
        _OUTCOME_NOTES.get(execution.outcome) or _last_line(execution.stderr) or execution.stdout.strip("\r\n"), limit
    )


def truncate_output(output: str, limit: int) -> str:
    """Return ``output``, or its first and last ``limit / 2`` characters if it is longer than ``limit``."""
    if len(output) <= limit:
        return output
    head = limit // 2
    return output[:head] + _CUT_NOTE + output[len(output) - (limit - head) :]


def prepend_setup(setup: str, program: str) -> str:
    """Return the setup and the program as one module."""
    return "\n".join(part for part in (setup, program) if part)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()


_BOX_OR_BRACE = re.compile(r"(?P<boxed>\\boxed[ \t]*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def last_boxed_answer(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}``, or None.

    If several boxes are complete, the last box to open counts. Escaped braces (``\{``, ``\}``) are text. Boxes with
    unbalanced braces are ignored. Empty boxes are ignored too, because a model that repeats the instruction writes
    ``\boxed{}``. Takes linear time.

    >>> last_boxed_answer(r"So \boxed{4}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> last_boxed_answer(r"an open \boxed{4 has no answer") is None
    True
    """
    open_boxes: list[int | None] = []  # per open brace: start of the content if it is a box, else None
    last: tuple[int, int] | None = None
    for token in _BOX_OR_BRACE.finditer(text):
        if token["boxed"]:
            open_boxes.append(token.end())
        elif token["open"]:
            open_boxes.append(None)
        elif token["close"] and open_boxes:
            start = open_boxes.pop()
            if start is not None and (last is None or start > last[0]) and text[start : token.start()].strip():
                last = (start, token.start())
    return None if last is None else text[last[0] : last[1]].strip()


_PYTHON_NAMES = frozenset({"py", "python", "python3"})
_OPENING_FENCE = re.compile(
    r"^(?P<indent> {0,3})```(?P<info>[^`\n]*)\n|```(?P<inline>py|python|python3)[ \t]*\r?\n",
    re.MULTILINE | re.IGNORECASE,
)
_CLOSING_FENCE = re.compile(r"^ {0,3}```", re.MULTILINE)
_FOREIGN_CLOSING_FENCE = re.compile(r"^ {0,3}```[ \t]*\r?$", re.MULTILINE)


class PythonBlock(NamedTuple):
    """A Python block: the start of its opening fence, its program if closed, and the end of its closing fence."""

    start: int
    program: str | None
    end: int


def find_python_blocks(text: str, *, bare: bool = True) -> Iterator[PythonBlock]:
    """Yield the Python blocks in order. The last block may be open.

    With ``bare``, a fence without a language also opens a block.
    """
    words = _PYTHON_NAMES | {""} if bare else _PYTHON_NAMES
    position = 0
    while (opening := _OPENING_FENCE.search(text, position)) is not None:
        if opening["inline"] or opening["info"].strip().lower() in words:
            closing = _CLOSING_FENCE.search(text, opening.end())
            if closing is None:
                yield PythonBlock(opening.start(), None, len(text))
                return
            body = text[opening.end() : closing.start()]
            yield PythonBlock(opening.start(), _unindent_program(body, opening["indent"] or ""), closing.end())
            position = closing.end()
            continue
        foreign = _FOREIGN_CLOSING_FENCE.search(text, opening.end())
        if foreign is None:
            return
        position = foreign.end()


def first_python_block(text: str) -> PythonBlock | None:
    """Return the first Python block, open or closed, or None."""
    return next(find_python_blocks(text), None)


def _unindent_program(body: str, indent: str) -> str:
    """Return the program with LF line endings and without the indentation of its fence."""
    body = body.replace("\r\n", "\n")
    return re.sub(rf"^ {{1,{len(indent)}}}", "", body, flags=re.MULTILINE) if indent else body
