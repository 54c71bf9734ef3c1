"""An event loop in its own thread, for synchronous interfaces to asynchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines from synchronous code, inside or outside another event loop, until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentrl-env-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[object, object, Result]) -> Result:
        """Run a coroutine and return its result or raise its exception; KeyboardInterrupt cancels it."""
        future = self.start(coroutine)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[object, object, Result]) -> Future[Result]:
        """Begin a coroutine. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Stop the loop and end the thread. May be called more than once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
