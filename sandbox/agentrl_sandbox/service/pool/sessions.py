"""The sessions of a pool: the runner of each, and whose turn it is. Runners limit their number and age."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from agentrl_sandbox.errors import BusyError, SandboxError, SessionForkError, SessionLimitError, UnknownSessionError
from agentrl_sandbox.service.pool.link import NotSentError, RunnerGoneError, RunnerLink
from agentrl_sandbox.service.pool.messages import RefusedMessage, SessionMessage

_T = TypeVar("_T")
_WORK_SECONDS = 60.0  # for opening, forking and closing a session
_REMEMBERED = 65_536  # names of sessions, live and ended


@dataclass(slots=True)
class PoolSession:
    """One session: its runner, its name there, and whose turn it is."""

    link: RunnerLink
    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PoolSessions:
    """Sessions by name; ``links`` returns the connected runners."""

    def __init__(self, links: Callable[[], Iterable[RunnerLink]]) -> None:
        self._links = links
        self._live: OrderedDict[str, PoolSession] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()  # with why
        self._background: set[asyncio.Task[object]] = set()

    async def close(self) -> None:
        """Stop background work; sessions end with their runners' connections."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        """The number of sessions not known to have ended."""
        return len(self._live)

    async def make(self, like: str | None = None) -> str:
        """Open a session, or fork one. If the caller is cancelled meanwhile, the session is closed again.

        Raises SessionLimitError, SessionForkError, UnknownSessionError and BusyError.
        """
        task = self._in_background(self._open() if like is None else self._fork(like))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._end_unwanted)
            raise

    async def end(self, session: str) -> None:
        """No effect if it has ended. Raises UnknownSessionError, and BusyError if its runner fails."""
        if session in self._ended:
            return
        found = self._find(session)
        self.forget(session, "it was closed")
        with contextlib.suppress(NotSentError):  # it ended with its runner
            await asyncio.shield(self._in_background(_ask(found.link, "close_session", found.name)))

    @asynccontextmanager
    async def turn(self, session: str) -> AsyncIterator[PoolSession]:
        """Wait for exclusive use of a session. Raises UnknownSessionError."""
        async with self._find(session).lock:
            yield self._find(session)  # it may have ended meanwhile

    def forget(self, session: str, why: str) -> None:
        """Record that a session has ended."""
        if self._live.pop(session, None) is not None:
            self._ended[session] = why
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def forget_all_at(self, link: RunnerLink) -> None:
        """A runner's sessions ended with it."""
        for key in [key for key, session in self._live.items() if session.link is link]:
            self.forget(key, link.why_gone)

    def _find(self, session: str) -> PoolSession:
        found = self._live.get(session)
        if found is None:
            raise UnknownSessionError(f"no session {session!r}: {self._ended.get(session, 'it was never opened')}")
        self._live.move_to_end(session)
        return found

    async def _open(self) -> str:
        """Open one at the runner with the fewest sessions that has capacity."""
        here = Counter(id(session.link) for session in self._live.values())
        links = sorted((link for link in self._links() if not link.leaving), key=lambda link: here[id(link)])
        full: SessionLimitError | None = None
        for link in links:
            try:
                return self._add(link, await _ask(link, "open_session"))
            except SessionLimitError as error:
                full = error
            except NotSentError:
                continue
        raise full or BusyError("no runner is connected")

    async def _fork(self, session: str) -> str:
        async with self.turn(session) as found:
            try:
                return self._add(found.link, await _ask(found.link, "fork_session", found.name))
            except (NotSentError, UnknownSessionError) as error:
                self.forget(session, str(error))
                raise UnknownSessionError(f"no session {session!r}: {error}") from error

    def _add(self, link: RunnerLink, name: str) -> str:
        key = secrets.token_urlsafe(16)
        self._live[key] = PoolSession(link=link, name=name)
        if len(self._live) > _REMEMBERED:
            self._live.popitem(last=False)  # ended long ago: no runners hold so many
        return key

    def _end_unwanted(self, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._in_background(self._end_quietly(task.result()))

    async def _end_quietly(self, session: str) -> None:
        with contextlib.suppress(SandboxError):  # it ended by itself
            await self.end(session)

    def _in_background(self, work: Coroutine[None, None, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _ask(link: RunnerLink, operation: str, name: str | None = None) -> str:
    """Raises NotSentError, BusyError if the runner fails, and the error of a refusal."""
    header = {"op": operation} if name is None else {"op": operation, "session": name}
    try:
        answer = await link.request(header, [], timeout=_WORK_SECONDS)
    except NotSentError:
        raise
    except RunnerGoneError as error:
        raise BusyError(f"the runner was lost while it worked on a session: {error}") from error
    if isinstance(answer, SessionMessage):
        return answer.session
    if not isinstance(answer, RefusedMessage):
        raise BusyError("the runner answered another question")
    if answer.kind == "unknown_session":
        raise UnknownSessionError(answer.why)
    if answer.kind == "session_limit":
        raise SessionLimitError(answer.why)
    if answer.kind == "session_fork":
        raise SessionForkError(answer.why)
    raise BusyError(f"the runner failed: {answer.why}")
