"""How a conversation is written in text: what a Protocol has to say."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

if typing.TYPE_CHECKING:
    from agentrl_envs.types import Ended, Problem
    from agentrl_sandbox.client import Execution


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
