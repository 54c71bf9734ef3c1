"""The tools of ``environment.tools`` (`ToolSet`), and their instances and calls in one episode (`EpisodeTools`)."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

from agentrl_envs.episode import UnavailableError
from agentrl_envs.execution import EpisodeSandbox
from agentrl_envs.forks import close_on_failure
from agentrl_envs.registry import TOOLS, PluginError, describe_error
from agentrl_envs.threads import BlockingCallPool, BlockingRunner, ObjectThread
from agentrl_envs.tools.calling import ToolCallError, ToolError, call_tool
from agentrl_envs.tools.mcp_tools import MCP_PREFIX, McpSession, list_server_tools, make_session_class
from agentrl_envs.tools.schema import (
    INJECTED_PARAMETERS,
    PYTHON,
    PYTHON_SCHEMA,
    SESSION_PYTHON_SCHEMA,
    ToolSchema,
    check_schema,
    function_schema,
    injected_parameters,
)
from agentrl_envs.types import Problem, ToolCall

RESERVED_METHODS = frozenset({"close", "fork"})
"""Public methods of a class that are not tools."""

_MAX_THREADS = 64  # concurrent calls of synchronous functions


@runtime_checkable
class Tool(Protocol):
    """A tool with a hand-written schema, for parameters that a signature cannot describe."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, object]: ...

    async def call(self, arguments: Mapping[str, object]) -> str:
        """Execute a call and return the text that the model reads."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolEntry:
    """One tool: a function, a method of the episode's instance of a class, or a tool of an MCP server.

    ``shared_session`` is the connection to a server that all episodes share. ``injected`` contains the names among
    ``problem`` and ``sandbox`` that are parameters of the tool.
    """

    schema: ToolSchema
    function: Callable[..., object] | None = None
    tool_class: type | None = None
    shared_session: McpSession | None = None
    injected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of an environment, in the order of the settings. ``threads`` runs the synchronous functions."""

    entries: tuple[ToolEntry, ...]
    threads: BlockingCallPool = field(
        default_factory=lambda: BlockingCallPool(_MAX_THREADS, name="tool"), compare=False, repr=False
    )

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """Schemas of all tools."""
        return tuple(entry.schema for entry in self.entries)

    @property
    def episode_tool_classes(self) -> tuple[type, ...]:
        """Classes that are instantiated once per episode."""
        return tuple(dict.fromkeys(entry.tool_class for entry in self.entries if entry.tool_class is not None))

    @property
    def needs_sandbox(self) -> bool:
        """True if a tool needs the sandbox."""
        asks = [entry.injected for entry in self.entries] + [
            injected_parameters(tool_class) for tool_class in self.episode_tool_classes
        ]
        return self.schema(PYTHON) is not None or any("sandbox" in injected for injected in asks)

    async def close(self) -> None:
        """Close shared connections. May be called more than once."""
        for session in {id(entry.shared_session): entry.shared_session for entry in self.entries}.values():
            if session is not None:
                await session.close()

    def entry(self, name: str) -> ToolEntry | None:
        """Return the tool ``name``, or None if it does not exist."""
        return next((entry for entry in self.entries if entry.schema.name == name), None)

    def schema(self, name: str) -> ToolSchema | None:
        """Return the schema of the tool ``name``, or None if the tool does not exist."""
        entry = self.entry(name)
        return None if entry is None else entry.schema


NO_TOOLS = ToolSet(())


def load_tools(names: Sequence[str], *, interpreter: str = "fresh", mcp_sessions: str = "trajectory") -> ToolSet:
    """Load the tools of ``environment.tools``. Raises PluginError for an invalid tool or a repeated name."""
    entries: list[ToolEntry] = []
    for name in names:
        for entry in (
            _server_entries(name, mcp_sessions) if name.startswith(MCP_PREFIX) else _load_entries(name, interpreter)
        ):
            if any(entry.schema.name == other.schema.name for other in entries):
                raise PluginError(f"environment.tools: two tools have the name {entry.schema.name!r}")
            entries.append(entry)
    return ToolSet(tuple(entries))


