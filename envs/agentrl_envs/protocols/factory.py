"""Creation of the configured protocol, as plain text or in the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl_envs.chat import ChatFormat, plain_text_format
from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.protocols.base import ParsedTurn, Protocol
from agentrl_envs.protocols.hermes import HermesProtocol, PlainTextCallsProtocol
from agentrl_envs.protocols.retool import ReToolProtocol
from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.protocols.torl import ToRLProtocol
from agentrl_envs.registry import PROTOCOLS
from agentrl_envs.settings import ReasoningSettings, SimpleTIRSettings
from agentrl_envs.tools import NO_TOOLS, ToolSet
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import Execution


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatProtocol:
    """A text protocol inside a model's chat template.

    The problem is a user message. If the model's turn ends at a stop string, the program's output continues the model's
    message in the protocol's format. If the model ended its message, or a token limit cut the message, the output is a
    user message.
    """

    text: Protocol
    chat: ChatFormat

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings of the text protocol."""
        return self.text.stop_strings

    @property
    def empty_turn(self) -> Ended:
        """The end of an episode after an empty turn under the text protocol."""
        return self.text.empty_turn

    def message(self, statement: str) -> str:
        """Return the user message without template marks."""
        return self.text.message(statement)

    def prompt(self, problem: Problem) -> str:
        """Return the problem's messages up to the start of the model's message."""
        return self.chat.prompt(problem, self.text.message)

    def turn_complete(self, text: str) -> bool:
        """Return True if the turn is complete under the text protocol."""
        return self.text.turn_complete(text)

    def parse(self, text: str) -> ParsedTurn:
        """Parse the turn with the text protocol. Reasoning is not removed."""
        return self.text.parse(text)

    def runnable(self, problem: Problem, program: str) -> str:
        """Return the source code that the sandbox runs."""
        return self.text.runnable(problem, program)

    def printed_answer(self, stdout: str) -> str | None:
        """Return the answer in a program's output, or None."""
        return self.text.printed_answer(stdout)

    def result(self, execution: Execution) -> str:
        """Return the result that the model reads."""
        return self.text.result(execution)

    def observation(self, text: str, results: Sequence[str]) -> str:
        """Return plain text if the model's message continues, otherwise a user message."""
        result = self.text.observation(text, results)
        return result if self.text.turn_complete(text) else self.chat.format_user_reply(result.strip())


TITLES: Mapping[str, str] = {"simpletir": "SimpleTIR", "retool": "ReTool", "torl": "ToRL", "hermes": "Hermes"}

ProtocolFactory = Callable[[SimpleTIRSettings, ChatFormat | None, ToolSet], Protocol]


def make_protocol(
    settings: SimpleTIRSettings, *, chat: ChatFormat | None = None, tools: ToolSet = NO_TOOLS
) -> Protocol:
    """Create the protocol that ``settings.protocol`` names.

    Raises PluginError for an invalid name, and EpisodeUsageError if the protocol requires ``chat`` and it is missing.
    """
    factory: ProtocolFactory = PROTOCOLS[settings.protocol]
    return factory(settings, chat, tools)


def wrap_in_chat_template(
    protocol: Protocol, settings: SimpleTIRSettings | ReasoningSettings, chat: ChatFormat | None
) -> Protocol:
    """Wrap a text protocol in the template ``chat`` if ``settings.chat`` is ``always``."""
    if settings.chat != "always":
        return protocol
    if chat is None:
        raise EpisodeUsageError("environment.chat=always requires the policy's chat template: pass chat=")
    return ChatProtocol(text=protocol, chat=chat)


def simpletir(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """Create the SimpleTIR protocol: fenced programs and boxed answers."""
    text = SimpleTIRProtocol(instruction=settings.preamble, observation_limit=settings.observation_limit)
    return wrap_in_chat_template(text, settings, chat)


def retool(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """Create the ReTool protocol: programs and answers in tags."""
    text = ReToolProtocol(instruction=settings.preamble, observation_limit=settings.observation_limit)
    return wrap_in_chat_template(text, settings, chat)


def torl(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """Create the ToRL protocol: fenced programs, each followed by an output fence."""
    text = ToRLProtocol(instruction=settings.preamble, observation_limit=settings.observation_limit)
    return wrap_in_chat_template(text, settings, chat)


def hermes(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """Create the hermes protocol: tool calls in the model's chat template or in plain text."""
    plain = settings.chat == "never"
    if plain:
        chat = plain_text_format(
            [schema.as_openai_function() for schema in tools.schemas], system=settings.system_prompt
        )
    if chat is None:
        raise EpisodeUsageError("protocol hermes requires the policy's chat template: pass chat=")
    return (PlainTextCallsProtocol if plain else HermesProtocol)(
        instruction=settings.effective_instruction,
        observation_limit=settings.observation_limit,
        chat=chat,
        tools=tools,
        max_calls=settings.max_calls,
    )
