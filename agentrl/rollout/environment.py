"""Build the environment that a run's settings select, and the codec for its conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError
from agentrl.models.chat_template import read_chat_format
from agentrl.models.tokenizer import TextCodec, read_end_token_ids
from agentrl.rollout.gateway.environment import (
    AgentEnvironment,
    RerenderedEnvironment,
    build_agent_renderer,
    program_for_environment,
)
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.settings import is_agent_program
from agentrl.rollout.settings import RolloutSettings, environment_compares_answers
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import AgentRLEnvError, Environment
from agentrl_envs.factory import TemplateUse
from agentrl_envs.rewards import WeightedRewards
from agentrl_envs.tools import ToolSet
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentrl.rollout.settings import EnvironmentRelatedSettings, RewardRelatedSettings


@dataclass(frozen=True, kw_only=True)
class ChatSetup:
    """The policy's chat template.

    ``format``: the parts of the template that protocols use. ``renderer``: renders whole conversations, with ``tools``;
    used for agent programs, and for protocols with ``environment.history=template``.
    """

    format: ChatFormat | None = None
    renderer: ChatRenderer | None = None
    tools: Sequence[Mapping[str, object]] = ()


def check_environment(settings: EnvironmentRelatedSettings) -> None:
    """Import the environment of ``settings.env``. Raises PluginError if the environment or a tool is invalid."""
    if is_agent_program(settings.env):
        program_for_environment(settings.env, settings.environment.model_extra or {}, settings.gateway)
    else:
        _ = resolve_environment(settings.env).tools


def environment_tools(env: str) -> ToolSet | None:
    """Return the tools of an environment class with ``reset``, or None for any other environment."""
    return None if is_agent_program(env) else resolve_environment(env).tools


def build_environment(settings: EnvironmentRelatedSettings, chat: ChatSetup | None = None) -> Environment:
    """Build the environment of ``settings.env`` without opening it.

    ``chat``: the policy's chat template, from :func:`build_chat_setup`.
    """
    if is_agent_program(settings.env):
        program = program_for_environment(settings.env, settings.environment.model_extra or {}, settings.gateway)
        return AgentEnvironment(program, settings.gateway, chat.renderer if chat else None)
    factory = resolve_environment(settings.env)
    section = factory.validate_section(settings.environment)
    environment = factory(section, settings.sandbox, settings.grader, chat.format if chat else None)
    if chat is None or chat.renderer is None:
        return environment
    return RerenderedEnvironment(environment, chat.renderer, chat.tools)


def _choose_template_use(settings: EnvironmentRelatedSettings) -> TemplateUse | None:
    factory = resolve_environment(settings.env)
    return factory.template_use(factory.validate_section(settings.environment))


def uses_chat_template(settings: EnvironmentRelatedSettings) -> bool:
    """Return True if conversations use the model's chat template, provided that the model has one."""
    return is_agent_program(settings.env) or _choose_template_use(settings) is not None


def build_chat_setup(
    settings: EnvironmentRelatedSettings, tokenizer: PreTrainedTokenizerBase, name: str
) -> ChatSetup | None:
    """Return the chat template of the model ``name`` if the environment uses a template, else None.

    Raises SettingsError if the environment needs a template and the model has no supported template.
    """
    if is_agent_program(settings.env):
        return ChatSetup(renderer=build_agent_renderer(tokenizer, name, settings.gateway))
    template_use = _choose_template_use(settings)
    if template_use is None:
        return None
    if template_use.optional and not tokenizer.chat_template:
        if template_use.rerendered:
            raise SettingsError(
                f"environment.history=template needs a chat template, but {settings.env} uses {name} in plain text"
            )
        return None
    if not template_use.lists_tools:
        raise SettingsError(
            f"environment.list_tools=false, but the chat template of {name} lists the tools: set environment.chat=never"
        )
    chat_format = read_chat_format(
        tokenizer,
        name=name,
        tools=template_use.tools,
        options=template_use.settings.template_options,
        system=template_use.settings.system_prompt,
        setting=template_use.setting,
    )
    if template_use.speaker and chat_format.user is None:
        raise SettingsError(
            f"the chat template of {name} changes earlier messages when a second user message follows, which "
            f"{template_use.speaker} may send: set environment.chat=never or remove environment.system_prompt"
        )
    chat = ChatSetup(format=chat_format)
    if not template_use.rerendered:
        return chat
    codec = build_codec(tokenizer, name, chat)
    renderer = ChatRenderer(tokenizer, codec, options=template_use.settings.template_options)
    return replace(chat, renderer=renderer, tools=template_use.tools)


async def check_episode_can_fork(environment: Environment, problem: Problem, settings: RolloutSettings) -> None:
    """Fork a new episode of ``problem`` as a check. Raises SettingsError if the episode cannot be forked."""
    episode = environment.episode(problem)
    try:
        async with asyncio.timeout(settings.environment_deadline):
            await episode.start()
            await (await episode.fork()).close()
    except (AgentRLEnvError, TimeoutError) as error:
        raise SettingsError(
            f"rollout.branching.width={settings.branching.width}: an episode of problem {problem.id} cannot be forked "
            f"({error or 'the environment did not respond'}); add a fork() method to the class, or set the width to 1"
        ) from error
    finally:
        await episode.close()


def build_rewards(settings: RewardRelatedSettings) -> WeightedRewards | None:
    """Build the user's rewards without opening them. Returns None if ``reward.functions`` is empty.

    Raises PluginError if a name in ``reward.functions`` does not refer to a function.
    """
    reward = settings.reward
    if not reward.functions:
        return None
    return WeightedRewards(reward.functions, deadline=reward.deadline, sandbox=settings.sandbox)


def rewards_compare_answers(settings: RewardRelatedSettings) -> bool:
    """Return True if each problem needs a reference answer, because rewards compare answers with it."""
    return environment_compares_answers(settings) and not settings.reward.functions


def build_environment_and_codec(
    settings: EnvironmentRelatedSettings, tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[Environment, TextCodec]:
    """Build the environment, without opening it, and the codec for the model ``name``."""
    chat = build_chat_setup(settings, tokenizer, name)
    return build_environment(settings, chat), build_codec(tokenizer, name, chat)


def build_codec(tokenizer: PreTrainedTokenizerBase, name: str, chat: ChatSetup | None) -> TextCodec:
    """Build the codec for conversations with the model ``name``, with or without a chat template."""
    if chat is not None and chat.renderer is not None:
        return chat.renderer.codec
    generation_ends = read_end_token_ids(name)
    if chat is None or chat.format is None:
        return TextCodec(tokenizer, generation_ends=generation_ends)
    chat_format = chat.format
    return TextCodec(
        tokenizer,
        turn_end=chat_format.turn_end,
        generation_ends=generation_ends,
        shown_special_tokens=chat_format.calls.tokens,
    )
