"""Execution of tool calls. Synchronous functions run in threads, ``async`` functions on the event loop.

A call has one of four outcomes:

- A result: text, or a JSON value, which is serialized. The items of a generator are concatenated.
- A call error, which the model reads: an exception that the arguments can cause (`ValueError`, ``KeyError``,
  ``sqlite3.OperationalError`` and so on).
- A bug of the tool, which ends the run: an exception that validated arguments cannot cause (`BUG_ERRORS`), or a result
  that is neither text nor JSON.
- An unavailable service (`UnavailableError`, ``ConnectionError`` and similar), which excludes the rollout.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Generator, Mapping
from typing import Any

from agentrl_envs.episode import EnvironmentContractError, UnavailableError
from agentrl_envs.registry import describe_error
from agentrl_envs.threads import BlockingRunner

BUG_ERRORS = (
    AssertionError,
    AttributeError,
    ImportError,
    NameError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    SystemExit,
    TypeError,
)
"""Exceptions that indicate a bug in the tool's code, because its arguments have been validated."""

UNREACHABLE_ERRORS = frozenset(
    {
        "agentrl_sandbox.types.SandboxError",
        "aiohttp.client_exceptions.ClientConnectionError",
        "httpx.TransportError",
        "openai.APIConnectionError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
    }
)
"""Exceptions of optional libraries. They indicate that a service does not respond."""

BLOCKED_SECONDS = 1.0
"""Seconds for which an ``async`` tool may block the event loop before it is reported."""

_reported_tools: set[str] = set()

logger = logging.getLogger(__name__)


class ToolError(EnvironmentContractError):
    """A custom tool has a bug.

    It raised an exception that validated arguments cannot cause, or returned neither text nor JSON.
    """


class ToolCallError(Exception):
    """The call failed because of its arguments. The model reads the message."""


async def call_tool(
    name: str,
    function: Callable[..., object],
    arguments: Mapping[str, object],
    threads: BlockingRunner,
    *,
    lenient: bool = False,
) -> str:
    """Call the tool and return the text that the model reads. With ``lenient=True``, no exception counts as a bug.

    Raises ToolCallError for a call error, ToolError for a bug, and UnavailableError for an unavailable service.
    """
    try:
        value = await _run_tool(name, function, arguments, threads)
    except (ToolCallError, UnavailableError, TimeoutError):
        raise
    except BUG_ERRORS as error:
        if lenient and isinstance(error, Exception):
            raise ToolCallError(f"{type(error).__name__}: {error}") from error
        raise ToolError(f"the tool {name!r} raised {describe_error(error)}") from error
    except Exception as error:
        if indicates_unreachable_service(error):
            raise UnavailableError(f"the tool {name!r} could not reach a service: {describe_error(error)}") from error
        raise ToolCallError(f"{type(error).__name__}: {error}") from error
    return _result_text(name, value)


def indicates_unreachable_service(error: BaseException) -> bool:
    """Return True if the error indicates that a service does not respond."""
    if isinstance(error, ConnectionError):
        return True
    return any(f"{kind.__module__}.{kind.__qualname__}" in UNREACHABLE_ERRORS for kind in type(error).__mro__)


async def _run_tool(
    name: str, function: Callable[..., object], arguments: Mapping[str, object], threads: BlockingRunner
) -> object:
    if inspect.isasyncgenfunction(function):
        return await CoroutineWithBlockingWarning(name, _join_async_generator(name, function(**arguments)))
    if inspect.iscoroutinefunction(function):
        return await CoroutineWithBlockingWarning(name, function(**arguments))
    value = await threads.run(lambda: _join_generator(name, function(**arguments)), call_name=f"the tool {name!r}")
    return await CoroutineWithBlockingWarning(name, value) if inspect.iscoroutine(value) else value


def _join_generator(name: str, value: object) -> object:
    """Concatenate a generator's items into one text. Return other values unchanged."""
    return "".join(_result_text(name, piece) for piece in value) if inspect.isgenerator(value) else value


async def _join_async_generator(name: str, pieces: AsyncIterable[object]) -> str:
    return "".join([_result_text(name, piece) async for piece in pieces])


def _result_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ToolError(
                f"the tool {name!r} must return text or JSON, not {type(value).__name__} ({error})"
            ) from error
    return value.encode(errors="replace").decode()  # a lone surrogate cannot be encoded


class CoroutineWithBlockingWarning(Generator[object, object, object]):
    """Awaits a coroutine. Logs one warning per tool if its coroutine blocks the event loop.

    All rollouts wait while the event loop is blocked.
    """

    def __init__(self, name: str, work: Coroutine[object, object, object]) -> None:
        self._name = name
        self._work = work

    def __await__(self) -> CoroutineWithBlockingWarning:
        return self

    def send(self, value: object) -> object:
        return self._run_timed(lambda: self._work.send(value))

    def throw(self, *error: Any) -> object:
        return self._run_timed(lambda: self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def _run_timed(self, step: Callable[[], object]) -> object:
        began = time.monotonic()
        try:
            return step()
        finally:
            seconds = time.monotonic() - began
            if seconds > BLOCKED_SECONDS and self._name not in _reported_tools:
                _reported_tools.add(self._name)
                logger.warning(
                    "the tool %r blocked the event loop, and with it all rollouts, for %.1f s. Make it a "
                    "synchronous function, which runs in a thread, or await its I/O",
                    self._name,
                    seconds,
                )
