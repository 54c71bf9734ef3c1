"""The interface of a text protocol: prompt, stop strings, programs, tool calls, answers and observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.protocols.texts import format_execution_result, prepend_setup
from agentrl_envs.registry import PROTOCOLS
from agentrl_envs.settings import ReasoningSettings, SimpleTIRSettings
from agentrl_envs.tools import NO_TOOLS, ToolSet
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import Execution


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRequest:
    """A call to an existing tool with valid arguments."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class MalformedCall:
    """A call that cannot be executed. The model reads ``message`` instead of a result."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """The content of one model turn.

    ``program`` is the code to run. ``answer`` is the answer in the model's text outside programs. Both are None if
    absent. ``calls`` are the tool calls of a turn without a program, in order.
    """

    program: str | None
    answer: str | None
    calls: tuple[ToolRequest | MalformedCall, ...] = ()


def malformed_turn(message: str) -> ParsedTurn:
    """Return a turn with a single malformed call."""
    return ParsedTurn(program=None, answer=None, calls=(MalformedCall(message=message),))


@dataclass(frozen=True, kw_only=True, slots=True)
class TextProtocol(ABC):
    """The text format of a conversation, as pure functions without state.

    ``instruction`` precedes the problem's statement. ``observation_limit`` is the maximum number of characters of a
    program's output that the model reads. With ``chat``, the conversation has the form of the model's chat template:
    the problem is a user message. If a turn ends at a stop string, the observation continues the model's message. If
    the model ended its message, or a token limit cut the message, the observation is a user message.
    """

    instruction: str
    observation_limit: int
    chat: ChatFormat | None = None

    @classmethod
    def from_settings(cls, settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Self:
        """Create the protocol. Raises EpisodeUsageError if it requires ``chat`` and ``chat`` is None."""
        return cls(
            instruction=settings.system_prompt_and_instruction,
            observation_limit=settings.observation_limit,
            chat=chat_if_required(settings, chat),
        )

    @property
    @abstractmethod
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which the engine stops generating."""

    @abstractmethod
    def turn_complete(self, text: str) -> bool:
        """Return True if the text contains a complete turn. Appending text must not make the result False."""

    @abstractmethod
    def parse(self, text: str) -> ParsedTurn:
        """Parse a turn's text into the program, the other calls and the answer."""

    @abstractmethod
    def format_results(self, text: str, results: Sequence[str]) -> str:
        """Format the results of a turn's program or calls as plain text that follows the turn ``text``."""

    @property
    def end_after_empty_turn(self) -> Ended:
        """How an episode ends after a turn with neither a call nor an answer. By default, it stops with reward 0."""
        return Ended.STOPPED

    def user_message(self, statement: str) -> str:
        """Return the user message that poses the problem: by default the instruction and the statement."""
        return "\n\n".join(part for part in (self.instruction, statement) if part)

    def plain_prompt(self, problem: Problem) -> str:
        """Return the prompt without a chat template: by default the message, followed by a newline."""
        return self.user_message(problem.statement) + "\n"

    def prompt(self, problem: Problem) -> str:
        """Return the text before the model's first turn."""
        return self.plain_prompt(problem) if self.chat is None else self.chat.prompt(problem, self.user_message)

    def source_to_run(self, problem: Problem, program: str) -> str:
        """Return the source code that the sandbox runs: by default the problem's setup and the program."""
        return prepend_setup(problem.setup, program)

    def printed_answer(self, stdout: str) -> str | None:
        """Return the answer in a program's output: by default None, because only the model's text has answers."""
        return None

    def result_for_model(self, execution: Execution) -> str:
        """Return the output or the error that the model reads, shortened to ``observation_limit`` characters."""
        return format_execution_result(execution, self.observation_limit)

    def observation(self, text: str, results: Sequence[str]) -> str:
        """Return the text that follows the turn ``text``: the results in plain text, or as a user message."""
        formatted = self.format_results(text, results)
        if self.chat is None or self.turn_complete(text):
            return formatted
        return self.chat.format_user_reply(formatted.strip())


def chat_if_required(settings: SimpleTIRSettings | ReasoningSettings, chat: ChatFormat | None) -> ChatFormat | None:
    """Return ``chat`` if ``settings.chat`` is ``always``, otherwise None.

    Raises EpisodeUsageError if the settings require ``chat`` and it is None.
    """
    if settings.chat != "always":
        return None
    if chat is None:
        raise EpisodeUsageError("environment.chat=always requires the policy's chat template: pass it as chat")
    return chat


ProtocolFactory = Callable[[SimpleTIRSettings, ChatFormat | None, ToolSet], TextProtocol]
"""Signature of the functions that `register_protocol` accepts. They receive the tools in
`environment.tools`; hermes lists these tools in its prompt."""


def make_protocol(
    settings: SimpleTIRSettings, *, chat: ChatFormat | None = None, tools: ToolSet = NO_TOOLS
) -> TextProtocol:
    """Create the protocol that ``settings.protocol`` names.

    Raises PluginError for an invalid name, and EpisodeUsageError if the protocol requires ``chat`` and it is None.
    """
    factory: ProtocolFactory = PROTOCOLS[settings.protocol]
    return factory(settings, chat, tools)
