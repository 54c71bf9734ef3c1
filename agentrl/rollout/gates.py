"""Gates at which the tasks of trajectories wait: for a responsive event loop, and for turns in rounds."""

from __future__ import annotations

import asyncio
from collections import deque

# Tasks let through in one iteration of the event loop: a few milliseconds of work.
_WIDTH = 16


class FairYield:
    """Lets at most 16 tasks pass in one iteration of the event loop, first come, first served.

    Without it, all work that a batch of completions triggers (decoding, parsing, starting programs) would run in one
    iteration and delay timers, new requests and cancellations. A task that finds the gate free does not wait.
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


class Rounds:
    """A gate before every turn that opens when all ``players`` wait at it, in the order of their request ids.

    A player takes part from its creation until :meth:`leave`. Tools may answer in any order; the requests of a round
    reach the engine together and sorted, so a batch depends on the trajectories alone.
    """

    def __init__(self, players: int) -> None:
        self._players = players
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def wait(self, request_id: str) -> None:
        """Return when every player waits for its next turn."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._look()
        try:
            await future
        finally:
            # Its deadline cancelled it while it waited.
            if self._waiting.get(request_id) is future:
                del self._waiting[request_id]

    def leave(self) -> None:
        """Note that a player has no further turn to take."""
        self._players -= 1
        self._look()

    def _look(self) -> None:
        # Deferred, so that the last player to arrive waits like the others.
        asyncio.get_running_loop().call_soon(self._open_if_complete)

    def _open_if_complete(self) -> None:
        if self._players <= 0 or len(self._waiting) < self._players:
            return
        waiting, self._waiting = self._waiting, {}
        for request_id in sorted(waiting):
            if not waiting[request_id].done():
                waiting[request_id].set_result(None)
