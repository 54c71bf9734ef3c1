"""The rollout worker's event loop, for blocking callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from agentrl_envs.gym.loop_thread import LoopThread

_Result = TypeVar("_Result")


class Loop(Protocol):
    """Runs coroutines to completion, one at a time."""

    def run(self, work: Coroutine[object, object, _Result], *, interruptible: bool) -> _Result:
        """Return the coroutine's result.

        Raises asyncio.CancelledError if it is interruptible and :meth:`interrupt` was called.
        """

    def interrupt(self) -> None:
        """Cancel interruptible work, now and in future. Callable from any thread and from signal handlers."""

    def close(self) -> None: ...


class RestingLoop:
    """Runs in the calling thread and only during a call, so nothing happens while a rank trains."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._running: asyncio.Task[Any] | None = None
        self._interrupted = False

    def run(self, work: Coroutine[object, object, _Result], *, interruptible: bool) -> _Result:
        task = self._loop.create_task(work)
        if interruptible:
            self._running = task
            if self._interrupted:  # before the assignment
                task.cancel()
        try:
            return self._loop.run_until_complete(task)
        finally:
            self._running = None

    def interrupt(self) -> None:
        self._interrupted = True
        running = self._running
        if running is not None:
            self._loop.call_soon_threadsafe(running.cancel)

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class RunningLoop:
    """Runs continuously in a thread of its own, for rollouts during training."""

    def __init__(self) -> None:
        self._thread = LoopThread()
        self._running: asyncio.Task[Any] | None = None
        self._interrupted = False

    def run(self, work: Coroutine[object, object, _Result], *, interruptible: bool) -> _Result:
        try:
            return self._thread.run(self._noted(work) if interruptible else work)
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError from None

    def interrupt(self) -> None:
        self._interrupted = True
        running = self._running
        if running is not None:
            running.get_loop().call_soon_threadsafe(running.cancel)

    def close(self) -> None:
        self._thread.close()

    async def _noted(self, work: Coroutine[object, object, _Result]) -> _Result:
        self._running = asyncio.current_task()
        if self._interrupted and self._running is not None:  # before the assignment
            self._running.cancel()
        try:
            return await work
        finally:
            self._running = None
