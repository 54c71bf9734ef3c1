"""Tools of MCP servers: ``mcp:COMMAND`` starts a server that communicates over pipes, ``mcp:URL`` connects over HTTP.

The tools are listed once, when the settings are read. By default, the first call of a trajectory opens a separate
connection (and starts a process, for a command). Alternatively, all trajectories share one connection. An error that a
tool reports is a call error, which the model reads. If a server is unreachable or disconnects during a call, the
rollout is excluded.
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
from agentrl_envs.registry import PluginError, install_command
from agentrl_envs.tools.calling import ToolCallError
from agentrl_envs.tools.schema import ToolSchema, check_schema

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

MCP_PREFIX = "mcp:"
"""Prefix of a server's command or address in ``environment.tools``."""

OPENING_SECONDS = 60.0
"""Time limit for a server to accept a new connection."""

# Messages of the MCP client (mcp 2.3) for errors of the connection rather than the tool.
_CONNECTION_ERROR_MESSAGES = ("Session terminated", "Server returned an error response")


class McpSession:
    """A connection to one server, opened by the first call and reopened by the next call after a disconnect."""

    target = ""

    def __init__(self) -> None:
        self._current: _McpConnection | None = None
        self._lost_connections: list[_McpConnection] = []

    async def connect(self) -> _McpConnection:
        """Return the connection, opened if necessary. Raises UnavailableError if the server cannot be reached."""
        if self._current is None or self._current.has_ended:
            self._current = _McpConnection(self.target)
        await self._current.wait_for_client()
        return self._current

    async def call(self, tool: str, /, **arguments: object) -> str:
        """Call a tool and return its text.

        Raises ToolCallError if the tool reports an error, and UnavailableError if the connection fails.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        connection = await self.connect()
        try:
            return _result_text(await connection.call(tool, arguments))
        except MCPError as error:
            if error.code != CONNECTION_CLOSED and error.message not in _CONNECTION_ERROR_MESSAGES:
                raise ToolCallError(str(error)) from error
            if self._current is connection:  # the next call opens a new connection
                self._current = None
                self._lost_connections.append(connection)
            raise UnavailableError(f"the connection to the MCP server {self.target!r} failed: {error}") from error

    def fork(self) -> McpSession:
        """Return a session for a copy of the trajectory. Raises EpisodeUsageError if this session is connected."""
        if self._current is not None:
            raise EpisodeUsageError(
                f"a trajectory with a connection to the MCP server {self.target!r} cannot branch, because the server's "
                "state cannot be copied; if the server is stateless, set environment.mcp_sessions=shared"
            )
        return type(self)()

    async def close(self) -> None:
        """Close the connection, and stop the server if the session started it. May be called more than once."""
        for connection in (*self._lost_connections, *([self._current] if self._current else [])):
            await connection.close()
        self._current = None
        self._lost_connections.clear()


class _McpConnection:
    """A client in a separate task, because the task that opens a client must also close it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        self._task = asyncio.create_task(self._keep_open())

    @property
    def has_ended(self) -> bool:
        """True if the connection has ended."""
        return self._task.done()

    async def wait_for_client(self) -> Client:
        """Wait for the connection and return the client. Raises UnavailableError if the server cannot be reached."""
        return await asyncio.shield(self._client)

    async def call(self, tool: str, arguments: dict[str, object]) -> CallToolResult:
        """Call a tool. Raises MCPError if the request fails, and UnavailableError if the server disconnects."""
        client = await self.wait_for_client()
        answer = asyncio.ensure_future(client.call_tool(tool, arguments))
        try:
            await asyncio.wait({answer, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise UnavailableError(f"the MCP server {self._target!r} disconnected during a call to {tool}")
            return answer.result()
        finally:
            answer.cancel()

    async def close(self) -> None:
        """Close the client and stop the process that it started."""
        self._done.set()
        await asyncio.wait({self._task})

    async def _keep_open(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(OPENING_SECONDS):
                    client = await stack.enter_async_context(_make_client(self._target))
                self._client.set_result(client)
                await self._done.wait()
        except Exception as error:  # noqa: BLE001  (transports raise any exception, also in groups)
            if not self._client.done():
                self._client.set_exception(UnavailableError(_unreachable_message(self._target, error)))
        finally:
            self._client.cancel()


def make_session_class(target: str) -> type[McpSession]:
    """Return a subclass of `McpSession` for one server."""
    return type("McpServer", (McpSession,), {"target": target})


@functools.lru_cache(maxsize=64)
def list_server_tools(target: str) -> tuple[ToolSchema, ...]:
    """List the tools of a server. Raises PluginError if it does not respond, has no tools, or has an invalid schema."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise PluginError(
            f"environment.tools '{MCP_PREFIX}{target}' needs the package mcp: {install_command('mcp')}"
        ) from error
    with ThreadPoolExecutor(
        1, thread_name_prefix="mcp"
    ) as thread:  # a separate thread, because asyncio.run fails in a thread with a running event loop
        try:
            schemas = thread.submit(lambda: asyncio.run(_list_tools(target))).result()
        except Exception as error:
            raise PluginError(f"environment.tools: {_unreachable_message(target, error)}") from error
    if not schemas:
        raise PluginError(f"environment.tools: the MCP server {target!r} has no tools")
    for schema in schemas:
        check_schema(schema, f"environment.tools '{MCP_PREFIX}{target}': {schema.name!r}")
    return schemas


async def _list_tools(target: str) -> tuple[ToolSchema, ...]:
    tools = []
    async with asyncio.timeout(OPENING_SECONDS), _make_client(target) as client:
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
    return tuple(
        ToolSchema(name=tool.name, description=tool.description or "", parameters=tool.input_schema) for tool in tools
    )


def _make_client(target: str) -> AbstractAsyncContextManager[Client]:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    if target.startswith(("http://", "https://")):
        return Client(target)
    command, *arguments = shlex.split(target) or [""]
    # By default, mcp passes only a few environment variables. Pass all of them, as a shell does.
    parameters = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
    return Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr))


def _result_text(result: CallToolResult) -> str:
    """Return the text of a result. Raises ToolCallError if the tool reports an error."""
    pieces = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not pieces and result.structured_content is not None:
        pieces = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(pieces)
    if result.is_error:
        raise ToolCallError(text)
    return text


def _unreachable_message(target: str, error: BaseException) -> str:
    """Return the reason why a server could not be reached: ``error``, or the first error of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = f"no response within {OPENING_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
    return f"the MCP server {target!r} cannot be reached: {reason or type(error).__name__}"
