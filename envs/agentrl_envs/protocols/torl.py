r"""The ToRL protocol: a fenced program, then the model opens an ``output`` fence, which is filled and closed for it.

A turn is over at ``` ```output ```. The program is the last closed Python block before it; the fence must say
``py``, ``python`` or ``python3``. What an engine sampled past the word is in no program and in no answer. A turn that
ends by end of sequence calls nothing: the last ``\boxed{...}`` outside its programs is its answer.

**Malformed** is an ``output`` fence without a program before it, a program whose fence is still open at the turn's
end, and a closed program whose turn ends with neither an ``output`` fence nor an answer. The model then reads what was
wrong, in the fence where a result would stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_envs.protocols.base import Block, ParsedTurn, TextAnswerProtocol, last_boxed, malformed, python_blocks
from agentrl_envs.types import Problem

_OUTPUT = "```output"
_NO_PROGRAM = "CallError: there is no ```python block before this ```output block"
_EMPTY = "CallError: the ```python block is empty"
_OPEN = "CallError: the ```python block is not closed by a line ```"
_NOT_RUN = "CallError: the program was not run: write ```output on the line after its block"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToRLProtocol(TextAnswerProtocol):
    """ToRL as text: a dialogue of user and assistant, written without a chat template.

    >>> protocol = ToRLProtocol(instruction="", observation_limit=512)
    >>> turn = "```python\\nprint(2+3)\\n```\\n```output"
    >>> protocol.turn_complete(turn), protocol.parse(turn).program, protocol.observation(turn, ["5"])
    (True, 'print(2+3)\\n', '\\n5\\n```\\n')
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """The opening of the fence in which the output is to stand."""
        return (_OUTPUT,)

    def message(self, statement: str) -> str:
        """The instruction and the statement, without the names of a dialogue."""
        return "\n\n".join(part for part in (self.instruction, statement) if part)

    def prompt(self, problem: Problem) -> str:
        """The instruction, the statement as the user's words, and the beginning of the assistant's."""
        return "\n".join(part for part in (self.instruction, f"User: {problem.statement}", "Assistant:") if part)

    def turn_complete(self, text: str) -> bool:
        """True once an ``output`` fence is opened, be there a program or not."""
        return _OUTPUT in text

    def parse(self, text: str) -> ParsedTurn:
        """The last program before the ``output`` fence; without that fence the answer; else what is malformed."""
        place = text.find(_OUTPUT)
        if place >= 0:
            # The fence of the output may be the one that closes the program.
            return _called(list(python_blocks(text[: place + 3], bare=False)))
        blocks = list(python_blocks(text, bare=False))
        answer = last_boxed(_without(text, blocks))
        if blocks and blocks[-1].program is None:
            return malformed(_OPEN)
        if blocks and answer is None:
            return malformed(_NOT_RUN)
        return ParsedTurn(program=None, answer=answer)

    def observation(self, text: str, results: Sequence[str]) -> str:
        """The rest of the ``output`` block; the whole of it where the model did not open one."""
        opened = "" if _OUTPUT in text else ("" if text.endswith("\n") else "\n") + _OUTPUT
        newline = "" if not opened and text.endswith("\n") else "\n"
        return f"{opened}{newline}{' '.join(results)}\n```\n"


def _called(blocks: list[Block]) -> ParsedTurn:
    if not blocks:
        return malformed(_NO_PROGRAM)
    program = blocks[-1].program
    if program is None:
        return malformed(_OPEN)
    return ParsedTurn(program=program, answer=None) if program.strip() else malformed(_EMPTY)


def _without(text: str, blocks: list[Block]) -> str:
    """The text outside of the blocks."""
    kept, position = [], 0
    for block in blocks:
        kept.append(text[position : block.start])
        position = block.end
    return "".join([*kept, text[position:]])
