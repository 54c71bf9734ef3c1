r"""Reasoning without tools: one turn, whose last ``\boxed{...}`` is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_envs.answers import last_boxed
from agentrl_envs.protocols.base import ParsedTurn
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import Execution


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningProtocol:
    """One turn up to the end of sequence; nothing in it is run.

    >>> ReasoningProtocol(instruction="").parse("2 + 3 is \\\\boxed{5}.").answer
    '5'
    """

    instruction: str

    @property
    def stop(self) -> tuple[str, ...]:
        """None: the turn ends at the end of sequence or at a token limit."""
        return ()

    @property
    def empty_turn(self) -> Ended:
        """An ordinary end, worth nothing."""
        return Ended.STOPPED

    def message(self, statement: str) -> str:
        """The instruction, an empty line and the statement."""
        return "\n\n".join(part for part in (self.instruction, statement) if part)

    def prompt(self, problem: Problem) -> str:
        """The message, ended by a newline."""
        return self.message(problem.statement) + "\n"

    def turn_complete(self, text: str) -> bool:
        """False: no text ends the turn."""
        return False

    def parse(self, text: str) -> ParsedTurn:
        """The answer alone."""
        return ParsedTurn(program=None, answer=last_boxed(text))

    def runnable(self, problem: Problem, program: str) -> str:
        """Never asked for: no turn has a program."""
        raise AssertionError("reasoning runs no program")

    def printed_answer(self, stdout: str) -> str | None:
        """Never asked for: no turn has a program."""
        raise AssertionError("reasoning runs no program")

    def result(self, execution: Execution) -> str:
        """Never asked for: no turn has a program."""
        raise AssertionError("reasoning runs no program")

    def observation(self, text: str, results: Sequence[str]) -> str:
        """Never asked for: no turn has a program or a call."""
        raise AssertionError("reasoning observes nothing")
