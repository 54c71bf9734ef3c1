"""Whether a server that has requests still computes: slow is not dead, silent is.

A turn may take an hour on a busy server. To limit its time would drop long turns and keep short ones, so what is
watched is the server: it is stalled where none of its requests got a token for ``stall_deadline`` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from agentrl.rollout.engines.http import ServerCallError, TooSlowError

# Seconds between looks.
_LOOK = 15.0
_NOTHING = -1


class Pulse:
    """Looks at one server while it has requests. ``tokens`` tells how many it has computed; None if it does not tell.

    A server that does not tell is never stalled: its connections break if it dies, and a step's rollouts have a
    deadline of their own. While ``gate`` is closed nothing is computed, and nobody is to blame.
    """

    def __init__(
        self, address: str, tokens: Callable[[], Awaitable[int | None]], gate: asyncio.Event, *, stall_deadline: float
    ) -> None:
        self._address = address
        self._tokens = tokens
        self._gate = gate
        self._stall_deadline = stall_deadline
        self._limits: set[asyncio.Timeout] = set()
        self._watch: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Around a request. Raises TooSlowError when the server is stalled."""
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
                self._watch.result()  # a bug in looking
            raise TooSlowError(f"{self._address} computed no token for {self._stall_deadline:g} s") from None
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
        except Exception:  # a bug: it raises in every request that relied on this
            self._end_all()
            raise

    async def _stalled(self) -> None:
        """Return when no token was computed for ``stall_deadline`` seconds in which some could have been."""
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
        """The tokens computed by now. A server that does not answer shows no sign of life: as before."""
        try:
            return await self._tokens()
        except ServerCallError:
            return _NOTHING if before is None else before

    async def close(self) -> None:
        """End the looking. Requests under way are for others to end."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _end_all(self) -> None:
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)
