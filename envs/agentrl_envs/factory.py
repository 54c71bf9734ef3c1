"""Environment factories. A factory defines the settings, chat-template use and tools of an environment name.

`agentrl_envs.adapters.environments.resolve_environment` returns the factory for a name. Creating a factory or an
environment acquires no resources, so a run can check its settings first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, cast

from pydantic import BaseModel

from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import Environment
from agentrl_envs.grading import GraderSettings
from agentrl_envs.settings import ChatSettings, Section, validate_options
from agentrl_envs.tools import ToolSet
from agentrl_envs.types import Problem
from agentrl_sandbox.client import SandboxSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateUse:
    """Use of the policy's chat template by an environment.

    ``setting`` is the setting that requires the template, for error messages. ``tools`` are the functions that the
    template lists. If ``lists_tools`` is false, only plain text is valid. If ``optional`` is true, a model without a
    template plays in plain text. ``speaker`` is the source of further user messages, or "". If ``rerendered`` is true,
    the template renders earlier turns again for each new turn.
    """

    settings: ChatSettings
    setting: str
    tools: Sequence[Mapping[str, object]] = ()
    lists_tools: bool = True
    optional: bool = False
    speaker: str = ""
    rerendered: bool = False


class EnvironmentFactory(ABC, Generic[Section]):
    """Creates the environments of one name. The defaults describe a plain-text environment without tools."""

    def validate_section(self, section: BaseModel) -> Section:
        """Validate the section ``environment`` of a run. Raises PluginError for an invalid setting.

        By default, returns the section, because the settings of a run already validate the built-in environments.
        """
        return cast(Section, section)

    @abstractmethod
    def __call__(
        self, settings: Section, sandbox: SandboxSettings, grader: GraderSettings, chat: ChatFormat | None
    ) -> Environment:
        """Create the environment without opening it. ``chat`` is the model's chat format, or None for plain text."""

    def template_use(self, settings: Section) -> TemplateUse | None:
        """Return the use of the chat template, or None for plain-text conversations.

        Raises PluginError if the settings are inconsistent or a tool is invalid.
        """
        return None

    @property
    def tools(self) -> ToolSet | None:
        """The tools of an environment that is defined by a class, or None for other environments.

        Raises PluginError if a method is not a valid tool.
        """
        return None

    @property
    def source_code(self) -> bytes:
        """The source code of a custom environment, to identify its version. Empty if unknown."""
        return b""

    def problem_columns(self, problem: Problem) -> dict[str, object]:
        """Return the columns of a problem that the environment reads.

        Raises EnvironmentContractError if the problem lacks a column.
        """
        return {}


class PlainTextEnvironmentFactory(EnvironmentFactory[Section]):
    """Factory of a plain-text environment, created by ``make`` from settings of type ``model``."""

    def __init__(self, model: type[Section], make: Callable[[Section], Environment]) -> None:
        self._model = model
        self._make = make

    def validate_section(self, section: BaseModel) -> Section:
        return validate_options(self._model, section.model_extra or {})

    def __call__(
        self, settings: Section, sandbox: SandboxSettings, grader: GraderSettings, chat: ChatFormat | None
    ) -> Environment:
        return self._make(settings)
