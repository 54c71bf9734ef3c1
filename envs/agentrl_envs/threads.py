"""Run blocking user code in threads, beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from agentrl_envs.episode import UnavailableError

Result = TypeVar("Result")

STUCK_SECONDS = 30.0
"""How long an object's thread may stay in a call whose deadline has passed before its trajectory is given up."""


class BlockingCalls:
    """Runs up to ``threads`` blocking calls at once.

    A call that exceeds its deadline continues in its thread and keeps its slot, because Python cannot stop a thread. It
    does not keep the process from exiting.
    """

    def __init__(self, threads: int, *, name: str) -> None:
        self._places = asyncio.Semaphore(threads)
        self._name = name
        self._numbers = itertools.count()

    async def run(self, call: Callable[[], Result], *, deadline: float | None = None, what: str = "") -> Result:
        """Return or raise what ``call`` does. TimeoutError after ``deadline`` seconds, waiting for a slot included."""
        async with asyncio.timeout(deadline):
            await self._places.acquire()
            return await self._started(call, what or self._name)

    def _started(self, call: Callable[[], Result], what: str) -> asyncio.Future[Result]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        # Not a pool of the standard library: Python waits for those threads before it ends.
        threading.Thread(
            target=_settled,
            args=(call, future, loop, self._places.release),
            name=f"{what}-{next(self._numbers)}",
            daemon=True,
        ).start()
        return future


class ObjectThread:
    """Runs the blocking calls of one object one after the other, all in the same thread.

    So a library that binds an object to its thread (sqlite3) works, and no two calls race. The thread starts with the
    first call and ends with `close`, or after the call that runs then.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False
        self._current: tuple[str, asyncio.Future[Any]] | None = None  # the call that runs

    @property
    def overdue(self) -> str:
        """The name of the call that still runs though nobody waits for it any more; empty if there is none."""
        current = self._current
        return current[0] if current is not None and current[1].cancelled() else ""

    async def run(self, call: Callable[[], Result], *, deadline: float | None = None, what: str = "") -> Result:
        """What ``call`` returns or raises. TimeoutError after ``deadline`` seconds, those of waiting included.

        ``what``: the call's name for messages.
        """
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def work() -> None:
            self._current = (what or self._name, future)
            _settled(call, future, loop)
            self._current = None

        self._calls.put(work)
        async with asyncio.timeout(deadline):
            return await future

    async def recover(self) -> None:
        """Wait for a call that is overdue. Raises `UnavailableError`, which names it, after ``STUCK_SECONDS``."""
        late = self.overdue
        if not late:
            return
        try:
            await self.run(lambda: None, deadline=STUCK_SECONDS)
        except TimeoutError:
            message = f"{late} still blocks its instance {STUCK_SECONDS:g} s after its time was up"
            raise UnavailableError(message, seconds=STUCK_SECONDS) from None

    def close(self, last: Callable[[], object] | None = None) -> None:
        """End the thread after the calls that were given before, and ``last``, whose errors nobody hears of."""
        if last is not None:
            self._calls.put(lambda: _unheard(last))
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class BlockingRunner(Protocol):
    """Where blocking calls run: `BlockingCalls` or `OwnThread`."""

    async def run(self, call: Callable[[], Result], *, deadline: float | None = None, what: str = "") -> Result: ...


def _unheard(call: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        call()


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


CLOSE_SECONDS = 5.0
"""Seconds that `LoopThread.close` waits for coroutines that block the loop or ignore their cancellation."""

_STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))


class LoopThread:
    """Runs coroutines from synchronous code, inside or outside another event loop, until it is closed.

    Coroutines that never end and calls through ``asyncio.to_thread`` do not keep the process from exiting.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_DaemonThreads())
        self._thread = threading.Thread(target=self._run_until_stopped, name="agentrl-env-loop", daemon=True)
        self._closing = False
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

    def line(self) -> traceback.FrameSummary | None:
        """Return the line that the loop executes, or None while the loop waits for events.

        That is the innermost line outside installed libraries or, if there is none, inside one.
        """
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack: list[traceback.FrameSummary] = traceback.extract_stack(frame) if frame else []
        stack = [at for at in stack if not at.filename.startswith("<") and at.filename != __file__]
        outside = [at for at in stack if at.filename.startswith(_INSTALLED) or not at.filename.startswith(_STANDARD)]
        own = [at for at in outside if not at.filename.startswith(_INSTALLED)]
        return next(reversed(own or outside), None)

    def close(self) -> None:
        """Cancel all coroutines, wait for them and end the thread. May be called more than once.

        If a coroutine blocks the loop, the daemon thread ends with the process.
        """
        if not self._closing:
            self._closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)

    def _run_until_stopped(self) -> None:
        self._loop.run_forever()
        close_loop(self._loop)


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks of a stopped loop, wait for them and close the loop.

    A pending task that outlives its loop is reported wherever the garbage collector finds it.
    """
    try:
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


class _DaemonThreads(ThreadPoolExecutor):
    """Executor with one daemon thread per call. Python would wait for the base class's threads before it exits."""

    def submit(self, call: Callable[..., Result], /, *given: Any, **named: Any) -> Future[Result]:
        future: Future[Result] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*given, **named))
            except BaseException as error:  # noqa: BLE001  (raised where the call is awaited)
                future.set_exception(error)

        threading.Thread(target=work, name="agentrl-env-call", daemon=True).start()
        return future
