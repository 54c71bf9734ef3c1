"""The tools that ``environment.tools`` names: functions, classes with an instance per episode, and `Tool` objects."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from agentrl_envs.episode import UnavailableError
from agentrl_envs.execution import EpisodeSandbox
from agentrl_envs.registry import TOOLS, PluginError, describe_error
from agentrl_envs.threads import BlockingCalls, BlockingRunner, ObjectThread
from agentrl_envs.tools.calling import CallError, ToolError, call_tool
from agentrl_envs.tools.mcp_tools import MCP, McpSession, server_tools, session_type
from agentrl_envs.tools.schema import (
    INJECTED,
    PYTHON,
    PYTHON_SCHEMA,
    SESSION_PYTHON_SCHEMA,
    ToolSchema,
    check_schema,
    function_schema,
    injected_parameters,
)
from agentrl_envs.types import Problem, ToolCall

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
        asks = [entry.given for entry in self.entries] + [injected_parameters(maker) for maker in self.makers]
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
            schema=function_schema(method, f"{path}.{name}", method=True), maker=made, given=injected_parameters(method)
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
        return [ToolEntry(schema=function_schema(found, path), function=found, given=injected_parameters(found))]
    raise PluginError(f"{path} cannot be a tool: it is a {type(found).__name__}, expected a function or a class")


def _class(found: type, path: str) -> list[ToolEntry]:
    unknown = [
        name
        for name, parameter in inspect.signature(found).parameters.items()
        if name not in INJECTED and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
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


class EpisodeTools:
    """Makes the instances when it is opened; an instance's plain methods all run in one thread of its own."""

    def __init__(
        self,
        tools: ToolSet,
        problem: Problem,
        *,
        sandbox: EpisodeSandbox | None,
        threads: BlockingCalls,
        timeout: float,
        more: Mapping[str, object] | None = None,
        lenient: bool = False,
    ) -> None:
        """``more``: what ``__init__`` of a class may ask for beside these; ``lenient``: every exception is shown."""
        self._tools = tools
        self._more = more or {}
        self._lenient = lenient
        self._given: dict[str, object] = {"problem": problem, "sandbox": sandbox, **self._more}
        self._threads = threads
        self._timeout = timeout
        self._instances: dict[Callable[..., object], tuple[object, ObjectThread]] = {}

    async def open(self) -> None:
        """Make an instance of each class. Raises `ToolError` where that raises."""
        for maker in self._tools.makers:
            await self.adopt(maker)

    async def adopt(self, maker: Callable[..., object]) -> None:
        """Make an instance of one class. Raises `ToolError` where that raises."""
        if maker not in self._instances:
            given = {name: self._given[name] for name in injected_parameters(maker, tuple(self._given))}
            await self._adopt(maker, functools.partial(maker, **given))

    def instance(self, maker: Callable[..., object]) -> tuple[object, ObjectThread]:
        """The instance of a class, and the thread in which its plain methods run."""
        return self._instances[maker]

    async def call(self, name: str, arguments: Mapping[str, object]) -> tuple[str, ToolCall]:
        """The text that the model reads, and the call for telemetry. Raises `ToolError` and `UnavailableError`.

        That a call takes too long is the call's fault, as of a program.
        """
        entry = self._tools.entry(name)
        assert entry is not None  # the protocol has checked it
        function, threads = await self._bound(entry)
        if isinstance(threads, ObjectThread):
            await threads.recover()  # what an earlier call still takes is not this call's time
        given = {one: self._given[one] for one in entry.given}
        began = time.monotonic()
        outcome = "ok"
        try:
            async with asyncio.timeout(self._timeout) as limit:
                result = await call_tool(name, function, {**arguments, **given}, threads, lenient=self._lenient)
        except CallError as error:
            result, outcome = str(error), "error"
        except TimeoutError as error:
            if limit.expired():
                result, outcome = f"TimeoutError: {name} did not answer in time", "timeout"
            else:
                result, outcome = f"{type(error).__name__}: {error}", "error"
        return result, ToolCall(outcome=outcome, seconds=time.monotonic() - began)

    async def fork(self, sandbox: EpisodeSandbox | None) -> EpisodeTools:
        """Copies of the instances as they are now: by their own ``fork()`` if they have one, else deep copies.

        Raises `ToolError` for an instance that cannot be copied.
        """
        twin = EpisodeTools(
            self._tools,
            self._given["problem"],  # type: ignore[arg-type]
            sandbox=sandbox,
            threads=self._threads,
            timeout=self._timeout,
            more=self._more,
            lenient=self._lenient,
        )
        shared = {id(self._given["problem"]): self._given["problem"], id(self._given["sandbox"]): sandbox}
        for maker, (instance, _) in self._instances.items():
            own = getattr(instance, "fork", None)
            await twin._adopt(maker, own or (lambda instance=instance: copy.deepcopy(instance, dict(shared))))
        return twin

    async def close(self) -> None:
        """Close the instances that can be closed. May be called more than once."""
        instances, self._instances = self._instances, {}
        for instance, thread in instances.values():
            close = getattr(instance, "close", None)
            if close is not None and thread.overdue and not inspect.iscoroutinefunction(close):
                thread.close(close)  # it is not waited for: the call before it may never end
                continue
            try:
                if close is not None:
                    done = close() if inspect.iscoroutinefunction(close) else thread.run(close, deadline=self._timeout)
                    await done
            except Exception as error:
                raise ToolError(f"closing {type(instance).__name__} raised {describe_error(error)}") from error
            finally:
                thread.close()

    async def _adopt(self, maker: Callable[..., object], make: Callable[[], object]) -> None:
        thread = ObjectThread(name=_name(maker))
        try:
            instance = await thread.run(make, deadline=self._timeout)
        except UnavailableError:
            thread.close()
            raise
        except Exception as error:
            thread.close()
            raise ToolError(f"making {_name(maker)} raised {describe_error(error)}") from error
        self._instances[maker] = (instance, thread)

    async def _bound(self, entry: ToolEntry) -> tuple[Callable[..., object], BlockingRunner]:
        """The tool's function and where it runs. Raises `UnavailableError` for a server that cannot be reached."""
        if entry.function is not None:
            return entry.function, self._threads
        instance, threads = (entry.shared, self._threads) if entry.maker is None else self._instances[entry.maker]
        if isinstance(instance, McpSession):
            await instance.connect()  # starting a server is not the call's time
            return functools.partial(instance.call, entry.schema.name), threads
        return getattr(instance, entry.schema.name), threads


def _name(maker: Callable[..., object]) -> str:
    return getattr(maker, "__name__", type(maker).__name__)
