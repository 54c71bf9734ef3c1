"""The protocol that an environment's settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl_envs.chat import ChatFormat, plain_format
from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.protocols.base import ParsedTurn, Protocol
from agentrl_envs.protocols.hermes import HermesProtocol, PlainCalls
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


TITLES: Mapping[str, str] = {"simpletir": "SimpleTIR", "retool": "ReTool", "torl": "ToRL", "hermes": "Hermes"}

ProtocolFactory = Callable[[SimpleTIRSettings, ChatFormat | None, ToolSet], Protocol]


def make_protocol(
    settings: SimpleTIRSettings, *, chat: ChatFormat | None = None, tools: ToolSet = NO_TOOLS
) -> Protocol:
    """Raises `EpisodeUsageError` where the protocol needs a chat template and there is none, and `PluginError`."""
    factory: ProtocolFactory = PROTOCOLS[settings.protocol]
    return factory(settings, chat, tools)


def in_chat(protocol: Protocol, settings: SimpleTIRSettings | ReasoningSettings, chat: ChatFormat | None) -> Protocol:
    """A protocol that is text, as ``settings.chat`` says: by itself or in the template ``chat``."""
    if settings.chat != "always":
        return protocol
    if chat is None:
        raise EpisodeUsageError("environment.chat=always needs chat=, the template of the model that plays")
    return ChatProtocol(text=protocol, chat=chat)


def simpletir(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """SimpleTIR: fenced programs, boxed answers."""
    text = SimpleTIRProtocol(instruction=settings.preamble, observation_limit=settings.observation_limit)
    return in_chat(text, settings, chat)


def retool(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """ReTool: programs and answers in tags."""
    text = ReToolProtocol(instruction=settings.preamble, observation_limit=settings.observation_limit)
    return in_chat(text, settings, chat)


def torl(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """ToRL: fenced programs, each followed by an output fence."""
    text = ToRLProtocol(instruction=settings.preamble, observation_limit=settings.observation_limit)
    return in_chat(text, settings, chat)


def hermes(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """Hermes: tool calls in the model's chat template, or in plain text."""
    plain = settings.chat == "never"
    if plain:
        chat = plain_format([schema.as_function() for schema in tools.schemas], system=settings.system_prompt)
    if chat is None:
        raise EpisodeUsageError("protocol hermes needs chat=, the template of the model that plays")
    return (PlainCalls if plain else HermesProtocol)(
        instruction=settings.effective_instruction,
        observation_limit=settings.observation_limit,
        chat=chat,
        tools=tools,
        max_calls=settings.max_calls,
    )
