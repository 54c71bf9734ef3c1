"""Client-side bookkeeping: runs shared by equal calls, and open sessions."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl_sandbox.types import Execution, Outcome, UnknownSessionError

_CACHE_BYTES = 16 << 20  # bytes: one minute of small results at 270 calls per second
_RESULT_OVERHEAD_BYTES = 1024


@dataclass(slots=True)
class _SharedRun:
    task: asyncio.Task[Execution]
    waiters: int = 0


class SharedRuns:
    """Shares one run between calls with equal keys. Infrastructure failures are not cached, so that a retry can run.

    The latest results are cached, up to ``cache_bytes`` of output and files.
    """

    def __init__(self, cache_bytes: int = _CACHE_BYTES) -> None:
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._running: dict[object, _SharedRun] = {}
        self._tasks: set[asyncio.Task[Execution]] = set()  # including cancelled runs without waiters
        self._finished: OrderedDict[object, Execution] = OrderedDict()

    async def run_or_join(self, key: object, start: Callable[[], Coroutine[None, None, Execution]]) -> Execution:
        """Return the result of ``start()``, or of a running or cached run with this key.

        The run is cancelled when all calls that wait for it are cancelled.
        """
        if key in self._finished:
            self._finished.move_to_end(key)
            return self._finished[key]
        shared = self._running.get(key)
        if shared is None:
            task = asyncio.get_running_loop().create_task(start())
            shared = self._running[key] = _SharedRun(task=task)
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._on_done(key, done))
        shared.waiters += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiters -= 1
            if shared.waiters == 0 and not shared.task.done():
                shared.task.cancel()
                del self._running[key]

    async def wait_until_finished(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _on_done(self, key: object, task: asyncio.Task[Execution]) -> None:
        self._tasks.discard(task)
        shared = self._running.get(key)
        if shared is not None and shared.task is task:
            del self._running[key]
        if task.cancelled() or task.exception() is not None:
            return
        if task.result().outcome is Outcome.INFRASTRUCTURE_FAILURE:
            return
        self._finished[key] = task.result()
        self._cached_bytes += _result_bytes(task.result())
        while self._cached_bytes > self._cache_bytes:
            _, oldest = self._finished.popitem(last=False)
            self._cached_bytes -= _result_bytes(oldest)


def _result_bytes(execution: Execution) -> int:
    files = sum(map(len, execution.files.values()))
    return _RESULT_OVERHEAD_BYTES + len(execution.stdout) + len(execution.stderr) + files


_Owner = TypeVar("_Owner")
_Identifier = TypeVar("_Identifier")
# Maximum number of open sessions, and of ended ones. Open sessions are limited too, because their ends may be missed.
_MAX_SESSIONS = 65_536


@dataclass(kw_only=True, slots=True, eq=False)
class OpenSession(Generic[_Owner, _Identifier]):
    """An open session: its server or runner (``owner``), and its identifier there (``identifier``)."""

    owner: _Owner
    identifier: _Identifier
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionRegistry(Generic[_Owner, _Identifier]):
    """Open and ended sessions of one client, by name."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, OpenSession[_Owner, _Identifier]] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()  # name -> reason

    def __len__(self) -> int:
        return len(self._open)

    def add(self, owner: _Owner, identifier: _Identifier, name: str | None = None) -> str:
        """Add an open session and return its name, by default a new random name that cannot be guessed."""
        name = name or secrets.token_hex(16)
        self._open[name] = OpenSession(owner=owner, identifier=identifier)
        if len(self._open) > _MAX_SESSIONS:
            self._open.popitem(last=False)
        return name

    def count_at(self, owner: _Owner) -> int:
        """Return the number of open sessions of a server or runner."""
        return sum(session.owner is owner for session in self._open.values())

    def find(self, name: str) -> OpenSession[_Owner, _Identifier]:
        """Return the open session with this name. Raises UnknownSessionError if no session has it."""
        session = self._open.get(name)
        if session is None:
            raise self.end_with_error(name, "it was never opened")
        self._open.move_to_end(name)
        return session

    def has_ended(self, name: str) -> bool:
        return name in self._ended

    @asynccontextmanager
    async def exclusive_use(self, name: str) -> AsyncIterator[OpenSession[_Owner, _Identifier]]:
        """Wait for exclusive use of a session. Raises UnknownSessionError if it does not exist or ends meanwhile."""
        async with self.find(name).lock:
            yield self.find(name)  # the session may have ended meanwhile

    def record_end(self, name: str, why: str) -> None:
        """Record that a session has ended. Only the first reason is kept."""
        if self._open.pop(name, None) is None:
            return
        self._ended[name] = why
        if len(self._ended) > _MAX_SESSIONS:
            self._ended.popitem(last=False)

    def record_end_at_owner(self, owner: _Owner, why: str, identifier: _Identifier | None = None) -> None:
        """Record the end of a session at a server or runner, or of all its sessions if ``identifier`` is None."""
        for name, session in list(self._open.items()):
            if session.owner is owner and identifier in (None, session.identifier):
                self.record_end(name, why)

    def end_with_error(self, name: str, why: str) -> UnknownSessionError:
        """End a session and return the error to raise for it. Only the first reason is kept."""
        self.record_end(name, why)
        return UnknownSessionError(f"no session {name!r}: {self._ended.get(name, why)}")
