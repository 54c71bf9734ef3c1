r"""The SimpleTIR protocol: Python in fenced blocks, output after ``Code execution result: ``, answers boxed.

**Fences.** A fence is three backticks at the start of a line (up to three blanks before it, as in CommonMark). The
opening fence may be bare or say ``py``, ``python`` or ``python3`` in any case, with blanks or a CR before the line's
end; with one of these words it may also stand inside a line (``Code: ```python``). The first Python block that is
closed is the turn's program. Backticks inside a line of the program do not close it. Blocks in other languages are
the model's own text.

**The turn's end.** The turn is over at the first closed fence; what an engine sampled past it is in no program and in
no answer. A turn without a program ends at the end of sequence (or a token limit), which is the driver's to see.

**Whose answer counts.** The program of a turn runs even when the model's own text already boxes an answer. If the
program prints a complete ``\boxed{...}`` (`final_answer` does), that one counts: it was computed, and it is the last
in the conversation, which is what published graders read. Otherwise the text's counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from agentrl_envs.answers import last_boxed
from agentrl_envs.protocols.base import ParsedTurn
from agentrl_envs.types import Problem
from agentrl_sandbox.client import Execution, Outcome

_PYTHON_TAGS = frozenset({"", "py", "python", "python3"})
_OPENING = re.compile(
    r"^(?P<indent> {0,3})```(?P<info>[^`\n]*)\n|```(?P<inline>py|python|python3)[ \t]*\r?\n",
    re.MULTILINE | re.IGNORECASE,
)
_CLOSING = re.compile(r"^ {0,3}```", re.MULTILINE)
_FOREIGN_CLOSING = re.compile(r"^ {0,3}```[ \t]*\r?$", re.MULTILINE)

_FINAL_ANSWER = 'def final_answer(answer):\n    print("\\\\boxed{" + str(answer) + "}")\n'
_NOTES = {
    Outcome.TIMEOUT: "TimeoutError: the program did not finish in time",
    Outcome.MEMORY_LIMIT: "MemoryError: the program needs more memory than it may use",
    Outcome.OUTPUT_LIMIT: "OutputLimitError: the program prints more than it may",
    Outcome.KILLED: "KilledError: the program was killed",
}
_CUT = "\n[... output cut ...]\n"


class _Block(NamedTuple):
    """The first Python block: where its opening fence starts and, if it is closed, its program."""

    start: int
    program: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SimpleTIRProtocol:
    """SimpleTIR as text. ``instruction`` stands before the statement; observations keep ``observation_limit`` chars.

    >>> protocol = SimpleTIRProtocol(instruction="", observation_limit=512)
    >>> protocol.turn_complete("Let me see.\\n```py"), protocol.turn_complete("```py\\nprint(1)\\n```")
    (False, True)
    >>> protocol.parse("```py\\nprint(1)\\n```")
    ParsedTurn(program='print(1)\\n', answer=None)
    """

    instruction: str
    observation_limit: int

    @property
    def stop(self) -> tuple[str, ...]:
        """A fence at a line's start, after up to three blanks: a turn that opens with its fence is not interrupted."""
        return ("\n```", "\n ```", "\n  ```", "\n   ```")

    def prompt(self, problem: Problem) -> str:
        """The instruction, an empty line and the statement, ended by a newline. No system message."""
        return "\n\n".join(part for part in (self.instruction, problem.statement) if part) + "\n"

    def turn_complete(self, text: str) -> bool:
        """True once a Python block is closed."""
        block = _first_python_block(text)
        return block is not None and block.program is not None

    def parse(self, text: str) -> ParsedTurn:
        """The first closed program (None if it is blank) and the last boxed answer before it."""
        block = _first_python_block(text)
        if block is None:
            return ParsedTurn(program=None, answer=last_boxed(text))
        program = block.program if block.program is not None and block.program.strip() else None
        return ParsedTurn(program=program, answer=last_boxed(text[: block.start]))

    def runnable(self, problem: Problem, program: str) -> str:
        """`final_answer`, the problem's setup and the program, one after the other in one module.

        So a program's ``from __future__`` import is a syntax error, which the model is shown like any other.
        """
        return "\n".join(part for part in (_FINAL_ANSWER, problem.setup, program) if part)

    def printed_answer(self, stdout: str) -> str | None:
        r"""The last complete ``\boxed{...}``, however the program ended afterwards."""
        return last_boxed(stdout)

    def observation(self, execution: Execution) -> str:
        """The output, or what went wrong: the last line of stderr, or a note where a limit ended the program."""
        output = _NOTES.get(execution.outcome) or _last_line(execution.stderr) or execution.stdout.strip("\r\n")
        return f"\nCode execution result: {self._clip(output)}\n"

    def _clip(self, output: str) -> str:
        if len(output) <= self.observation_limit:
            return output
        head = self.observation_limit // 2
        return output[:head] + _CUT + output[len(output) - (self.observation_limit - head) :]


def _first_python_block(text: str) -> _Block | None:
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        if opening["inline"] or opening["info"].strip().lower() in _PYTHON_TAGS:
            closing = _CLOSING.search(text, opening.end())
            if closing is None:
                return _Block(opening.start(), None)
            return _Block(opening.start(), _source(text[opening.end() : closing.start()], opening["indent"] or ""))
        foreign = _FOREIGN_CLOSING.search(text, opening.end())
        if foreign is None:
            return None
        position = foreign.end()
    return None


def _source(body: str, indent: str) -> str:
    """The program with LF line ends and without the blanks that its fence was indented by."""
    body = body.replace("\r\n", "\n")
    return re.sub(rf"^ {{1,{len(indent)}}}", "", body, flags=re.MULTILINE) if indent else body


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()
