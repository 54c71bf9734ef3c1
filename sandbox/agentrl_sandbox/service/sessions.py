"""Sessions of a pool: which runner each lives at, whose turn it is, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl_sandbox.errors import BusyError, QueueFullError, SandboxError, UnknownSessionError
from agentrl_sandbox.service.link import NotSent, RunnerGone, RunnerLink
from agentrl_sandbox.service.messages import Refused, SessionAnswer
from agentrl_sandbox.service.queue import Queue

_T = TypeVar("_T")
_WORK_SECONDS = 60.0  # for opening, forking and closing a session
_LOOK_SECONDS = 5.0  # between two looks for unused ones


@dataclass(slots=True)
class Session:
    """One session: its runner, and its name there."""

    link: RunnerLink
    name: str
    used: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """At most ``limit`` sessions; one unused for ``seconds`` ends."""

    def __init__(self, queue: Queue, *, limit: int, seconds: float) -> None:
        self._queue = queue
        self._limit = limit
        self._seconds = seconds
        self._known: dict[str, Session] = {}
        self._making = 0
        self._background: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        """Begin to end unused sessions."""
        self._in_background(self._end_unused())

    async def close(self) -> None:
        """Stop; the sessions end with their runners' connections."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._known)

    async def make(self, like: str | None = None) -> str:
        """Open a session, or fork one. If the caller leaves meanwhile, it is ended again.

        Raises QueueFullError, BusyError and UnknownSessionError.
        """
        if len(self._known) + self._making >= self._limit:
            raise QueueFullError(f"{self._limit} sessions are open already; close some", retry_after=5)
        self._making += 1
        task = self._in_background(self._open() if like is None else self._fork(like))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._end_unwanted)
            raise
        finally:
            self._making -= 1

    async def end(self, session: str) -> None:
        """Raises UnknownSessionError, and BusyError where its runner fails to."""
        found = self._find(session)
        self.forget(session)
        with contextlib.suppress(NotSent):  # it ended with its runner
            await asyncio.shield(self._in_background(_ask(found.link, "close_session", found.name)))

    @asynccontextmanager
    async def turn(self, session: str) -> AsyncIterator[Session]:
        """Wait until nobody else uses a session. Raises UnknownSessionError."""
        found = self._find(session)
        async with found.lock:
            self._find(session)  # it may have ended meanwhile
            try:
                yield found
            finally:
                found.used = time.monotonic()

    def forget(self, session: str) -> None:
        """It has ended."""
        self._known.pop(session, None)

    def forget_all_at(self, link: RunnerLink) -> None:
        """A runner's sessions ended with it."""
        for key in [key for key, session in self._known.items() if session.link is link]:
            del self._known[key]

    def _find(self, session: str) -> Session:
        found = self._known.get(session)
        if found is None:
            raise UnknownSessionError(f"no session {session!r}: never opened, closed, or ended with its interpreter")
        found.used = time.monotonic()
        return found

    async def _open(self) -> str:
        while True:
            link = await self._queue.place()
            try:
                return self._add(link, await _ask(link, "open_session"))
            except NotSent:
                continue

    async def _fork(self, session: str) -> str:
        async with self.turn(session) as found:
            try:
                return self._add(found.link, await _ask(found.link, "fork_session", found.name))
            except (NotSent, UnknownSessionError) as error:
                self.forget(session)
                raise UnknownSessionError(f"session {session!r} has ended: {error}") from error

    def _add(self, link: RunnerLink, name: str) -> str:
        key = secrets.token_urlsafe(16)
        self._known[key] = Session(link=link, name=name, used=time.monotonic())
        return key

    def _end_unwanted(self, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._in_background(self._end_quietly(task.result()))

    async def _end_quietly(self, session: str) -> None:
        with contextlib.suppress(SandboxError):  # it ended by itself
            await self.end(session)

    async def _end_unused(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._seconds))
            oldest = time.monotonic() - self._seconds
            for key, session in list(self._known.items()):
                if session.used < oldest and not session.lock.locked():
                    await self._end_quietly(key)

    def _in_background(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _ask(link: RunnerLink, operation: str, name: str | None = None) -> str:
    """Raises NotSent, UnknownSessionError, and BusyError where the runner fails."""
    header = {"op": operation} if name is None else {"op": operation, "session": name}
    try:
        answer = await link.request(header, [], timeout=_WORK_SECONDS)
    except NotSent:
        raise
    except RunnerGone as error:
        raise BusyError(f"the runner was lost while it worked on a session: {error}") from error
    if isinstance(answer, SessionAnswer):
        return answer.session
    if isinstance(answer, Refused) and answer.kind == "unknown_session":
        raise UnknownSessionError(answer.why)
    raise BusyError(f"the runner failed: {answer.why}" if isinstance(answer, Refused) else "a wrong answer")
