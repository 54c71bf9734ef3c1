"""The environment named by a run's settings, and the codec that turns its conversations into tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.models.chat_template import read_chat_format
from agentrl.models.tokenizer import TextCodec, read_generation_ends
from agentrl.rollout.gateway.environment import AgentEnvironment, agent_renderer, load_program
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.settings import is_agent
from agentrl_envs.adapters.adapted import AdaptedFactory
from agentrl_envs.adapters.class_environment import ClassEnvironmentFactory
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.episode import Environment
from agentrl_envs.protocols.chat import ChatFormat, plain_format
from agentrl_envs.registry import ENVIRONMENTS, grades_answers
from agentrl_envs.rewards import Rewards
from agentrl_envs.settings import GymnasiumSettings, SimpleTIRSettings, read_options
from agentrl_envs.tools import load_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentrl.rollout.settings import EnvironmentSections, RewardedSections


Chat = ChatFormat | ChatRenderer
"""How the model that plays writes conversations: what a protocol needs of its template, or what the gateway does."""


def check_environment(settings: EnvironmentSections) -> None:
    """Import what an environment's name stands for. Raises PluginError if that is no environment."""
    if is_agent(settings.env):
        load_program(settings.env, settings.environment.model_extra or {})
    else:
        resolve_environment(settings.env)


def class_factory(env: str) -> ClassEnvironmentFactory | None:
    """The factory of an environment that is a user's class with ``reset``; None for every other kind."""
    factory = None if is_agent(env) or env in ENVIRONMENTS.own else resolve_environment(env)
    return factory if isinstance(factory, ClassEnvironmentFactory) else None


def build_environment(settings: EnvironmentSections, chat: Chat | None = None) -> Environment:
    """The environment of ``settings.env``, not yet open. A plain gymnasium class receives its options unchanged.

    ``chat``: how the model that plays writes conversations, from :func:`chat_format`.
    """
    if is_agent(settings.env):
        program = load_program(settings.env, settings.environment.model_extra or {}, threads=settings.gateway.threads)
        return AgentEnvironment(program, settings.gateway, chat if isinstance(chat, ChatRenderer) else None)
    factory = resolve_environment(settings.env)
    if settings.env in ENVIRONMENTS.own:
        return factory(settings.environment, settings.sandbox, settings.grader, chat=chat)
    if isinstance(factory, ClassEnvironmentFactory):
        tools = [schema.as_function() for schema in factory.tools.schemas]
        own = factory.settings(settings.environment.model_extra or {})
        template = chat if isinstance(chat, ChatFormat) else None
        return factory(
            own, settings.sandbox, settings.grader, chat=template or plain_format(tools), plain=template is None
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
        return agent_renderer(tokenizer, name, settings.gateway)
    factory = resolve_environment(settings.env)
    if isinstance(factory, ClassEnvironmentFactory):
        options = factory.settings(settings.environment.model_extra or {}).template_options
        functions = [schema.as_function() for schema in factory.tools.schemas]
        if not tokenizer.chat_template or not functions:
            return None  # plain text
        return read_chat_format(tokenizer, name=name, tools=functions, options=options)
    if not needs_chat_format(settings):
        return None
    assert isinstance(settings.environment, SimpleTIRSettings)
    tools = load_tools(settings.environment.tools, interpreter=settings.environment.interpreter)
    return read_chat_format(
        tokenizer,
        name=name,
        tools=[schema.as_function() for schema in tools.schemas],
        options=settings.environment.template_options,
    )


def build_rewards(settings: RewardedSections) -> Rewards | None:
    """The user's rewards, not yet open. Raises PluginError for a name in ``reward.functions`` that is no function."""
    reward = settings.reward
    if not reward.functions:
        return None
    return Rewards(reward.functions, deadline=reward.deadline, sandbox=settings.sandbox)


def needs_answers(settings: RewardedSections) -> bool:
    """Whether a trajectory's reward compares answers with gold answers."""
    return compares_answers(settings) and not settings.reward.functions


def compares_answers(settings: EnvironmentSections) -> bool:
    """Whether the environment compares answers with gold answers, so that each problem needs one."""
    return grades_answers(settings.env) and settings.grader.function is None


def needs_chat_format(settings: EnvironmentSections) -> bool:
    """Whether conversations are written in the model's chat template."""
    return is_agent(settings.env) or (
        isinstance(settings.environment, SimpleTIRSettings) and settings.environment.protocol == "hermes"
    )


def environment_and_codec(
    settings: EnvironmentSections, tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[Environment, TextCodec]:
    """The environment, not yet open, and the codec that a driver needs in addition to an engine, for model ``name``."""
    chat = chat_format(settings, tokenizer, name)
    return build_environment(settings, chat), build_codec(tokenizer, name, chat)


def build_codec(tokenizer: PreTrainedTokenizerBase, name: str, chat: Chat | None) -> TextCodec:
    """The codec of conversations with the model ``name``, with or without a chat template."""
    if isinstance(chat, ChatRenderer):
        return chat.codec
    turn_end = "" if chat is None else chat.turn_end
    return TextCodec(tokenizer, turn_end=turn_end, generation_ends=read_generation_ends(name))
