r"""The SimpleTIR protocol: Python in fenced blocks, output after ``Code execution result: ``, answers boxed.

**Fences.** Those of `agentrl_envs.protocols.base`, bare ones too. The first Python block that is closed is the
turn's program. Blocks in other languages are the model's own text.

**The turn's end.** The turn is over at the first closed fence; what an engine sampled past it is in no program and in
no answer. A turn without a program ends at the end of sequence (or a token limit), which is the driver's to see.

**Whose answer counts.** The program of a turn runs even when the model's own text already boxes an answer. If the
program prints a complete ``\boxed{...}`` (`final_answer` does), that one counts: it was computed, and it is the last
in the conversation, which is what published graders read. Otherwise the text's counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_envs.protocols.base import ParsedTurn, first_python_block, last_boxed, shown, with_setup
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import Execution

_FINAL_ANSWER = 'def final_answer(answer):\n    print("\\\\boxed{" + str(answer) + "}")\n'


@dataclass(frozen=True, kw_only=True, slots=True)
class SimpleTIRProtocol:
    """SimpleTIR as text. ``instruction`` stands before the statement; observations keep ``observation_limit`` chars.

    >>> protocol = SimpleTIRProtocol(instruction="", observation_limit=512)
    >>> protocol.turn_complete("Let me see.\\n```py"), protocol.turn_complete("```py\\nprint(1)\\n```")
    (False, True)
    >>> protocol.parse("```py\\nprint(1)\\n```").program
    'print(1)\\n'
    """

    instruction: str
    observation_limit: int

    @property
    def stop(self) -> tuple[str, ...]:
        """A fence at a line's start, after up to three blanks: a turn that opens with its fence is not interrupted."""
        return ("\n```", "\n ```", "\n  ```", "\n   ```")

    @property
    def empty_turn(self) -> Ended:
        """A void turn, whose trajectory is dropped."""
        return Ended.VOID_TURN

    def message(self, statement: str) -> str:
        """The instruction, an empty line and the statement."""
        return "\n\n".join(part for part in (self.instruction, statement) if part)

    def prompt(self, problem: Problem) -> str:
        """The message, ended by a newline."""
        return self.message(problem.statement) + "\n"

    def turn_complete(self, text: str) -> bool:
        """True once a Python block is closed."""
        block = first_python_block(text)
        return block is not None and block.program is not None

    def parse(self, text: str) -> ParsedTurn:
        """The first closed program (None if it is blank) and the last boxed answer before it."""
        block = first_python_block(text)
        if block is None:
            return ParsedTurn(program=None, answer=last_boxed(text))
        program = block.program if block.program is not None and block.program.strip() else None
        return ParsedTurn(program=program, answer=last_boxed(text[: block.start]))

    def runnable(self, problem: Problem, program: str) -> str:
        """`final_answer`, the problem's setup and the program, one after the other in one module.

        So a program's ``from __future__`` import is a syntax error, which the model is shown like any other.
        """
        return with_setup(_FINAL_ANSWER, with_setup(problem.setup, program))

    def printed_answer(self, stdout: str) -> str | None:
        r"""The last complete ``\boxed{...}``, however the program ended afterwards."""
        return last_boxed(stdout)

    def result(self, execution: Execution) -> str:
        """The output, or what went wrong, cut to ``observation_limit`` characters."""
        return shown(execution, self.observation_limit)

    def observation(self, text: str, results: Sequence[str]) -> str:
        """The one result of the turn's program."""
        return f"\nCode execution result: {' '.join(results)}\n"
