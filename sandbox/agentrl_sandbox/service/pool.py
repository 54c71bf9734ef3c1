"""A sandbox over any number of runners, with a bounded queue of calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from agentrl_sandbox.bookkeeping import SessionRegistry, SharedRuns
from agentrl_sandbox.call import Call, CallSandbox, FrameError, InvalidCallError
from agentrl_sandbox.service.links import (
    REFUSALS,
    NotSentError,
    RefusedMessage,
    RunnerLink,
    RunnerLinks,
    RunnerLostError,
    SessionMessage,
)
from agentrl_sandbox.types import (
    BusyError,
    ClosedError,
    Execution,
    Isolation,
    QueueFullError,
    SandboxError,
    SessionLimitError,
    UnknownSessionError,
    infrastructure_failure,
)

Waiter = tuple[asyncio.Future[RunnerLink], RunnerLink | None]  # future of the assigned runner; required runner, if any


class RunnerQueue:
    """FIFO queue of calls that wait for a runner. ``links`` returns the connected runners."""

    def __init__(self, links: Callable[[], Iterable[RunnerLink]], *, limit: int, seconds: float) -> None:
        self._links = links
        self._limit = limit
        self._seconds = seconds
        self._waiters: deque[Waiter] = deque()
        self._assigned: dict[RunnerLink, int] = {}  # capacity assigned to waiters that have not sent their requests yet

    def __len__(self) -> int:
        return len(self._waiters)

    async def acquire(self, runner: RunnerLink | None = None) -> RunnerLink:
        """Wait for a runner with capacity. The caller must send its request before it awaits anything else.

        Raises QueueFullError if the queue is full, BusyError if the wait takes too long, and ClosedError after a close.
        """
        if not self._waiters and (link := self._least_busy(runner)) is not None:
            return link
        if len(self) >= self._limit:
            raise QueueFullError(f"{len(self)} calls are waiting; at most {self._limit} may wait")
        future: asyncio.Future[RunnerLink] = asyncio.get_running_loop().create_future()
        waiter = future, runner
        self._waiters.append(waiter)
        self.assign_waiting_calls()
        promised: RunnerLink | None = None
        try:
            async with asyncio.timeout(self._seconds):
                promised = await future
                return promised
        except TimeoutError as error:
            raise BusyError(f"no runner had capacity within {self._seconds:g} s", retry_after=5) from error
        finally:
            if future.cancelled():
                with contextlib.suppress(ValueError):  # `assign_waiting_calls` may have removed it
                    self._waiters.remove(waiter)
            elif future.exception() is None:
                self._release(future.result())
                if promised is None:  # cancelled after a runner was assigned
                    self.assign_waiting_calls()

    def close(self) -> None:
        """Fail all waiting calls with ClosedError."""
        for future, _ in self._waiters:
            if not future.done():
                future.set_exception(ClosedError("the sandbox was closed"))
        self._waiters.clear()

    def assign_waiting_calls(self) -> None:
        """Assign free capacity to the longest-waiting calls. Must be called whenever capacity may have increased."""
        still_waiting: deque[Waiter] = deque()
        while self._waiters:
            future, runner = self._waiters.popleft()
            if future.done():
                continue
            link = runner if runner is not None and runner.disconnected else self._least_busy(runner)
            if link is None:
                still_waiting.append((future, runner))
                if runner is None:
                    break  # no runner has capacity for any later call either
                continue
            self._assigned[link] = self._assigned.get(link, 0) + 1
            future.set_result(link)
        self._waiters.extendleft(reversed(still_waiting))

    def _least_busy(self, runner: RunnerLink | None) -> RunnerLink | None:
        links = self._links() if runner is None else (runner,)
        free = [link for link in links if link.has_room_for(1 + self._assigned.get(link, 0))]
        return min(free, key=lambda link: link.in_flight + self._assigned.get(link, 0), default=None)

    def _release(self, link: RunnerLink) -> None:
        self._assigned[link] -= 1
        if not self._assigned[link]:
            del self._assigned[link]


_T = TypeVar("_T")
_SESSION_SECONDS = 60.0  # seconds to wait for opening, forking or closing a session


class RunnerPool(CallSandbox):
    """Sandbox that sends each program to the runner with the fewest requests in flight. Sessions stay at their runner.

    At most ``queue_limit`` calls wait, each for at most ``queue_seconds``. Runners limit their sessions.
    """

    def __init__(self, directory: Path, *, queue_limit: int, queue_seconds: float) -> None:
        self.registry = RunnerLinks(directory, self._on_change)
        self.queue = RunnerQueue(self.registry.links.values, limit=queue_limit, seconds=queue_seconds)
        self.sessions = SessionRegistry[RunnerLink, str]()
        self._shared_runs = SharedRuns()
        self._background: set[asyncio.Task[object]] = set()
        self._closed = False

    def open(self) -> None:
        self.registry.open()

    async def close(self) -> None:
        self._closed = True
        self.queue.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.registry.close()  # sessions end with the connections to their runners

    @property
    def isolation(self) -> Isolation:
        return self.registry.isolation

    # -- programs -------------------------------------------------------------------------------------------------

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """Queue a program and run it once. If its runner fails, the outcome is an infrastructure failure.

        Equal calls with the same ``request_id`` share one run. Raises BusyError if the queue is full or the wait takes
        too long, UnknownSessionError if the session has ended, ClosedError after ``close``, and InvalidCallError if the
        arguments are invalid.
        """
        if self._closed:
            raise ClosedError("the sandbox was closed")
        if request_id is None:
            return await self._run(call)
        return await self._shared_runs.run_or_join((request_id, call.digest()), lambda: self._run(call))

    async def _run(self, call: Call) -> Execution:
        if call.session is not None:
            return await self._run_in_session(call, call.session)
        while True:
            link = await self.queue.acquire()
            try:
                return await _run_at_runner(link, call)
            except NotSentError:
                continue

    async def _run_in_session(self, call: Call, session: str) -> Execution:
        async with self.sessions.exclusive_use(session) as found:
            link = await self.queue.acquire(runner=found.owner)
            try:
                return await _run_at_runner(link, replace(call, session=found.identifier))
            except (NotSentError, UnknownSessionError) as error:
                raise self.sessions.end_with_error(session, str(error)) from error

    def _on_change(self, link: RunnerLink) -> None:
        if link.disconnected:
            self.sessions.record_end_at_owner(link, link.why_disconnected)
        self.queue.assign_waiting_calls()

    # -- sessions -------------------------------------------------------------------------------------------------

    async def open_session(self) -> str:
        """Open a session at the runner with the fewest sessions; see ``Sandbox``.

        Also raises BusyError if no runner is connected or the runner fails.
        """
        return await self._start_session(self._open())

    async def fork_session(self, session: str) -> str:
        """Fork a session at the same runner; see ``Sandbox``. Also raises BusyError if the runner fails."""
        return await self._start_session(self._fork(session))

    async def close_session(self, session: str) -> None:
        """Close a session; see ``Sandbox``. Also raises BusyError if the runner fails."""
        if self.sessions.has_ended(session):
            return
        found = self.sessions.find(session)
        self.sessions.record_end(session, "it was closed")
        with contextlib.suppress(NotSentError):  # the session ended with its runner
            await asyncio.shield(
                self._start_background_task(_request_session(found.owner, "close_session", found.identifier))
            )

    async def _start_session(self, starting: Coroutine[None, None, str]) -> str:
        """Open or fork a session. If the caller is cancelled, the new session is closed."""
        task = self._start_background_task(starting)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._close_unwanted)
            raise

    async def _open(self) -> str:
        full: SessionLimitError | None = None
        runners = [link for link in self.registry.links.values() if not link.stopping]
        for link in sorted(runners, key=self.sessions.count_at):
            try:
                return self.sessions.add(link, await _request_session(link, "open_session"))
            except SessionLimitError as error:
                full = error
            except NotSentError:
                continue
        raise full or BusyError("no runner is connected")

    async def _fork(self, session: str) -> str:
        async with self.sessions.exclusive_use(session) as found:
            try:
                return self.sessions.add(
                    found.owner, await _request_session(found.owner, "fork_session", found.identifier)
                )
            except (NotSentError, UnknownSessionError) as error:
                raise self.sessions.end_with_error(session, str(error)) from error

    def _close_unwanted(self, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._start_background_task(self._close_quietly(task.result()))

    async def _close_quietly(self, session: str) -> None:
        with contextlib.suppress(SandboxError):  # the session has already ended
            await self.close_session(session)

    def _start_background_task(self, work: Coroutine[None, None, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _request_session(link: RunnerLink, operation: str, name: str | None = None) -> str:
    """Send a session request.

    Raises NotSentError if the runner has exited, BusyError if it fails, and an error of ``REFUSALS`` if it refuses.
    """
    header = {"op": operation} if name is None else {"op": operation, "session": name}
    try:
        answer = await link.request(header, [], timeout=_SESSION_SECONDS)
    except NotSentError:
        raise
    except RunnerLostError as error:
        raise BusyError(f"the runner was lost during a session request: {error}") from error
    if isinstance(answer, SessionMessage):
        return answer.session
    if not isinstance(answer, RefusedMessage):
        raise BusyError("the runner's answer does not match the request")
    if answer.kind in REFUSALS:
        raise REFUSALS[answer.kind](answer.why)
    raise BusyError(f"the runner failed: {answer.why}")


async def _run_at_runner(link: RunnerLink, call: Call) -> Execution:
    """Run a program on a runner.

    Raises NotSentError if the runner has exited, UnknownSessionError if the session has ended, and InvalidCallError if
    the arguments are invalid.
    """
    started = time.monotonic()
    header, blobs = call.frame()
    timeout = call.timeout or link.hello.result().limits.get("timeout", 3600.0)
    try:
        answer = await link.request({"op": "execute", **header}, blobs, timeout=timeout)
    except NotSentError:
        raise
    except RunnerLostError as error:
        return infrastructure_failure(str(error), started)
    except FrameError as error:
        raise InvalidCallError(str(error)) from error
    if isinstance(answer, Execution):
        return answer
    if isinstance(answer, RefusedMessage) and answer.kind == "bad_call":
        raise InvalidCallError(answer.why)
    if isinstance(answer, RefusedMessage) and answer.kind == "unknown_session":
        raise UnknownSessionError(answer.why)
    return infrastructure_failure(
        answer.why if isinstance(answer, RefusedMessage) else "the runner's answer does not match the request", started
    )