def methods_as_tools(tool_class: type, path: str, reserved: frozenset[str]) -> list[ToolEntry]:
    """Return the public methods of a class as tools, in order of definition, base classes first."""
    methods = {
        name: member
        for base in reversed(tool_class.__mro__)
        for name, member in _public_functions(base).items()
        if name not in reserved
    }
    return [
        ToolEntry(
            schema=function_schema(method, f"{path}.{name}", method=True),
            tool_class=tool_class,
            injected=injected_parameters(method),
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
        # Compare only the end of the qualified name, because cloudpickle does not restore the prefix of a local class.
        if not inspect.isfunction(one) or one.__qualname__.split(".")[-2:] != [base.__name__, name]:
            return functions
    order = sorted(originals, key=lambda name: originals[name].__code__.co_firstlineno)
    return {name: functions[name] for name in order}


def _server_entries(name: str, sessions: str) -> list[ToolEntry]:
    target = name.removeprefix(MCP_PREFIX)
    made = make_session_class(target)
    shared = made() if sessions == "shared" else None
    return [
        ToolEntry(schema=schema, tool_class=None if shared else made, shared_session=shared)
        for schema in list_server_tools(target)
    ]


def _load_entries(name: str, interpreter: str) -> list[ToolEntry]:
    if name == PYTHON:
        return [ToolEntry(schema=PYTHON_SCHEMA if interpreter == "fresh" else SESSION_PYTHON_SCHEMA)]
    loaded = TOOLS[name]
    path = f"environment.tools {name!r}"
    if hasattr(loaded, "parameters") and hasattr(loaded, "call"):
        return [_entry_with_schema(loaded() if inspect.isclass(loaded) else loaded, path)]
    if inspect.isclass(loaded):
        return _class_entries(loaded, path)
    if callable(loaded):
        return [ToolEntry(schema=function_schema(loaded, path), function=loaded, injected=injected_parameters(loaded))]
    raise PluginError(f"{path} cannot be a tool: it is a {type(loaded).__name__}, but must be a function or a class")


def _class_entries(loaded: type, path: str) -> list[ToolEntry]:
    unknown = [
        name
        for name, parameter in inspect.signature(loaded).parameters.items()
        if name not in INJECTED_PARAMETERS
        and parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if unknown:
        raise PluginError(
            f"{path}: {loaded.__name__}.__init__ requires {unknown[0]!r}; valid parameters: problem, sandbox"
        )
    entries = methods_as_tools(loaded, path, RESERVED_METHODS)
    if not entries:
        raise PluginError(f"{path}: {loaded.__name__} has no public methods, so it has no tools")
    return entries


def _entry_with_schema(tool: object, path: str) -> ToolEntry:
    missing = [name for name in ("name", "description") if not hasattr(tool, name)]
    if missing:
        raise PluginError(f"{path} cannot be a tool: it has no {', '.join(missing)}")
    custom = cast(Tool, tool)
    schema = ToolSchema(name=custom.name, description=custom.description, parameters=custom.parameters)
    check_schema(schema, path)
    if not inspect.iscoroutinefunction(custom.call):
        raise PluginError(f"{path} cannot be a tool: its call() method must be async: async def call(self, arguments)")

    async def call(**arguments: object) -> str:
        return await custom.call(arguments)

    return ToolEntry(schema=schema, function=call)


class EpisodeTools:
    """The tools of one episode. The synchronous methods of an instance all run in one thread."""

    def __init__(
        self,
        tools: ToolSet,
        problem: Problem,
        *,
        sandbox: EpisodeSandbox | None,
        timeout: float,
        extra_arguments: Mapping[str, object] | None = None,
        lenient: bool = False,
    ) -> None:
        """Create the tools without instantiating classes.

        ``extra_arguments`` contains further arguments for the classes' constructors. With ``lenient``, every exception
        is a call error, which the model reads.
        """
        self._tools = tools
        self._extra_arguments = extra_arguments or {}
        self._lenient = lenient
        self._injected: dict[str, object] = {"problem": problem, "sandbox": sandbox, **self._extra_arguments}
        self._timeout = timeout
        self._instances: dict[Callable[..., object], tuple[object, ObjectThread]] = {}

    async def open(self) -> None:
        """Create an instance of each class. Raises ToolError if a constructor fails."""
        for tool_class in self._tools.episode_tool_classes:
            await self.create_instance(tool_class)

    async def create_instance(self, tool_class: Callable[..., object]) -> None:
        """Create an instance of one class. Raises ToolError if the constructor fails."""
        injected = {name: self._injected[name] for name in injected_parameters(tool_class, tuple(self._injected))}
        await self._add_instance(tool_class, functools.partial(tool_class, **injected))

    def instance(self, tool_class: Callable[..., object]) -> tuple[object, ObjectThread]:
        """Return the instance of a class and the thread of its synchronous methods."""
        return self._instances[tool_class]

    async def call(self, name: str, arguments: Mapping[str, object]) -> tuple[str, ToolCall]:
        """Call a tool. Returns its text for the model and its telemetry.

        A call that exceeds its time limit is a call error, like a program that exceeds its time limit. Raises ToolError
        if the tool has a bug, and UnavailableError if a service does not respond.
        """
        entry = self._tools.entry(name)
        assert entry is not None  # checked by the protocol
        function, threads = await self._function_and_runner(entry)
        if isinstance(threads, ObjectThread):
            await threads.wait_for_overdue_call()  # the time limit does not include the rest of an earlier call
        injected = {one: self._injected[one] for one in entry.injected}
        began = time.monotonic()
        outcome = "ok"
        try:
            async with asyncio.timeout(self._timeout) as limit:
                result = await call_tool(name, function, {**arguments, **injected}, threads, lenient=self._lenient)
        except ToolCallError as error:
            result, outcome = str(error), "error"
        except TimeoutError as error:
            if limit.expired():
                result, outcome = f"TimeoutError: {name} did not answer in time", "timeout"
            else:
                result, outcome = f"{type(error).__name__}: {error}", "error"
        return result, ToolCall(outcome=outcome, seconds=time.monotonic() - began)

    async def fork(self, sandbox: EpisodeSandbox | None) -> EpisodeTools:
        """Copy the instances with their ``fork()`` method if they have one, otherwise with `copy.deepcopy`.

        A ``fork()`` method may be asynchronous. Raises ToolError if an instance cannot be copied.
        """
        twin = EpisodeTools(
            self._tools,
            self._injected["problem"],  # type: ignore[arg-type]
            sandbox=sandbox,
            timeout=self._timeout,
            extra_arguments=self._extra_arguments,
            lenient=self._lenient,
        )
        shared = {id(self._injected["problem"]): self._injected["problem"], id(self._injected["sandbox"]): sandbox}
        async with close_on_failure(twin):
            for tool_class, (instance, _) in self._instances.items():
                custom = getattr(instance, "fork", None)
                await twin._add_instance(
                    tool_class,
                    custom or (lambda instance=instance: copy.deepcopy(instance, dict(shared))),
                    verb="copying",
                )
                copied, name = twin._instances[tool_class][0], type(instance).__name__
                if not isinstance(copied, type(instance)):
                    raise ToolError(f"fork() of {name} returned {copied!r:.100}; it must return another {name}")
        return twin

    async def close(self) -> None:
        """Close the instances that have a ``close`` method. May be called more than once."""
        instances, self._instances = self._instances, {}
        for instance, thread in instances.values():
            close = getattr(instance, "close", None)
            if close is not None and thread.overdue_call and not inspect.iscoroutinefunction(close):
                thread.close(close)  # do not wait, because an earlier call may never return
                continue
            try:
                if close is not None:
                    done = close() if inspect.iscoroutinefunction(close) else thread.run(close, timeout=self._timeout)
                    await done
            except Exception as error:
                raise ToolError(f"closing {type(instance).__name__} raised {describe_error(error)}") from error
            finally:
                thread.close()

    async def _add_instance(
        self, tool_class: Callable[..., object], make: Callable[[], object], verb: str = "creating"
    ) -> None:
        thread = ObjectThread(name=_class_name(tool_class))
        try:
            if inspect.iscoroutinefunction(make):
                instance = await make()
            else:
                instance = await thread.run(make, timeout=self._timeout)
        except (UnavailableError, asyncio.CancelledError):
            thread.close()
            raise
        except Exception as error:
            thread.close()
            raise ToolError(f"{verb} {_class_name(tool_class)} raised {describe_error(error)}") from error
        self._instances[tool_class] = (instance, thread)

    async def _function_and_runner(self, entry: ToolEntry) -> tuple[Callable[..., object], BlockingRunner]:
        """Return the tool's function and its runner. Raises UnavailableError if a server is unreachable."""
        if entry.function is not None:
            return entry.function, self._tools.threads
        instance: object = entry.shared_session
        threads: BlockingRunner = self._tools.threads
        if entry.tool_class is not None:
            instance, threads = self._instances[entry.tool_class]
        if isinstance(instance, McpSession):
            await instance.connect()  # the time limit does not include the start of a server
            return functools.partial(instance.call, entry.schema.name), threads
        return getattr(instance, entry.schema.name), threads


def _class_name(tool_class: Callable[..., object]) -> str:
    return getattr(tool_class, "__name__", type(tool_class).__name__)
