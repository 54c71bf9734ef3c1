"""The tools that ``environment.tools`` names: functions, classes with an instance per episode, and `Tool` objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from agentrl_envs.registry import TOOLS, PluginError
from agentrl_envs.tools.mcp_tools import MCP, McpSession, server_tools, session_type
from agentrl_envs.tools.schema import (
    GIVEN,
    PYTHON,
    PYTHON_SCHEMA,
    SESSION_PYTHON_SCHEMA,
    ToolSchema,
    check_schema,
    function_schema,
    given_parameters,
)

RESERVED = frozenset({"close", "fork"})
"""Methods of a class of tools that are none themselves."""


@runtime_checkable
class Tool(Protocol):
    """A tool that writes its own schema, where a function's signature cannot say it."""

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
class ToolEntry:
    """One tool: ``function``, a method of the episode's instance of ``maker``, or of a ``shared`` server.

    ``given``: which of ``problem`` and ``sandbox`` it asks for itself.
    """

    schema: ToolSchema
    function: Callable[..., object] | None = None
    maker: type | None = None
    shared: McpSession | None = None
    given: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of an environment, in their order."""

    entries: tuple[ToolEntry, ...]

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """What the model is told of all tools."""
        return tuple(entry.schema for entry in self.entries)

    @property
    def makers(self) -> tuple[type, ...]:
        """The classes of which each episode has an instance."""
        return tuple(dict.fromkeys(entry.maker for entry in self.entries if entry.maker is not None))

    @property
    def runs_programs(self) -> bool:
        """Whether the sandbox is needed."""
        asks = [entry.given for entry in self.entries] + [given_parameters(maker) for maker in self.makers]
        return self.schema(PYTHON) is not None or any("sandbox" in given for given in asks)

    async def close(self) -> None:
        """Close the connections that all episodes share. May be called more than once."""
        for session in {id(entry.shared): entry.shared for entry in self.entries}.values():
            if session is not None:
                await session.close()

    def entry(self, name: str) -> ToolEntry | None:
        """The tool of this name."""
        return next((entry for entry in self.entries if entry.schema.name == name), None)

    def schema(self, name: str) -> ToolSchema | None:
        """What the model is told of the tool of this name."""
        entry = self.entry(name)
        return None if entry is None else entry.schema


NO_TOOLS = ToolSet(())


def load_tools(names: Sequence[str], *, interpreter: str = "fresh", mcp_sessions: str = "trajectory") -> ToolSet:
    """The tools that ``environment.tools`` names. Raises `PluginError` for what is no tool."""
    entries: list[ToolEntry] = []
    for name in names:
        for entry in _of_server(name, mcp_sessions) if name.startswith(MCP) else _entries(name, interpreter):
            if any(entry.schema.name == other.schema.name for other in entries):
                raise PluginError(f"environment.tools: two tools are called {entry.schema.name!r}")
            entries.append(entry)
    return ToolSet(tuple(entries))


def methods_as_tools(made: type, path: str, reserved: frozenset[str]) -> list[ToolEntry]:
    """Return the public methods of a class as tools, in order of definition, base classes first."""
    methods = {
        name: member
        for base in reversed(made.__mro__)
        for name, member in _public_functions(base).items()
        if name not in reserved
    }
    return [
        ToolEntry(
            schema=function_schema(method, f"{path}.{name}", method=True), maker=made, given=given_parameters(method)
        )
        for name, method in methods.items()
    ]


def _public_functions(base: type) -> dict[str, Callable[..., object]]:
    """Return the public functions of a class body, in order of definition.

    Sorts by source line, unless a function was defined outside the class body. The order of ``vars`` is not reliable:
    cloudpickle restores classes of a notebook with their attributes sorted by name.
    """
    functions: dict[str, Callable[..., object]] = {
        name: member for name, member in vars(base).items() if inspect.isfunction(member) and not name.startswith("_")
    }
    originals = {name: inspect.unwrap(member) for name, member in functions.items()}
    for name, one in originals.items():
        # Compare only the end of the qualified name: cloudpickle does not restore the prefix of a local class.
        if not inspect.isfunction(one) or one.__qualname__.split(".")[-2:] != [base.__name__, name]:
            return functions
    order = sorted(originals, key=lambda name: originals[name].__code__.co_firstlineno)
    return {name: functions[name] for name in order}


def _of_server(name: str, sessions: str) -> list[ToolEntry]:
    target = name.removeprefix(MCP)
    made = session_type(target)
    shared = made() if sessions == "shared" else None
    return [ToolEntry(schema=schema, maker=None if shared else made, shared=shared) for schema in server_tools(target)]


def _entries(name: str, interpreter: str) -> list[ToolEntry]:
    if name == PYTHON:
        return [ToolEntry(schema=PYTHON_SCHEMA if interpreter == "fresh" else SESSION_PYTHON_SCHEMA)]
    found = TOOLS[name]
    path = f"environment.tools {name!r}"
    if hasattr(found, "parameters") and hasattr(found, "call"):
        return [_written_by_hand(found() if inspect.isclass(found) else found, path)]
    if inspect.isclass(found):
        return _class(found, path)
    if callable(found):
        return [ToolEntry(schema=function_schema(found, path), function=found, given=given_parameters(found))]
    raise PluginError(f"{path} cannot be a tool: it is a {type(found).__name__}, expected a function or a class")


def _class(found: type, path: str) -> list[ToolEntry]:
    unknown = [
        name
        for name, parameter in inspect.signature(found).parameters.items()
        if name not in GIVEN and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if unknown:
        raise PluginError(
            f"{path}: {found.__name__}.__init__ asks for {unknown[0]!r}; it may ask for problem and sandbox"
        )
    entries = methods_as_tools(found, path, RESERVED)
    if not entries:
        raise PluginError(f"{path}: {found.__name__} has no public methods, so it has no tools")
    return entries


def _written_by_hand(tool: object, path: str) -> ToolEntry:
    missing = [name for name in ("name", "description") if not hasattr(tool, name)]
    if missing:
        raise PluginError(f"{path} cannot be a tool: it lacks {', '.join(missing)}")
    own = cast(Tool, tool)
    schema = ToolSchema(name=own.name, description=own.description, parameters=own.parameters)
    check_schema(schema, path)
    if not inspect.iscoroutinefunction(own.call):
        raise PluginError(f"{path} cannot be a tool: its call must be an async function (arguments) -> str")

    async def call(**arguments: object) -> str:
        return await own.call(arguments)

    return ToolEntry(schema=schema, function=call)
