"""A gate that keeps the event loop responsive when thousands of tasks could go on at once."""

from __future__ import annotations

import asyncio
from collections import deque

# Tasks let through in one iteration of the event loop: a few milliseconds of work.
_WIDTH = 16


class FairYield:
    """Lets at most 16 tasks pass in one iteration of the event loop, first come, first served.

    Without it, all that a batch of completions wakes (decoding, parsing, starting programs) runs in one iteration,
    and timers, new requests and cancellations wait behind it. A task that finds the gate free does not wait.
    """

    def __init__(self) -> None:
        self._queue: deque[asyncio.Future[None]] = deque()
        self._passed = 0
        self._armed = False

    async def wait(self) -> None:
        """Return when it is this task's turn."""
        if self._passed < _WIDTH and not self._queue:
            self._passed += 1
            self._arm()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(future)
        self._arm()
        await future

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._armed = False
        self._passed = 0
        while self._queue and self._passed < _WIDTH:
            future = self._queue.popleft()
            if not future.done():
                future.set_result(None)
                self._passed += 1
        if self._passed:
            self._arm()
