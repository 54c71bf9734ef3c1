r"""The SimpleTIR protocol: Python in fenced blocks, output after ``Code execution result: ``, and boxed answers.

**Fences.** `agentrl_envs.protocols.texts` defines the fences, including bare fences. The first closed Python block is
the turn's program. Blocks in other languages are text.

**End of a turn.** A turn ends at the first closed fence. Text that the engine sampled after the fence is ignored. A
turn without a program ends at the end of sequence or at a token limit; the driver handles these cases.

**Precedence of answers.** A turn's program runs even if the model's text already contains a boxed answer. A complete
``\boxed{...}`` that the program prints (as `final_answer` does) takes precedence. It was computed. It is also the last
box in the conversation, and published graders use the last box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_envs.protocols.base import ParsedTurn, TextProtocol
from agentrl_envs.protocols.texts import first_python_block, last_boxed_answer, prepend_setup
from agentrl_envs.types import Ended, Problem

_FINAL_ANSWER = 'def final_answer(answer):\n    print("\\\\boxed{" + str(answer) + "}")\n'


@dataclass(frozen=True, kw_only=True, slots=True)
class SimpleTIRProtocol(TextProtocol):
    """The SimpleTIR protocol: fenced programs and boxed answers.

    >>> protocol = SimpleTIRProtocol(instruction="", observation_limit=512)
    >>> protocol.turn_complete("Let me see.\\n```py"), protocol.turn_complete("```py\\nprint(1)\\n```")
    (False, True)
    >>> protocol.parse("```py\\nprint(1)\\n```").program
    'print(1)\\n'
    """

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """A fence at the start of a line, after up to three spaces.

        The newline is part of the string, so a turn that starts with its opening fence does not stop there.
        """
        return ("\n```", "\n ```", "\n  ```", "\n   ```")

    @property
    def end_after_empty_turn(self) -> Ended:
        """`Ended.VOID_TURN`. The rollout is dropped."""
        return Ended.VOID_TURN

    def turn_complete(self, text: str) -> bool:
        """Return True if a Python block is closed."""
        block = first_python_block(text)
        return block is not None and block.program is not None

    def parse(self, text: str) -> ParsedTurn:
        """Return the first closed program (None if blank) and the last boxed answer before it."""
        block = first_python_block(text)
        if block is None:
            return ParsedTurn(program=None, answer=last_boxed_answer(text))
        program = block.program if block.program is not None and block.program.strip() else None
        return ParsedTurn(program=program, answer=last_boxed_answer(text[: block.start]))

    def source_to_run(self, problem: Problem, program: str) -> str:
        """Return `final_answer`, the problem's setup and the program as one module.

        A ``from __future__`` import in the program is therefore a syntax error, which the model reads like any other
        error.
        """
        return prepend_setup(_FINAL_ANSWER, prepend_setup(problem.setup, program))

    def printed_answer(self, stdout: str) -> str | None:
        r"""Return the last complete ``\boxed{...}`` in the output, even if the program failed afterwards."""
        return last_boxed_answer(stdout)

    def format_results(self, text: str, results: Sequence[str]) -> str:
        """Return the result of the turn's program."""
        return f"\nCode execution result: {' '.join(results)}\n"
