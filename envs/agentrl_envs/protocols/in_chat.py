"""A protocol that is text, spoken through a model's chat template.

The problem is a user's message. What programs print stands in the model's own message, where the protocol writes it:
the model's turn ends at a stop string, and its message goes on. Where the model has ended its message itself (or a
token limit cut it), the protocol's words come as a user's message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_envs.chat.chat_format import ChatFormat
from agentrl_envs.protocols.base import ParsedTurn, Protocol
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import Execution


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatProtocol:
    """The protocol ``text`` between the marks of ``chat``; calls, programs and answers are those of ``text``."""

    text: Protocol
    chat: ChatFormat

    @property
    def stop(self) -> tuple[str, ...]:
        """Those of the text."""
        return self.text.stop

    @property
    def empty_turn(self) -> Ended:
        """That of the text."""
        return self.text.empty_turn

    def message(self, statement: str) -> str:
        """What a user says, without the template's marks."""
        return self.text.message(statement)

    def prompt(self, problem: Problem) -> str:
        """The problem's messages with their roles, up to where the model's message begins."""
        return self.chat.prompt(problem, self.text.message)

    def turn_complete(self, text: str) -> bool:
        """As in the text."""
        return self.text.turn_complete(text)

    def parse(self, text: str) -> ParsedTurn:
        """As in the text; thoughts are text like any other."""
        return self.text.parse(text)

    def runnable(self, problem: Problem, program: str) -> str:
        """As in the text."""
        return self.text.runnable(problem, program)

    def printed_answer(self, stdout: str) -> str | None:
        """As in the text."""
        return self.text.printed_answer(stdout)

    def result(self, execution: Execution) -> str:
        """As in the text."""
        return self.text.result(execution)

    def observation(self, text: str, results: Sequence[str]) -> str:
        """Plain text where the model's message goes on, else a user's message."""
        shown = self.text.observation(text, results)
        return shown if self.text.turn_complete(text) else self.chat.reply(shown.strip())
