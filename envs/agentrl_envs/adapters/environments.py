"""Find the factory of an environment by name; plain gymnasium environments are wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import gymnasium

from agentrl_envs.adapters.adapted import AdaptedFactory
from agentrl_envs.adapters.class_environment import ClassEnvironmentFactory
from agentrl_envs.adapters.gymnasium_text import GymnasiumEnvironment
from agentrl_envs.episode import Environment
from agentrl_envs.registry import ADAPTERS, ENVIRONMENTS, TRL, EnvironmentFactory, PluginError, import_attribute
from agentrl_envs.settings import GymnasiumSettings


def resolve_environment(name: str) -> EnvironmentFactory:
    """The factory with this name, which creates an `Environment` from its settings.

    For a gymnasium environment class, the factory creates a `GymnasiumEnvironment` from `GymnasiumSettings`; an
    adapter's factory is an `AdaptedFactory`. Raises `PluginError`, or `UnknownNameError` with the valid names and the
    nearest one.
    """
    prefix, _, rest = name.partition(":")
    if prefix in ADAPTERS:
        adapter = cast(Callable[[str], EnvironmentFactory], import_attribute(ADAPTERS[prefix], "adapter"))
        return adapter(rest)
    found: object = ENVIRONMENTS[name]
    if name.startswith(TRL):
        return ClassEnvironmentFactory(name, found, of_trl=True)
    if not callable(found):
        raise PluginError(f"environment {name!r} is a {type(found).__name__}, expected a class or a function")
    return _class_factory(name, found) if isinstance(found, type) else cast(EnvironmentFactory, found)


def _class_factory(name: str, found: type) -> EnvironmentFactory:
    if name in ENVIRONMENTS.own:
        return found
    if issubclass(found, gymnasium.Env):
        return AdaptedFactory(GymnasiumSettings, functools.partial(GymnasiumEnvironment, found))
    if hasattr(found, "reset") and not issubclass(found, Environment):
        return ClassEnvironmentFactory(name, found)
    if not issubclass(found, Environment):
        raise PluginError(
            f"environment {name!r}: {found.__qualname__} is neither a gymnasium.Env, nor a class with reset, nor a "
            "subclass of agentrl_envs.episode.Environment"
        )
    return cast(EnvironmentFactory, found)
