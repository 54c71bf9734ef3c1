"""Call a tool: plain functions in threads, ``async`` ones on the event loop, generators to their end.

What a call can come to:

- A result: text, or a JSON value, which is written as JSON.
- An error of the call, which the model reads: any exception that tells of what the arguments ask for (`ValueError`,
  ``KeyError``, ``sqlite3.OperationalError`` and so on).
- A bug of the tool, which ends the run: an exception that no arguments explain, since these have been checked (`BUGS`),
  or a result that is neither text nor JSON.
- A service that does not answer (`UnavailableError`, ``ConnectionError`` and the like): no data.
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

BUGS = (
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
"""Exceptions that tell of the tool's code, not of its arguments."""

UNREACHABLE = frozenset(
    {
        "agentrl_sandbox.types.SandboxError",
        "aiohttp.client_exceptions.ClientConnectionError",
        "httpx.TransportError",
        "openai.APIConnectionError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
    }
)
"""Exceptions of libraries that need not be installed: a service does not answer."""

BLOCKED_SECONDS = 1.0
"""An ``async`` tool that holds the event loop longer without a pause is reported."""

_reported: set[str] = set()

logger = logging.getLogger(__name__)


class ToolError(EnvironmentContractError):
    """A bug of a user's tool: it raised what no arguments explain, or returned neither text nor JSON."""


class CallError(Exception):
    """The call went wrong by what it asked for; the model reads the message."""


async def call_tool(
    name: str,
    function: Callable[..., object],
    arguments: Mapping[str, object],
    threads: BlockingRunner,
    *,
    lenient: bool = False,
) -> str:
    """What the tool answers. ``lenient``: no exception is a bug.

    Raises `CallError`, `ToolError` and `UnavailableError`.
    """
    try:
        value = await _value(name, function, arguments, threads)
    except (CallError, UnavailableError, TimeoutError):
        raise
    except BUGS as error:
        if lenient and isinstance(error, Exception):
            raise CallError(f"{type(error).__name__}: {error}") from error
        raise ToolError(f"the tool {name!r} raised {describe_error(error)}") from error
    except Exception as error:
        if is_unreachable(error):
            raise UnavailableError(f"the tool {name!r}: {describe_error(error)}") from error
        raise CallError(f"{type(error).__name__}: {error}") from error
    return _text(name, value)


def is_unreachable(error: BaseException) -> bool:
    """Whether the error says that a service does not answer."""
    if isinstance(error, ConnectionError):
        return True
    return any(f"{kind.__module__}.{kind.__qualname__}" in UNREACHABLE for kind in type(error).__mro__)


async def _value(
    name: str, function: Callable[..., object], arguments: Mapping[str, object], threads: BlockingRunner
) -> object:
    if inspect.isasyncgenfunction(function):
        return await Watched(name, _joined(name, function(**arguments)))
    if inspect.iscoroutinefunction(function):
        return await Watched(name, function(**arguments))
    value = await threads.run(lambda: _exhausted(name, function(**arguments)), what=f"the tool {name!r}")
    return await Watched(name, value) if inspect.iscoroutine(value) else value


def _exhausted(name: str, value: object) -> object:
    """A generator's pieces as one text."""
    return "".join(_text(name, piece) for piece in value) if inspect.isgenerator(value) else value


async def _joined(name: str, pieces: AsyncIterable[object]) -> str:
    return "".join([_text(name, piece) async for piece in pieces])


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ToolError(
                f"the tool {name!r} must return text or JSON, not {type(value).__name__} ({error})"
            ) from error
    return value.encode(errors="replace").decode()  # half of a surrogate pair has no encoding


class Watched(Generator[object, object, object]):
    """Awaits a coroutine, and reports once by name one that holds the event loop: all rollouts wait for it."""

    def __init__(self, name: str, work: Coroutine[object, object, object]) -> None:
        self._name = name
        self._work = work

    def __await__(self) -> Watched:
        return self

    def send(self, value: object) -> object:
        return self._timed(lambda: self._work.send(value))

    def throw(self, *error: Any) -> object:
        return self._timed(lambda: self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def _timed(self, step: Callable[[], object]) -> object:
        began = time.monotonic()
        try:
            return step()
        finally:
            seconds = time.monotonic() - began
            if seconds > BLOCKED_SECONDS and self._name not in _reported:
                _reported.add(self._name)
                logger.warning(
                    "the tool %r held the event loop for %.1f s, and every other rollout waited: make it a plain "
                    "function, which runs in a thread, or await what it waits for",
                    self._name,
                    seconds,
                )
