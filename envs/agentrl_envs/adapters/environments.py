"""Resolution of ``--env NAME`` to an environment factory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import gymnasium

from agentrl_envs.adapters.class_environment import ClassEnvironmentFactory
from agentrl_envs.adapters.gymnasium_text import GymnasiumEnvironment
from agentrl_envs.episode import Environment
from agentrl_envs.factory import EnvironmentFactory, PlainTextEnvironmentFactory
from agentrl_envs.registry import ADAPTERS, ENVIRONMENTS, TRL_PREFIX, PluginError, import_attribute
from agentrl_envs.settings import GymnasiumSettings


def resolve_environment(name: str) -> EnvironmentFactory[Any]:
    """Return the factory of the environment ``name``.

    A gymnasium environment class, a subclass of `Environment` and a function that returns an `Environment` are
    configured by `GymnasiumSettings`. Raises PluginError, or UnknownNameError with the valid names and the nearest
    name.
    """
    prefix, _, rest = name.partition(":")
    if prefix in ADAPTERS:
        adapter = cast(Callable[[str], EnvironmentFactory[Any]], import_attribute(ADAPTERS[prefix], "adapter"))
        return adapter(rest)
    loaded: object = ENVIRONMENTS[name]
    if name in ENVIRONMENTS.builtin:
        return cast(type[EnvironmentFactory[Any]], loaded)()
    if name.startswith(TRL_PREFIX):
        if not isinstance(loaded, type) or not callable(getattr(loaded, "reset", None)):
            raise PluginError(f"environment {name!r} must be a class with a reset method")
        return ClassEnvironmentFactory(name, loaded, is_trl_class=True)
    if not callable(loaded):
        raise PluginError(f"environment {name!r} is a {type(loaded).__name__}, but must be a class or a function")
    if not isinstance(loaded, type) or issubclass(loaded, Environment):
        return PlainTextEnvironmentFactory(GymnasiumSettings, cast(Callable[[GymnasiumSettings], Environment], loaded))
    if issubclass(loaded, gymnasium.Env):
        return PlainTextEnvironmentFactory(GymnasiumSettings, functools.partial(GymnasiumEnvironment, loaded))
    if callable(getattr(loaded, "reset", None)):
        return ClassEnvironmentFactory(name, loaded)
    raise PluginError(
        f"environment {name!r}: {loaded.__qualname__} is neither a gymnasium.Env, nor a class with a reset method, "
        "nor a subclass of agentrl_envs.episode.Environment"
    )
