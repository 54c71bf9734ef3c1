"""The rollout worker's event loop, for blocking callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import TypeVar

from agentrl_envs.gym.loop_thread import LoopThread, close_loop

_Result = TypeVar("_Result")


class RestingLoop:
    """Runs coroutines in the calling thread and only during a call, so nothing happens while a rank trains."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[object, object, _Result]) -> _Result:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        close_loop(self._loop)


class Loop:
    """Runs coroutines to completion, one at a time."""

    def __init__(self, *, resting: bool) -> None:
        """``resting``: nothing runs between calls; otherwise rollouts go on in a thread during training."""
        self._loop = RestingLoop() if resting else LoopThread()
        self._running: asyncio.Task[object] | None = None
        self._interrupted = False

    def run(self, work: Coroutine[object, object, _Result], *, interruptible: bool) -> _Result:
        """Return the coroutine's result.

        Raises asyncio.CancelledError if it is interruptible and :meth:`interrupt` was called.
        """
        try:
            return self._loop.run(self._noted(work) if interruptible else work)
        except concurrent.futures.CancelledError:  # from a thread
            raise asyncio.CancelledError from None

    def interrupt(self) -> None:
        """Cancel interruptible work, now and in future. Callable from any thread and from signal handlers."""
        self._interrupted = True
        running = self._running
        if running is not None:
            running.get_loop().call_soon_threadsafe(running.cancel)

    def close(self) -> None:
        self._loop.close()

    async def _noted(self, work: Coroutine[object, object, _Result]) -> _Result:
        self._running = task = asyncio.current_task()
        if self._interrupted and task is not None:  # before the assignment
            task.cancel()
        try:
            return await work
        finally:
            self._running = None
