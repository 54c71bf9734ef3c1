"""The environment named by a run's settings, and the codec that turns its conversations into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError
from agentrl.models.chat_template import read_chat_format
from agentrl.models.tokenizer import TextCodec, read_generation_ends
from agentrl.rollout.gateway.environment import AgentEnvironment, DeployedHistory, agent_renderer, load_program
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.settings import is_agent
from agentrl.rollout.settings import compares_answers
from agentrl_envs.adapters.class_environment import ClassEnvironmentFactory
from agentrl_envs.adapters.environments import AdaptedFactory, resolve_environment
from agentrl_envs.chat import ChatFormat, plain_format
from agentrl_envs.episode import Environment
from agentrl_envs.registry import ENVIRONMENTS
from agentrl_envs.rewards import Rewards
from agentrl_envs.settings import ChatSettings, GymnasiumSettings, SimpleTIRSettings, ToolChatSettings, read_options
from agentrl_envs.tools import load_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentrl.rollout.settings import EnvironmentSections, RewardedSections


@dataclass(frozen=True, kw_only=True)
class Chat:
    """The chat template of the model that plays.

    ``format``: what a protocol needs of it. ``renderer`` renders whole conversations, with ``tools``: those of agent
    programs, and with ``environment.history=template`` those of protocols.
    """

    format: ChatFormat | None = None
    renderer: ChatRenderer | None = None
    tools: Sequence[Mapping[str, object]] = ()


def check_environment(settings: EnvironmentSections) -> None:
    """Import what an environment's name stands for. Raises PluginError if that is no environment, or has a bad tool."""
    if is_agent(settings.env):
        load_program(settings.env, settings.environment.model_extra or {}, settings.gateway)
        return
    factory = resolve_environment(settings.env)
    if isinstance(factory, ClassEnvironmentFactory):
        factory.check()


def class_factory(env: str) -> ClassEnvironmentFactory | None:
    """The factory of an environment that is a user's class with ``reset``; None for every other kind."""
    factory = None if is_agent(env) or env in ENVIRONMENTS.builtin else resolve_environment(env)
    return factory if isinstance(factory, ClassEnvironmentFactory) else None


def build_environment(settings: EnvironmentSections, chat: Chat | None = None) -> Environment:
    """The environment of ``settings.env``, not yet open. A plain gymnasium class receives its options unchanged.

    ``chat``: how the model that plays writes conversations, from :func:`chat_format`.
    """
    if is_agent(settings.env):
        program = load_program(settings.env, settings.environment.model_extra or {}, settings.gateway)
        return AgentEnvironment(program, settings.gateway, chat.renderer if chat else None)
    environment = _text_environment(settings, chat.format if chat else None)
    if chat is None or chat.renderer is None:
        return environment
    return DeployedHistory(environment, chat.renderer, chat.tools)


def _text_environment(settings: EnvironmentSections, chat: ChatFormat | None) -> Environment:
    factory = resolve_environment(settings.env)
    if settings.env in ENVIRONMENTS.builtin:
        return factory(settings.environment, settings.sandbox, settings.grader, chat=chat)
    if isinstance(factory, ClassEnvironmentFactory):
        own = factory.settings(settings.environment.model_extra or {})
        tools = [schema.as_function() for schema in factory.tools.schemas] if own.list_tools else []
        return factory(
            own,
            settings.sandbox,
            settings.grader,
            chat=chat or plain_format(tools, system=own.system_prompt),
            plain=chat is None,
        )
    options = settings.environment.model_extra or {}
    return factory(
        factory.settings(options) if isinstance(factory, AdaptedFactory) else read_options(GymnasiumSettings, options)
    )


def chat_format(settings: EnvironmentSections, tokenizer: PreTrainedTokenizerBase, name: str) -> Chat | None:
    """The chat template of the model ``name`` if the environment needs one, else None.

    Raises SettingsError if the protocol needs one and the model has none that it supports.
    """
    if is_agent(settings.env):
        return Chat(renderer=agent_renderer(tokenizer, name, settings.gateway))
    factory = resolve_environment(settings.env)
    if isinstance(factory, ClassEnvironmentFactory):
        return _class_chat_format(factory, settings, tokenizer, name)
    if not needs_chat_format(settings):
        return None
    environment = settings.environment
    assert isinstance(environment, ChatSettings)
    functions: list[dict[str, object]] = []
    setting = "environment.chat=always"
    if isinstance(environment, SimpleTIRSettings) and environment.protocol == "hermes":
        tools = load_tools(
            environment.tools, interpreter=environment.interpreter, mcp_sessions=environment.mcp_sessions
        )
        functions = [schema.as_function() for schema in tools.schemas]
        setting = "environment.protocol=hermes"
    chat = read_chat_format(
        tokenizer,
        name=name,
        tools=functions,
        options=environment.template_options,
        system=environment.system_prompt,
        setting=setting,
    )
    if isinstance(environment, SimpleTIRSettings) and not functions:
        return Chat(format=_with_replies(chat, name, f"environment.protocol={environment.protocol}"))
    return _with_history(chat, environment, tokenizer, name, functions)


