"""A sandbox over any number of runners."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from agentrl_sandbox.call import Call, CallSandbox, ImpossibleCallError
from agentrl_sandbox.errors import ClosedError, UnknownSessionError
from agentrl_sandbox.once import Once
from agentrl_sandbox.service.pool.link import NotSentError, RunnerGoneError, RunnerLink
from agentrl_sandbox.service.pool.messages import RefusedMessage
from agentrl_sandbox.service.pool.queue import Queue
from agentrl_sandbox.service.pool.runner_registry import RunnerRegistry
from agentrl_sandbox.service.pool.sessions import PoolSessions
from agentrl_sandbox.types import Execution, Isolation, failed_execution
from agentrl_sandbox.wire import FrameError


class RunnerPool(CallSandbox):
    """Sends each program to the runner with the fewest in flight; a session stays with its runner.

    At most ``queue_limit`` calls wait, each for at most ``queue_seconds``.
    """

    def __init__(self, directory: Path, *, queue_limit: int, queue_seconds: float) -> None:
        self.registry = RunnerRegistry(directory, self._on_change)
        self.queue = Queue(self.registry.links.values, limit=queue_limit, seconds=queue_seconds)
        self.sessions = PoolSessions(self.registry.links.values)
        self._once = Once()
        self._closed = False

    def open(self) -> None:
        self.registry.open()

    async def close(self) -> None:
        self._closed = True
        self.queue.close()
        await self.sessions.close()
        await self.registry.close()

    @property
    def isolation(self) -> Isolation:
        return self.registry.isolation

    def check_room(self, count: int) -> None:
        """Raises QueueFullError unless ``count`` more calls could start or wait."""
        self.queue.check_room(max(0, count - max(0, self.registry.workers - self.registry.running)))

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """Queue a program and run it once. If its runner fails, the outcome is an infrastructure failure.

        Equal calls with one ``request_id`` share a run. Raises BusyError, UnknownSessionError, ClosedError
        and ImpossibleCallError.
        """
        if self._closed:
            raise ClosedError("the sandbox was closed")
        if request_id is None:
            return await self._run(call)
        return await self._once.run((request_id, call.digest()), lambda: self._run(call))

    async def open_session(self) -> str:
        """See ``Sandbox``. Raises BusyError too."""
        return await self.sessions.make()

    async def fork_session(self, session: str) -> str:
        """See ``Sandbox``. The copy lives at the same runner. Raises BusyError too."""
        return await self.sessions.make(like=session)

    async def close_session(self, session: str) -> None:
        """See ``Sandbox``. Raises BusyError too."""
        await self.sessions.end(session)

    async def _run(self, call: Call) -> Execution:
        if call.session is not None:
            return await self._run_in_session(call, call.session)
        while True:
            link = await self.queue.place()
            try:
                return await _run_at(link, call)
            except NotSentError:
                continue

    async def _run_in_session(self, call: Call, session: str) -> Execution:
        async with self.sessions.book.turn(session) as found:
            link = await self.queue.place(only=found.home)
            try:
                return await _run_at(link, replace(call, session=found.number))
            except (NotSentError, UnknownSessionError) as error:
                raise self.sessions.book.gone(session, str(error)) from error

    def _on_change(self, link: RunnerLink) -> None:
        if link.gone:
            self.sessions.book.end_at(link, link.why_gone)
        self.queue.serve()


async def _run_at(link: RunnerLink, call: Call) -> Execution:
    """Raises NotSentError, UnknownSessionError and ImpossibleCallError."""
    started = time.monotonic()
    header, blobs = call.frame()
    timeout = call.timeout or link.hello.result().limits.get("timeout", 3600.0)
    try:
        answer = await link.request({"op": "execute", **header}, blobs, timeout=timeout)
    except NotSentError:
        raise
    except RunnerGoneError as error:
        return failed_execution(str(error), started)
    except FrameError as error:
        raise ImpossibleCallError(str(error)) from error
    if isinstance(answer, Execution):
        return answer
    if isinstance(answer, RefusedMessage) and answer.kind == "bad_call":
        raise ImpossibleCallError(answer.why)
    if isinstance(answer, RefusedMessage) and answer.kind == "unknown_session":
        raise UnknownSessionError(answer.why)
    return failed_execution(
        answer.why if isinstance(answer, RefusedMessage) else "an answer to another question", started
    )
