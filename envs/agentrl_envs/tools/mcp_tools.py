"""Tools of MCP servers: ``mcp:COMMAND`` starts one that speaks over its pipes, ``mcp:URL`` reaches one over HTTP.

What tools there are is asked once, when the settings are read. Each trajectory then has a connection of its own, opened
by its first call (a command: a process), or all share one. An error that a tool reports is an error of the call, which
the model reads; a server that cannot be reached, or is lost during a call, is a service that does not answer.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

from agentrl_envs.episode import EpisodeUsageError, UnavailableError
from agentrl_envs.registry import PluginError, install_extra
from agentrl_envs.tools.calling import CallError
from agentrl_envs.tools.schema import ToolSchema, check_schema

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

MCP = "mcp:"
"""Before the command or the address of a server in ``environment.tools``."""

OPENING_SECONDS = 60.0
"""A server that takes longer to answer a new connection is not there."""

# What the client says of an answer that is none of the tool's.
_LOST = ("Session terminated", "Server returned an error response")


class McpSession:
    """A connection to one server, opened by the first call and again after a loss."""

    target = ""

    def __init__(self) -> None:
        self._current: _Connection | None = None
        self._lost: list[_Connection] = []

    async def connect(self) -> _Connection:
        """The open connection. Raises `UnavailableError`."""
        if self._current is None or self._current.over:
            self._current = _Connection(self.target)
        await self._current.opened()
        return self._current

    async def call(self, tool: str, /, **arguments: object) -> str:
        """The text that the tool answers. Raises `CallError` and `UnavailableError`."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        connection = await self.connect()
        try:
            return _text(await connection.call(tool, arguments))
        except MCPError as error:
            if error.code != CONNECTION_CLOSED and error.message not in _LOST:
                raise CallError(str(error)) from error
            if self._current is connection:  # the next call opens another one
                self._current = None
                self._lost.append(connection)
            raise UnavailableError(f"the MCP server {self.target!r}: {error}") from error

    def fork(self) -> McpSession:
        """A connection for a copy of the trajectory. Raises `EpisodeUsageError` once there is one to copy."""
        if self._current is not None:
            raise EpisodeUsageError(
                f"a trajectory with a connection to the MCP server {self.target!r} cannot branch, because the server's "
                "state cannot be copied; valid for a server without state: environment.mcp_sessions=shared"
            )
        return type(self)()

    async def close(self) -> None:
        """Close the connection, and end the server if it was started by it. May be called more than once."""
        for connection in (*self._lost, *([self._current] if self._current else [])):
            await connection.close()
        self._current = None
        self._lost.clear()


class _Connection:
    """A client, held by a task of its own, because it must be closed by the task that has opened it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        self._held = asyncio.create_task(self._hold())

    @property
    def over(self) -> bool:
        """Whether it can be used no more."""
        return self._held.done()

    async def opened(self) -> Client:
        """The client, as soon as the server has answered. Raises `UnavailableError`."""
        return await asyncio.shield(self._client)

    async def call(self, tool: str, arguments: dict[str, object]) -> CallToolResult:
        """What the server answers. Raises ``MCPError``, and `UnavailableError` if the connection ends before."""
        client = await self.opened()
        answer = asyncio.ensure_future(client.call_tool(tool, arguments))
        try:
            await asyncio.wait({answer, self._held}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise UnavailableError(f"the MCP server {self._target!r} was lost during a call of {tool}")
            return answer.result()
        finally:
            answer.cancel()

    async def close(self) -> None:
        """Close the client and end what it has started."""
        self._done.set()
        await asyncio.wait({self._held})

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(OPENING_SECONDS):
                    client = await stack.enter_async_context(_client(self._target))
                self._client.set_result(client)
                await self._done.wait()
        except Exception as error:  # noqa: BLE001  (whatever a transport raises, in groups too)
            if not self._client.done():
                self._client.set_exception(UnavailableError(_no_answer(self._target, error)))
        finally:
            self._client.cancel()


def session_type(target: str) -> type[McpSession]:
    """The class of the sessions with one server."""
    return type("McpServer", (McpSession,), {"target": target})


@functools.lru_cache(maxsize=64)
def server_tools(target: str) -> tuple[ToolSchema, ...]:
    """The tools of a server. Raises `PluginError` if it does not answer, has none, or has one that cannot be told."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise PluginError(f"environment.tools '{MCP}{target}' needs the package mcp: {install_extra('mcp')}") from error
    with ThreadPoolExecutor(1, thread_name_prefix="mcp") as thread:  # an event loop may run in this one
        try:
            schemas = thread.submit(lambda: asyncio.run(_listed(target))).result()
        except Exception as error:
            raise PluginError(f"environment.tools: {_no_answer(target, error)}") from error
    if not schemas:
        raise PluginError(f"environment.tools: the MCP server {target!r} has no tools")
    for schema in schemas:
        check_schema(schema, f"environment.tools '{MCP}{target}': {schema.name!r}")
    return schemas


async def _listed(target: str) -> tuple[ToolSchema, ...]:
    found = []
    async with asyncio.timeout(OPENING_SECONDS), _client(target) as client:
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
    return tuple(
        ToolSchema(name=tool.name, description=tool.description or "", parameters=tool.input_schema) for tool in found
    )


def _client(target: str) -> AbstractAsyncContextManager[Client]:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    if target.startswith(("http://", "https://")):
        return Client(target)
    command, *arguments = shlex.split(target) or [""]
    # As a shell would start it: with this process's environment.
    parameters = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
    return Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr))


def _text(result: CallToolResult) -> str:
    """What the model reads of a result. Raises `CallError` for one that the tool calls an error."""
    pieces = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not pieces and result.structured_content is not None:
        pieces = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(pieces)
    if result.is_error:
        raise CallError(text)
    return text


def _no_answer(target: str, error: BaseException) -> str:
    """Why a server could not be reached; of a group of errors, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = f"no answer within {OPENING_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
    return f"the MCP server {target!r} cannot be reached: {reason or type(error).__name__}"
