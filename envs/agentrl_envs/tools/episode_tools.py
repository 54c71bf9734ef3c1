"""The tools of one episode: its own instances of classes, and the calls of its turns."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import time
from collections.abc import Callable, Mapping

from agentrl_envs.adapters.blocking import BlockingCalls, OwnThread, RunsBlocking
from agentrl_envs.episode import UnavailableError
from agentrl_envs.execution import EpisodeSandbox
from agentrl_envs.registry import describe_error
from agentrl_envs.tools.calling import CallError, ToolError, call_tool
from agentrl_envs.tools.loading import ToolEntry, ToolSet
from agentrl_envs.tools.mcp_tools import McpSession
from agentrl_envs.tools.schema import given_parameters
from agentrl_envs.types import Problem, ToolCall


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
        self._instances: dict[Callable[..., object], tuple[object, OwnThread]] = {}

    async def open(self) -> None:
        """Make an instance of each class. Raises `ToolError` where that raises."""
        for maker in self._tools.makers:
            await self.adopt(maker)

    async def adopt(self, maker: Callable[..., object]) -> None:
        """Make an instance of one class. Raises `ToolError` where that raises."""
        if maker not in self._instances:
            given = {name: self._given[name] for name in given_parameters(maker, tuple(self._given))}
            await self._adopt(maker, functools.partial(maker, **given))

    def instance(self, maker: Callable[..., object]) -> tuple[object, OwnThread]:
        """The instance of a class, and the thread in which its plain methods run."""
        return self._instances[maker]

    async def call(self, name: str, arguments: Mapping[str, object]) -> tuple[str, ToolCall]:
        """The text that the model reads, and the call for telemetry. Raises `ToolError` and `UnavailableError`.

        That a call takes too long is the call's fault, as of a program.
        """
        entry = self._tools.entry(name)
        assert entry is not None  # the protocol has checked it
        function, threads = await self._bound(entry)
        if isinstance(threads, OwnThread):
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
        thread = OwnThread(name=_name(maker))
        try:
            instance = await thread.run(make, deadline=self._timeout)
        except UnavailableError:
            thread.close()
            raise
        except Exception as error:
            thread.close()
            raise ToolError(f"making {_name(maker)} raised {describe_error(error)}") from error
        self._instances[maker] = (instance, thread)

    async def _bound(self, entry: ToolEntry) -> tuple[Callable[..., object], RunsBlocking]:
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
