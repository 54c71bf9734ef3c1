"""The sessions of a pool: the runner of each, and whose turn it is. Runners limit their number and age."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import TypeVar

from agentrl_sandbox.errors import BusyError, SandboxError, SessionLimitError, UnknownSessionError
from agentrl_sandbox.service.pool.link import NotSentError, RunnerGoneError, RunnerLink
from agentrl_sandbox.service.pool.messages import REFUSALS, RefusedMessage, SessionMessage
from agentrl_sandbox.session_book import SessionBook

_T = TypeVar("_T")
_WORK_SECONDS = 60.0  # for opening, forking and closing a session


class PoolSessions:
    """Sessions by name; ``links`` returns the connected runners."""

    def __init__(self, links: Callable[[], Iterable[RunnerLink]]) -> None:
        self._links = links
        self._background: set[asyncio.Task[object]] = set()
        self.book = SessionBook[RunnerLink, str]()

    async def close(self) -> None:
        """Stop background work; sessions end with their runners' connections."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        if self.book.has_ended(session):
            return
        found = self.book.find(session)
        self.book.end(session, "it was closed")
        with contextlib.suppress(NotSentError):  # it ended with its runner
            await asyncio.shield(self._in_background(_ask(found.home, "close_session", found.number)))

    async def _open(self) -> str:
        """Open one at the runner with the fewest sessions that has capacity."""
        here = Counter(map(id, self.book.homes()))
        links = sorted((link for link in self._links() if not link.leaving), key=lambda link: here[id(link)])
        full: SessionLimitError | None = None
        for link in links:
            try:
                return self.book.add(link, await _ask(link, "open_session"))
            except SessionLimitError as error:
                full = error
            except NotSentError:
                continue
        raise full or BusyError("no runner is connected")

    async def _fork(self, session: str) -> str:
        async with self.book.turn(session) as found:
            try:
                return self.book.add(found.home, await _ask(found.home, "fork_session", found.number))
            except (NotSentError, UnknownSessionError) as error:
                raise self.book.gone(session, str(error)) from error

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
    if answer.kind in REFUSALS:
        raise REFUSALS[answer.kind](answer.why)
    raise BusyError(f"the runner failed: {answer.why}")