def _with_replies(chat: ChatFormat, name: str, speaker: str) -> ChatFormat:
    """The format, if it has a place for a user's message behind a turn of the model. Raises SettingsError."""
    if chat.user is None:
        raise SettingsError(
            f"the chat template of {name} writes a conversation anew when a second message of a user follows, which "
            f"{speaker} may need; valid: environment.chat=never, or no environment.system_prompt"
        )
    return chat


def _class_chat_format(
    factory: ClassEnvironmentFactory, settings: EnvironmentSections, tokenizer: PreTrainedTokenizerBase, name: str
) -> Chat | None:
    """The template for an environment that is a class; None for plain text."""
    own = factory.settings(settings.environment.model_extra or {})
    functions = [schema.as_function() for schema in factory.tools.schemas]
    if own.chat == "never" or (own.chat == "auto" and not (tokenizer.chat_template and functions)):
        if own.history == "template":
            raise SettingsError(f"environment.history=template: {settings.env} is played with {name} in plain text")
        return None
    if not own.list_tools:
        raise SettingsError(
            f"environment.list_tools=false: the chat template of {name} lists the tools; set environment.chat=never"
        )
    chat = read_chat_format(
        tokenizer,
        name=name,
        tools=functions,
        options=own.template_options,
        system=own.system_prompt,
        setting=f"env={settings.env}",
    )
    if factory.reads_text:
        chat = _with_replies(chat, name, f"step() of {settings.env}")
    return _with_history(chat, own, tokenizer, name, functions)


def _with_history(
    chat: ChatFormat,
    environment: ChatSettings,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    functions: Sequence[Mapping[str, object]],
) -> Chat:
    """The template, and with ``environment.history=template`` what renders whole conversations."""
    if not isinstance(environment, ToolChatSettings) or environment.history == "keep":
        return Chat(format=chat)
    codec = build_codec(tokenizer, name, Chat(format=chat))
    renderer = ChatRenderer(tokenizer, codec, options=environment.template_options)
    return Chat(format=chat, renderer=renderer, tools=functions)


def build_rewards(settings: RewardedSections) -> Rewards | None:
    """The user's rewards, not yet open. Raises PluginError for a name in ``reward.functions`` that is no function."""
    reward = settings.reward
    if not reward.functions:
        return None
    return Rewards(reward.functions, deadline=reward.deadline, sandbox=settings.sandbox)


def needs_answers(settings: RewardedSections) -> bool:
    """Whether a trajectory's reward compares answers with gold answers."""
    return compares_answers(settings) and not settings.reward.functions


def needs_chat_format(settings: EnvironmentSections) -> bool:
    """Whether conversations may be written in the model's chat template."""
    environment = settings.environment
    if is_agent(settings.env):
        return True
    if not isinstance(environment, ChatSettings):
        return settings.env not in ENVIRONMENTS.builtin and isinstance(
            resolve_environment(settings.env), ClassEnvironmentFactory
        )
    if isinstance(environment, SimpleTIRSettings) and environment.protocol == "hermes":
        return environment.chat != "never"
    return environment.chat == "always"


def environment_and_codec(
    settings: EnvironmentSections, tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[Environment, TextCodec]:
    """The environment, not yet open, and the codec that a driver needs in addition to an engine, for model ``name``."""
    chat = chat_format(settings, tokenizer, name)
    return build_environment(settings, chat), build_codec(tokenizer, name, chat)


def build_codec(tokenizer: PreTrainedTokenizerBase, name: str, chat: Chat | None) -> TextCodec:
    """The codec of conversations with the model ``name``, with or without a chat template."""
    if chat is not None and chat.renderer is not None:
        return chat.renderer.codec
    ends = read_generation_ends(name)
    if chat is None or chat.format is None:
        return TextCodec(tokenizer, generation_ends=ends)
    written = chat.format
    return TextCodec(tokenizer, turn_end=written.turn_end, generation_ends=ends, shown=written.calls.tokens)
