"""Detects whether a server with requests has stopped computing; a slow server is not treated as dead.

A time limit would drop long turns on a busy server and keep short ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from agentrl.rollout.engines.http import ServerCallError, TooSlowError

# Seconds between polls.
_LOOK = 15.0
_NOTHING = -1


class Pulse:
    """Polls one server while it has requests. ``tokens`` returns the number of tokens computed; None if unknown.

    A server that does not report tokens never counts as stalled: its connections break if it dies, and a step's
    rollouts have a deadline of their own. While ``gate`` is closed, the server computes nothing and does not count as
    stalled.
    """

    def __init__(
        self, address: str, tokens: Callable[[], Awaitable[int | None]], gate: asyncio.Event, *, stall_deadline: float
    ) -> None:
        self._address = address
        self._tokens = tokens
        self._gate = gate
        self._stall_deadline = stall_deadline
        self._why = f"computed no token for {stall_deadline:g} s"
        self._limits: set[asyncio.Timeout] = set()
        self._watch: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch the server during a request. Raises TooSlowError when it stalls."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                if self._watch is None:
                    self._watch = asyncio.create_task(self._watching(), name=f"pulse {self._address}")
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            if self._watch is not None and self._watch.done():
                self._watch.result()  # raises if the poll itself has a bug
            raise TooSlowError(f"{self._address} {self._why}") from None
        finally:
            self._limits.discard(limit)
            if not self._limits and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    async def _watching(self) -> None:
        try:
            while True:
                await self._stalled()
                self._end_all()
        except Exception:  # a bug: raise it in every request that relies on the watch
            self._end_all()
            raise

    async def _stalled(self) -> None:
        """Return when no token was computed for ``stall_deadline`` seconds of open gate."""
        loop = asyncio.get_running_loop()
        seen: int | None = _NOTHING
        since = loop.time()
        while seen is None or loop.time() - since < self._stall_deadline:
            await asyncio.sleep(min(_LOOK, self._stall_deadline / 4))
            held = not self._gate.is_set()
            await self._gate.wait()
            told = await self._look(seen)
            if told is None or told != seen or held:
                seen, since = told, loop.time()

    async def _look(self, before: int | None) -> int | None:
        """The number of tokens computed so far; unchanged if the server does not answer."""
        try:
            return await self._tokens()
        except ServerCallError:
            return _NOTHING if before is None else before

    async def close(self) -> None:
        """Stop polling. Running requests are not ended."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def cut(self) -> None:
        """End running requests at once: the server's process has ended, or its machine is lost."""
        self._why = "has ended"
        self._end_all()

    def _end_all(self) -> None:
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)
