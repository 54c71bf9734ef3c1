"""The interface behind an environment's name: settings, chat template and tools, and the `Environment` made from them.

`agentrl_envs.adapters.environments.resolve_environment` finds the factory of a name. Factories are created without
opening anything, so that a run can check its settings first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from pydantic import BaseModel

from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import Environment
from agentrl_envs.grading import GraderSettings
from agentrl_envs.settings import ChatSettings, Section, read_options
from agentrl_envs.tools import ToolSet
from agentrl_envs.types import Problem
from agentrl_sandbox.client import SandboxSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateUse:
    """How an environment uses the chat template of the model that plays.

    ``setting``: the setting that requires the template, for error messages. ``tools``: functions that the template
    lists, unless ``lists_tools`` is false: then plain text is the only valid form. ``optional``: a model without a
    template plays in plain text. ``speaker``: the source of further user messages; empty if there is none.
    ``rerendered``: the template writes earlier turns again for each new turn.
    """

    settings: ChatSettings
    setting: str
    tools: Sequence[Mapping[str, object]] = ()
    lists_tools: bool = True
    optional: bool = False
    speaker: str = ""
    rerendered: bool = False


class EnvironmentFactory(ABC, Generic[Section]):
    """Makes the environment of one name. The defaults are those of an environment in plain text without own tools."""

    @abstractmethod
    def settings(self, section: BaseModel) -> Section:
        """Return the section ``environment`` of a run, checked. Raises `PluginError` for a bad setting."""

    @abstractmethod
    def __call__(
        self,
        settings: Section,
        sandbox: SandboxSettings | None = None,
        grader: GraderSettings | None = None,
        *,
        chat: ChatFormat | None = None,
    ) -> Environment:
        """Return the environment, not yet open. ``chat``: the format of the model's chat template; None: plain text."""

    def template(self, settings: Section) -> TemplateUse | None:
        """Return the use of the model's chat template; None: conversations are plain text. Raises `PluginError`."""
        return None

    @property
    def tools(self) -> ToolSet | None:
        """The tools that the environment's class defines; None if it is not written as a class with tools.

        Raises `PluginError` for a method that cannot be a tool.
        """
        return None

    @property
    def source(self) -> bytes:
        """The code that distinguishes two versions of a user's environment; empty if it is unknown."""
        return b""

    def columns(self, problem: Problem) -> dict[str, object]:
        """Return the columns of a problem that the environment reads.

        Raises `EnvironmentContractError` if the problem lacks one.
        """
        return {}


class OptionsFactory(EnvironmentFactory[Section]):
    """An environment in plain text that is made from one settings model, ``model``, by ``make``."""

    def __init__(self, model: type[Section], make: Callable[[Section], Environment]) -> None:
        self._model = model
        self._make = make

    def settings(self, section: BaseModel) -> Section:
        return read_options(self._model, section.model_extra or {})

    def __call__(
        self,
        settings: Section,
        sandbox: SandboxSettings | None = None,
        grader: GraderSettings | None = None,
        *,
        chat: ChatFormat | None = None,
    ) -> Environment:
        return self._make(settings)
