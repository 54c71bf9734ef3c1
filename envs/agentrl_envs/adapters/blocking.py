"""Run blocking user code in threads, beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class BlockingCalls:
    """Runs up to ``threads`` blocking calls at once.

    A call that exceeds its deadline continues in its thread and keeps its slot, because Python cannot stop a thread. It
    does not keep the process from exiting.
    """

    def __init__(self, threads: int, *, name: str) -> None:
        self._places = asyncio.Semaphore(threads)
        self._name = name
        self._numbers = itertools.count()

    async def run(self, call: Callable[[], Result], *, deadline: float | None = None) -> Result:
        """Return or raise what ``call`` does. TimeoutError after ``deadline`` seconds, waiting for a slot included."""
        async with asyncio.timeout(deadline):
            await self._places.acquire()
            return await self._started(call)

    def _started(self, call: Callable[[], Result]) -> asyncio.Future[Result]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: BaseException | None) -> None:
            self._places.release()
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001  (it is raised where the call is awaited)
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, result, error)

        # Not a pool of the standard library: Python waits for those threads before it ends.
        threading.Thread(target=work, name=f"{self._name}-{next(self._numbers)}", daemon=True).start()
        return future
