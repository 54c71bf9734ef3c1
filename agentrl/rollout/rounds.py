"""Turns in rounds, which make a run's batches independent of timing."""

from __future__ import annotations

import asyncio


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
            # Cancelled while waiting, by its deadline.
            if self._waiting.get(request_id) is future:
                del self._waiting[request_id]

    def leave(self) -> None:
        """A player has no further turn to take."""
        self._players -= 1
        self._look()

    def _look(self) -> None:
        # Later, so that the last to arrive waits like the others.
        asyncio.get_running_loop().call_soon(self._open_if_complete)

    def _open_if_complete(self) -> None:
        if self._players <= 0 or len(self._waiting) < self._players:
            return
        waiting, self._waiting = self._waiting, {}
        for request_id in sorted(waiting):
            if not waiting[request_id].done():
                waiting[request_id].set_result(None)
