"""How a conversation is written in text: what a Protocol has to say."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import Execution, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRequest:
    """A call of a tool that exists, with arguments that it takes."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class MalformedCall:
    """An attempt at a call that cannot be made. The model is shown ``message`` in the place of a result."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """What stands in one turn of the model.

    ``program`` is the code to run, ``answer`` the answer in the model's own words (outside programs); None if absent.
    ``calls`` are the other calls of a turn without program, in order.
    """

    program: str | None
    answer: str | None
    calls: tuple[ToolRequest | MalformedCall, ...] = ()


class Protocol(typing.Protocol):
    """Pure functions between text and meaning; holds no state of a conversation."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings at which an engine stops generating."""
        ...

    @property
    def empty_turn(self) -> Ended:
        """How an episode ends by a turn with neither call nor answer."""
        ...

    def message(self, statement: str) -> str:
        """What a user who poses the problem says."""
        ...

    def prompt(self, problem: Problem) -> str:
        """The text before the model's first turn."""
        ...

    def turn_complete(self, text: str) -> bool:
        """Whether the text of a turn is a whole turn; once True, it stays True whatever is appended."""
        ...

    def parse(self, text: str) -> ParsedTurn:
        """The program, the other calls and the answer in a turn's text."""
        ...

    def runnable(self, problem: Problem, program: str) -> str:
        """The source that the sandbox runs for this program."""
        ...

    def printed_answer(self, stdout: str) -> str | None:
        """The answer that a program gave while it ran, if any, by what it printed."""
        ...

    def result(self, execution: Execution) -> str:
        """What is shown of a program's output, or of what went wrong."""
        ...

    def observation(self, text: str, results: Sequence[str]) -> str:
        """What the model reads after the turn ``text``: the results of its program or its calls, one or more."""
        ...


_NOTES = {
    Outcome.TIMEOUT: "TimeoutError: the program did not finish in time",
    Outcome.MEMORY_LIMIT: "MemoryError: the program needs more memory than it may use",
    Outcome.OUTPUT_LIMIT: "OutputLimitError: the program prints more than it may",
    Outcome.KILLED: "KilledError: the program was killed",
}
_CUT = "\n[... output cut ...]\n"


def shown(execution: Execution, limit: int) -> str:
    """The output, or what went wrong: the last line of stderr, or a note where a limit ended the program."""
    return clip(_NOTES.get(execution.outcome) or _last_line(execution.stderr) or execution.stdout.strip("\r\n"), limit)


def clip(output: str, limit: int) -> str:
    """``output``, or of a longer one its first and its last half of ``limit`` characters."""
    if len(output) <= limit:
        return output
    head = limit // 2
    return output[:head] + _CUT + output[len(output) - (limit - head) :]


def with_setup(setup: str, program: str) -> str:
    """The problem's setup and the program in one module."""
    return "\n".join(part for part in (setup, program) if part)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextAnswerProtocol:
    """``observation_limit``: characters of a program's output that the model is shown."""

    instruction: str
    observation_limit: int

    @property
    def empty_turn(self) -> Ended:
        """An ordinary end, worth nothing."""
        return Ended.STOPPED

    def runnable(self, problem: Problem, program: str) -> str:
        """The problem's setup and the program."""
        return with_setup(problem.setup, program)

    def printed_answer(self, stdout: str) -> str | None:
        """None: what a program prints is no answer."""
        return None

    def result(self, execution: Execution) -> str:
        """The output, or what went wrong, cut to ``observation_limit`` characters."""
        return shown(execution, self.observation_limit)


def malformed(message: str) -> ParsedTurn:
    """A turn that is one call which cannot be made."""
    return ParsedTurn(program=None, answer=None, calls=(MalformedCall(message=message),))


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
