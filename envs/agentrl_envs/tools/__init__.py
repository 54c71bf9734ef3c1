"""Tools that a model may call under the `hermes` protocol: Python in the sandbox, and tools of users' own.

A tool of one's own is an object (or a class that is made without arguments) in a module, named ``module:attribute``::

    class Lookup:
        name = "lookup"
        description = "The value of a constant."
        parameters = {"type": "object", "properties": {"constant": {"type": "string"}}, "required": ["constant"]}

        async def call(self, arguments):
            return CONSTANTS.get(arguments["constant"], "no such constant")

The model reads what it returns. A mistake of the model is a text like any other; what the tool raises is a bug of the
tool and ends the run. Arguments are checked against ``parameters`` (JSON Schema, draft 2020-12) before the call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jsonschema import Draft202012Validator, SchemaError

from agentrl_envs.episode import EnvironmentContractError
from agentrl_envs.registry import TOOLS, PluginError, describe_error

PYTHON = "python"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_SHOWN_CHARACTERS = 300  # of what is wrong with arguments


class ToolError(EnvironmentContractError):
    """A user's tool raised, or returned something that is not text."""


@runtime_checkable
class Tool(Protocol):
    """What a tool has to say of itself, and what it does. ``parameters`` is a JSON schema of type object."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, object]: ...

    async def call(self, arguments: Mapping[str, object]) -> str:
        """The text that the model reads."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSchema:
    """A tool as the model is told of it."""

    name: str
    description: str
    parameters: Mapping[str, object]

    def as_function(self) -> dict[str, object]:
        """The form that chat templates take."""
        own = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": own}

    def refusal(self, arguments: Mapping[str, object]) -> str | None:
        """Why these arguments cannot be called with; None where they can."""
        error = next(Draft202012Validator(self.parameters).iter_errors(arguments), None)
        if error is None:
            return None
        place = f"argument {error.json_path.removeprefix('$.')}" if error.absolute_path else "arguments"
        return f"{place} of {self.name}: {error.message[:_SHOWN_CHARACTERS]}"


PYTHON_SCHEMA = ToolSchema(
    name=PYTHON,
    description="Runs a Python program in a fresh interpreter and returns what it prints.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program; print what you want to see"}},
        "required": ["code"],
    },
)


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of an environment: ``schemas`` of all in their order, ``own`` the users' by name."""

    schemas: tuple[ToolSchema, ...]
    own: Mapping[str, Tool]

    def schema(self, name: str) -> ToolSchema | None:
        return next((schema for schema in self.schemas if schema.name == name), None)


NO_TOOLS = ToolSet((), {})


def load_tools(names: Sequence[str]) -> ToolSet:
    """The tools that ``environment.tools`` names. Raises `PluginError` for what is no tool."""
    schemas: list[ToolSchema] = []
    own: dict[str, Tool] = {}
    for name in names:
        if name == PYTHON:
            schema = PYTHON_SCHEMA
        else:
            tool = _load(name)
            schema = ToolSchema(name=tool.name, description=tool.description, parameters=tool.parameters)
            own[tool.name] = tool
        if any(schema.name == other.name for other in schemas):
            raise PluginError(f"environment.tools: two tools are called {schema.name!r}")
        schemas.append(schema)
    return ToolSet(tuple(schemas), own)


async def call_tool(tool: Tool, arguments: Mapping[str, object]) -> str:
    """What the tool answers. Raises `ToolError` where it raises or answers with something else than text."""
    try:
        said = await tool.call(arguments)
    except Exception as error:
        raise ToolError(f"the tool {tool.name!r} raised {describe_error(error)}") from error
    if not isinstance(said, str):
        raise ToolError(f"the tool {tool.name!r} must return a str, not {type(said).__name__}")
    return said.encode(errors="replace").decode()  # half of a surrogate pair has no encoding


def _load(path: str) -> Tool:
    found = TOOLS[path]
    tool: Any = found() if inspect.isclass(found) else found
    problem = _lack(tool)
    if problem is not None:
        raise PluginError(f"environment.tools {path!r} is no tool: {problem}")
    checked: Tool = tool
    return checked


def _lack(tool: Any) -> str | None:
    missing = [name for name in ("name", "description", "parameters", "call") if not hasattr(tool, name)]
    if missing:
        return f"it lacks {', '.join(missing)}"
    if not isinstance(tool.name, str) or not _NAME.fullmatch(tool.name):
        return f"its name {tool.name!r} must be letters, digits, '_', '.', '-', at most 64"
    if not isinstance(tool.description, str):
        return "its description must be text"
    if not isinstance(tool.parameters, Mapping) or tool.parameters.get("type") != "object":
        return 'its parameters must be a JSON schema with "type": "object"'
    try:
        Draft202012Validator.check_schema(tool.parameters)
    except SchemaError as error:
        return f"its parameters are not a JSON schema: {error.message}"
    if not inspect.iscoroutinefunction(tool.call):
        return "its call must be an async function (arguments) -> str"
    return None
