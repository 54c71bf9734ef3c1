"""Run blocking user code in threads, beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

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
        # Not a pool of the standard library: Python waits for those threads before it ends.
        threading.Thread(
            target=_settled,
            args=(call, future, loop, self._places.release),
            name=f"{self._name}-{next(self._numbers)}",
            daemon=True,
        ).start()
        return future


class OwnThread:
    """Runs the blocking calls of one object one after the other, all in the same thread.

    So a library that binds an object to its thread (sqlite3) works, and no two calls race. The thread starts with the
    first call and ends with `close`, or after the call that runs then.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False

    async def run(self, call: Callable[[], Result], *, deadline: float | None = None) -> Result:
        """What ``call`` returns or raises. TimeoutError after ``deadline`` seconds, those of waiting included."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._calls.put(lambda: _settled(call, future, loop))
        async with asyncio.timeout(deadline):
            return await future

    def close(self) -> None:
        """End the thread after the calls that were given before."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class RunsBlocking(Protocol):
    """Where blocking calls run: `BlockingCalls` or `OwnThread`."""

    async def run(self, call: Callable[[], Result], *, deadline: float | None = None) -> Result: ...


def _settled(
    call: Callable[[], Result],
    future: asyncio.Future[Result],
    loop: asyncio.AbstractEventLoop,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Carry out ``call`` in this thread and settle its future in the loop; nobody may wait any more."""
    result, error = None, None
    try:
        result = call()
    except BaseException as raised:  # noqa: BLE001  (it is raised where the call is awaited)
        error = raised

    def settle() -> None:
        then()
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle)
