"""Per-episode sandbox client. Retries infrastructure failures until a deadline.

Tools, rewards and environments receive an `EpisodeSandbox` as ``sandbox``::

    async def check(code: str, sandbox) -> str:
        execution = await sandbox.execute(code, files={"data.csv": b"..."}, fetch_files=["result.csv"])
        return execution.stdout

Synchronous functions call ``sandbox.run(code)``; they run in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from agentrl_envs.episode import EpisodeUsageError, UnavailableError
from agentrl_envs.settings import ExecutionSettings
from agentrl_envs.types import ToolCall
from agentrl_sandbox.client import Execution, Outcome, Sandbox, SandboxError, SessionForkError, UnknownSessionError

MAX_PRINTED_CHARACTERS = 4096
"""Number of characters of a program's output that its `ToolCall` stores."""

_MAX_RETRY_WAIT = 5.0  # seconds

trace_program: Callable[[], AbstractContextManager[object]] = nullcontext
"""Context manager around each program. Rollout tracing replaces it."""

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class _InfrastructureError(Exception):
    """The sandbox responded with an infrastructure failure."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(execution.stderr.strip() or "the sandbox reported an infrastructure failure")
        self.execution = execution


class EpisodeSandbox:
    """Runs an episode's programs: each in a fresh interpreter or, with ``interpreter=session``, all in one interpreter.

    A program that is killed or calls ``os._exit`` ends the session, and the next program starts a new one. An instance
    belongs to the event loop in which it was created.
    """

    def __init__(self, sandbox: Sandbox, settings: ExecutionSettings) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._session: str | None = None
        self._opening = asyncio.Lock()

    @property
    def is_stateless(self) -> bool:
        """True if the next program starts without state from earlier programs."""
        return self._session is None

    async def execute(
        self,
        program: str,
        *,
        timeout: float | None = None,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
    ) -> Execution:
        """Run a program. Raises UnavailableError if the sandbox fails.

        The default ``timeout`` is ``execution_timeout``. ``files`` are written before the run. ``fetch_files`` are read
        after the run, into ``execution.files``. All attempts have the same request id, so the program does not run
        again if only the response was lost.
        """
        request_id = uuid.uuid4().hex
        # Pass only the options in use, so that a custom sandbox need not support all options.
        options: dict[str, object] = {"files": files} if files else {}
        options |= {"fetch_files": tuple(fetch_files)} if fetch_files else {}
        options |= {"stdin": stdin} if stdin else {}

        async def run() -> Execution:
            if self._settings.interpreter == "session":
                options["session"] = await self._open_session()
            with trace_program():
                execution = await self._sandbox.execute(
                    program,
                    timeout=timeout or self._settings.execution_timeout,
                    request_id=request_id,
                    **options,  # type: ignore[arg-type]
                )
            if execution.outcome is Outcome.INFRASTRUCTURE_FAILURE:
                raise _InfrastructureError(execution)
            return execution

        execution = await self._run_within_deadline(run)
        if execution.session_ended:
            self._session = None
        return execution

    def run(
        self,
        program: str,
        *,
        timeout: float | None = None,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
    ) -> Execution:
        """Run `execute` from a synchronous function in a thread.

        Raises EpisodeUsageError if called on an event loop, because the call would block the loop.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            work = self.execute(program, timeout=timeout, stdin=stdin, files=files, fetch_files=fetch_files)
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        raise EpisodeUsageError("sandbox.run() would block the event loop: use await sandbox.execute(...)")

    async def fork(self) -> EpisodeSandbox:
        """Return the sandbox of a forked episode, with a copy of the session.

        If the sandbox is full, waits for room as long as `execute` does. Raises UnavailableError if the session cannot
        be copied.
        """
        twin = EpisodeSandbox(self._sandbox, self._settings)
        session = self._session
        if session is not None:
            twin._session = await self._run_within_deadline(lambda: self._sandbox.fork_session(session))
        return twin

    async def close(self) -> None:
        """End the session. May be called more than once."""
        session, self._session = self._session, None
        if session is not None:
            try:
                await self._sandbox.close_session(session)
            except SandboxError as error:
                logger.warning("the interpreter's session could not be closed: %s", error)

    async def _open_session(self) -> str:
        # Several calls of one turn may arrive before the session exists. They must share one session.
        async with self._opening:
            if self._session is None:
                self._session = await self._sandbox.open_session()
            return self._session

    async def _run_within_deadline(self, run: Callable[[], Awaitable[_Result]]) -> _Result:
        settings = self._settings
        try:
            async with asyncio.timeout(settings.sandbox_deadline):
                return await _run_with_retries(run, settings)
        except TimeoutError as error:
            message = f"the sandbox returned no result within sandbox_deadline={settings.sandbox_deadline:g} s"
            raise UnavailableError(message, seconds=settings.sandbox_deadline) from error
        except _InfrastructureError as error:
            message = f"the sandbox failed {settings.sandbox_attempts} times: {error}"
            raise UnavailableError(message, seconds=error.execution.seconds) from error
        except UnknownSessionError as error:
            raise UnavailableError(f"the interpreter's session was lost: {error}") from error
        except SessionForkError as error:
            raise UnavailableError(f"the interpreter's session cannot be forked: {error}") from error
        except SandboxError as error:
            raise UnavailableError(f"the sandbox failed {settings.sandbox_attempts} times: {error}") from error


def tool_call_of_execution(execution: Execution) -> ToolCall:
    """Return the telemetry of a program's execution."""
    return ToolCall(
        outcome=execution.outcome.value,
        seconds=execution.seconds,
        truncated=execution.truncated,
        printed=execution.stdout[-MAX_PRINTED_CHARACTERS:],
        exit_code=execution.exit_code,
    )


def infrastructure_failure_call(seconds: float) -> ToolCall:
    """Return the telemetry of a call that failed for reasons outside the policy."""
    return ToolCall(outcome=Outcome.INFRASTRUCTURE_FAILURE.value, seconds=seconds)


async def _run_with_retries(run: Callable[[], Awaitable[_Result]], settings: ExecutionSettings) -> _Result:
    """Retry ``run`` after sandbox failures, and return the result of the first successful attempt."""
    # Do not use stamina: even without a retry, stamina takes ten times as long as the rest of a turn.
    wait = settings.sandbox_retry_wait
    for attempt in range(settings.sandbox_attempts - 1):
        try:
            return await run()
        except (UnknownSessionError, SessionForkError):
            raise  # a retry can restore neither the variables of the session nor its ability to fork
        except (SandboxError, _InfrastructureError):
            await asyncio.sleep(min(_MAX_RETRY_WAIT, wait * 2**attempt) + random.uniform(0, wait))
    return await run()
