"""Factories of environments that have one settings model of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic

from agentrl_envs.episode import Environment
from agentrl_envs.settings import Section, read_options


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
