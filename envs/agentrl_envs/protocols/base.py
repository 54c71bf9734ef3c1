"""How a conversation is written in text: what a Protocol has to say."""

from __future__ import annotations

import typing
from dataclasses import dataclass

if typing.TYPE_CHECKING:
    from agentrl_envs.types import Problem
    from agentrl_sandbox.client import Execution


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """What stands in one turn of the model.

    ``program`` is the code to run, ``answer`` the answer in the model's own words (outside programs); None if absent.
    """

    program: str | None
    answer: str | None


class Protocol(typing.Protocol):
    """Pure functions between text and meaning; holds no state of a conversation."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings at which an engine stops generating."""
        ...

    def prompt(self, problem: Problem) -> str:
        """The text before the model's first turn."""
        ...

    def turn_complete(self, text: str) -> bool:
        """Whether the text of a turn is a whole turn; once True, it stays True whatever is appended."""
        ...

    def parse(self, text: str) -> ParsedTurn:
        """The program and the answer in a turn's text."""
        ...

    def runnable(self, problem: Problem, program: str) -> str:
        """The source that the sandbox runs for this program."""
        ...

    def printed_answer(self, stdout: str) -> str | None:
        """The answer that a program gave while it ran, if any, by what it printed."""
        ...

    def observation(self, execution: Execution) -> str:
        """The text the model reads after a program ran."""
        ...
