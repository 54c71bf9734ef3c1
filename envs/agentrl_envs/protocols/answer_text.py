"""What protocols share whose answers stand in the model's words and whose programs only print."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl_envs.protocols.base import MalformedCall, ParsedTurn
from agentrl_envs.protocols.results import shown, with_setup
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import Execution


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerInText:
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
