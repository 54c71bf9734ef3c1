r"""The ToRL protocol: a fenced program, followed by an ``output`` fence that the model opens and the environment fills.

A turn ends at ``` ```output ```. Text that the engine sampled after this fence is ignored. The program is the last
closed Python block before the fence, and must be marked ``py``, ``python`` or ``python3``. In a turn that ends with the
end of sequence, the last ``\boxed{...}`` outside programs is the answer.

**Malformed turns.** A turn is malformed if it has an ``output`` fence without a preceding program, if a program's fence
is not closed, or if a closed program is followed by neither an ``output`` fence nor an answer. The model then reads an
error message instead of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_envs.protocols.base import ParsedTurn, TextProtocol, malformed_turn
from agentrl_envs.protocols.texts import PythonBlock, find_python_blocks, last_boxed_answer
from agentrl_envs.types import Problem

_OUTPUT_FENCE = "```output"
_NO_PROGRAM = "ToolCallError: there is no ```python block before this ```output block"
_EMPTY_PROGRAM = "ToolCallError: the ```python block is empty"
_NOT_CLOSED = "ToolCallError: the ```python block is not closed by a line ```"
_NOT_RUN = "ToolCallError: the program was not run: write ```output on the line after its block"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToRLProtocol(TextProtocol):
    """The ToRL protocol: a plain-text dialogue between user and assistant.

    >>> protocol = ToRLProtocol(instruction="", observation_limit=512)
    >>> turn = "```python\\nprint(2+3)\\n```\\n```output"
    >>> protocol.turn_complete(turn), protocol.parse(turn).program, protocol.observation(turn, ["5"])
    (True, 'print(2+3)\\n', '\\n5\\n```\\n')
    """

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The opening fence of the output."""
        return (_OUTPUT_FENCE,)

    def plain_prompt(self, problem: Problem) -> str:
        """Return the instruction, the statement as the user's message, and the start of the assistant's message."""
        return "\n".join(part for part in (self.instruction, f"User: {problem.statement}", "Assistant:") if part)

    def turn_complete(self, text: str) -> bool:
        """Return True if the text opens an ``output`` fence, with or without a program."""
        return _OUTPUT_FENCE in text

    def parse(self, text: str) -> ParsedTurn:
        """Return the last program before the ``output`` fence or, without the fence, the answer or a malformed call."""
        start = text.find(_OUTPUT_FENCE)
        if start >= 0:
            # Keep the backticks of the output fence, because they may close the program.
            return _turn_with_last_program(list(find_python_blocks(text[: start + 3], bare=False)))
        blocks = list(find_python_blocks(text, bare=False))
        answer = last_boxed_answer(_remove_blocks(text, blocks))
        if blocks and blocks[-1].program is None:
            return malformed_turn(_NOT_CLOSED)
        if blocks and answer is None:
            return malformed_turn(_NOT_RUN)
        return ParsedTurn(program=None, answer=answer)

    def format_results(self, text: str, results: Sequence[str]) -> str:
        """Return the rest of the ``output`` block, or the whole block if the model did not open it."""
        opened = "" if _OUTPUT_FENCE in text else ("" if text.endswith("\n") else "\n") + _OUTPUT_FENCE
        newline = "" if not opened and text.endswith("\n") else "\n"
        return f"{opened}{newline}{' '.join(results)}\n```\n"


def _turn_with_last_program(blocks: list[PythonBlock]) -> ParsedTurn:
    """Return the turn that runs the last block before an ``output`` fence."""
    if not blocks:
        return malformed_turn(_NO_PROGRAM)
    program = blocks[-1].program
    if program is None:
        return malformed_turn(_NOT_CLOSED)
    return ParsedTurn(program=program, answer=None) if program.strip() else malformed_turn(_EMPTY_PROGRAM)


def _remove_blocks(text: str, blocks: list[PythonBlock]) -> str:
    """Return the text outside the blocks."""
    kept, position = [], 0
    for block in blocks:
        kept.append(text[position : block.start])
        position = block.end
    return "".join([*kept, text[position:]])
