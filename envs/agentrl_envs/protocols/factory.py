"""The protocol that an environment's settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.protocols.base import Protocol
from agentrl_envs.protocols.chat import ChatFormat
from agentrl_envs.protocols.hermes import HermesProtocol
from agentrl_envs.protocols.retool import ReToolProtocol
from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.protocols.torl import ToRLProtocol
from agentrl_envs.registry import PROTOCOLS
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.tools import NO_TOOLS, ToolSet

TITLES: Mapping[str, str] = {"simpletir": "SimpleTIR", "retool": "ReTool", "torl": "ToRL", "hermes": "Hermes"}

ProtocolFactory = Callable[[SimpleTIRSettings, ChatFormat | None, ToolSet], Protocol]


def make_protocol(
    settings: SimpleTIRSettings, *, chat: ChatFormat | None = None, tools: ToolSet = NO_TOOLS
) -> Protocol:
    """Raises `EpisodeUsageError` where the protocol needs a chat template and there is none, and `PluginError`."""
    factory: ProtocolFactory = PROTOCOLS[settings.protocol]
    return factory(settings, chat, tools)


def simpletir(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """SimpleTIR: fenced programs, boxed answers."""
    return SimpleTIRProtocol(instruction=settings.shown_instruction, observation_limit=settings.observation_limit)


def retool(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """ReTool: programs and answers in tags."""
    return ReToolProtocol(instruction=settings.shown_instruction, observation_limit=settings.observation_limit)


def torl(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """ToRL: fenced programs, each followed by an output fence."""
    return ToRLProtocol(instruction=settings.shown_instruction, observation_limit=settings.observation_limit)


def hermes(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> Protocol:
    """Hermes: tool calls in the model's chat template."""
    if chat is None:
        raise EpisodeUsageError("protocol hermes needs chat=, the template of the model that plays")
    return HermesProtocol(
        instruction=settings.shown_instruction,
        observation_limit=settings.observation_limit,
        chat=chat,
        tools=tools,
        max_calls=settings.max_calls,
    )
