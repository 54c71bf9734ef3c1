"""Find an environment by name: one of our own, an entry point of the group ``agentrl.envs``, or ``module:Class``."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from agentrl_envs.episode import Environment, EnvironmentLookupError
from agentrl_envs.plugins import import_attribute

GROUP = "agentrl.envs"

OWN: Mapping[str, str] = {
    "simpletir": "agentrl_envs.simpletir:SimpleTIREnvironment",
    "reasoning": "agentrl_envs.reasoning:ReasoningEnvironment",
}
"""The environments of this package. They take their settings, the sandbox's, the grader's, and ``chat``."""

EnvironmentFactory = Callable[..., Environment]


def environment_names() -> tuple[str, ...]:
    """Our own names and the installed ones, sorted."""
    return tuple(sorted({*OWN, *(entry.name for entry in entry_points(group=GROUP))}))


def resolve_environment(name: str) -> EnvironmentFactory:
    """The factory behind a name: called with settings it gives an `Environment`.

    A gymnasium environment class comes back as a factory of `GymnasiumEnvironment` around it (its one argument:
    `GymnasiumSettings`). Raises `EnvironmentLookupError` that names the valid names and the nearest.
    """
    path = OWN.get(name, name)
    found = import_attribute(path, "environment") if ":" in path else _entry_point(name).load()
    if not callable(found):
        raise EnvironmentLookupError(
            f"environment {name!r} is a {type(found).__name__}, expected a class or a function"
        )
    return _class_factory(name, found) if isinstance(found, type) else cast(EnvironmentFactory, found)


def _class_factory(name: str, found: type) -> EnvironmentFactory:
    import gymnasium

    if issubclass(found, gymnasium.Env):
        from agentrl_envs.adapters.gymnasium_text import GymnasiumEnvironment

        return functools.partial(GymnasiumEnvironment, found)
    missing = [method for method in ("open", "episode", "close", "describe") if not hasattr(found, method)]
    if missing:
        raise EnvironmentLookupError(
            f"environment {name!r}: {found.__qualname__} is neither a gymnasium.Env nor an agentrl Environment "
            f"(it lacks {', '.join(missing)})"
        )
    return cast(EnvironmentFactory, found)


def _entry_point(name: str) -> EntryPoint:
    by_name = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in by_name:
        return by_name[name]
    names = environment_names()
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise EnvironmentLookupError(f"no environment named {name!r}{hint} (valid: {', '.join(names)}, or module:Class)")
