"""Find the factory of an environment by name; plain gymnasium environments are wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, cast

import gymnasium

from agentrl_envs.adapters.class_environment import ClassEnvironmentFactory
from agentrl_envs.adapters.gymnasium_text import GymnasiumEnvironment
from agentrl_envs.episode import Environment
from agentrl_envs.registry import ADAPTERS, ENVIRONMENTS, TRL, EnvironmentFactory, PluginError, import_attribute
from agentrl_envs.settings import GymnasiumSettings, Section, read_options


@dataclass(frozen=True, slots=True)
class AdaptedFactory(Generic[Section]):
    """Makes environments by ``make`` from the section ``environment``, which ``model`` checks."""

    model: type[Section]
    make: Callable[[Section], Environment]

    def settings(self, options: Mapping[str, object]) -> Section:
        """The section ``environment``. Raises `PluginError` for a bad setting."""
        return read_options(self.model, options)

    def __call__(self, settings: Section) -> Environment:
        return self.make(settings)


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
    if name in ENVIRONMENTS.builtin:
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
