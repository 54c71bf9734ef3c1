"""The environment that a run's settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl_envs.episode import Environment
from agentrl_envs.registry import resolve_environment

if TYPE_CHECKING:
    from agentrl.config import Settings


def build_environment(settings: Settings) -> Environment:
    """The environment of ``settings.env``, not yet open; a plain gymnasium class gets its options as they are."""
    factory = resolve_environment(settings.env)
    if settings.env == "simpletir":
        return factory(settings.environment, settings.sandbox, settings.grader)
    from agentrl_envs.settings import GymnasiumSettings

    return factory(GymnasiumSettings(**(settings.environment.model_extra or {})))
