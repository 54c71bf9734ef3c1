"""The protocol that an environment's settings name."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.protocols.base import Protocol
from agentrl_envs.protocols.chat import ChatFormat
from agentrl_envs.protocols.hermes import HermesProtocol
from agentrl_envs.protocols.retool import ReToolProtocol
from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.protocols.torl import ToRLProtocol
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.tools import NO_TOOLS, ToolSet

TITLES: Mapping[str, str] = {"simpletir": "SimpleTIR", "retool": "ReTool", "torl": "ToRL", "hermes": "Hermes"}


def make_protocol(
    settings: SimpleTIRSettings, *, chat: ChatFormat | None = None, tools: ToolSet = NO_TOOLS
) -> Protocol:
    """Raises `EpisodeUsageError` where the protocol needs a chat template and there is none."""
    instruction, limit = settings.shown_instruction, settings.observation_limit
    match settings.protocol:
        case "simpletir":
            return SimpleTIRProtocol(instruction=instruction, observation_limit=limit)
        case "retool":
            return ReToolProtocol(instruction=instruction, observation_limit=limit)
        case "torl":
            return ToRLProtocol(instruction=instruction, observation_limit=limit)
        case "hermes":
            if chat is None:
                raise EpisodeUsageError("protocol hermes needs chat=, the template of the model that plays")
            return HermesProtocol(
                instruction=instruction, observation_limit=limit, chat=chat, tools=tools, max_calls=settings.max_calls
            )
