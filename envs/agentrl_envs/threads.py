"""Threads that run blocking calls for coroutines, and a thread that runs coroutines for blocking code."""

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
"""Seconds by which a call in an object's thread may exceed its deadline before the rollout is excluded."""


class BlockingCallPool:
    """Runs up to ``threads`` blocking calls at once.

    A call that exceeds its deadline continues in its thread and keeps its slot, because Python cannot stop a thread.
    The daemon thread does not prevent the process from exiting.
    """

    def __init__(self, threads: int, *, name: str) -> None:
        self._slots = asyncio.Semaphore(threads)
        self._name = name
        self._numbers = itertools.count()

    async def run(self, call: Callable[[], Result], *, timeout: float | None = None, call_name: str = "") -> Result:
        """Run ``call`` in a thread and return its result or raise its exception.

        Raises TimeoutError after ``timeout`` seconds, including the wait for a slot.
        """
        async with asyncio.timeout(timeout):
            await self._slots.acquire()
            return await self._start_thread(call, call_name or self._name)

    def _start_thread(self, call: Callable[[], Result], what: str) -> asyncio.Future[Result]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        # Do not use ThreadPoolExecutor: Python joins its threads at exit, so a call that never returns blocks the exit.
        threading.Thread(
            target=_run_and_set_result,
            args=(call, future, loop, self._slots.release),
            name=f"{what}-{next(self._numbers)}",
            daemon=True,
        ).start()
        return future


class ObjectThread:
    """Runs the blocking calls of one object sequentially, in one thread.

    As a result, libraries that bind an object to a thread (sqlite3) work, and calls do not race. The thread starts with
    the first call. It ends after `close`, when all earlier calls have returned.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_started = False
        self._current: tuple[str, asyncio.Future[Any]] | None = None  # the running call

    @property
    def overdue_call(self) -> str:
        """Name of the call that is still running after its deadline, or "" if there is none."""
        current = self._current
        return current[0] if current is not None and current[1].cancelled() else ""

    async def run(self, call: Callable[[], Result], *, timeout: float | None = None, call_name: str = "") -> Result:
        """Run ``call`` and return its result or raise its exception. ``call_name`` is used in messages.

        Raises TimeoutError after ``timeout`` seconds, including the wait for earlier calls.
        """
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run_queued_calls, name=self._name, daemon=True).start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def work() -> None:
            self._current = (call_name or self._name, future)
            _run_and_set_result(call, future, loop)
            self._current = None

        self._calls.put(work)
        async with asyncio.timeout(timeout):
            return await future

    async def wait_for_overdue_call(self) -> None:
        """Wait until an overdue call returns. Raises UnavailableError with the call's name after ``STUCK_SECONDS``."""
        late = self.overdue_call
        if not late:
            return
        try:
            await self.run(lambda: None, timeout=STUCK_SECONDS)
        except TimeoutError:
            message = f"{late} still blocks its instance {STUCK_SECONDS:g} s after its deadline"
            raise UnavailableError(message, seconds=STUCK_SECONDS) from None

    def close(self, final_call: Callable[[], object] | None = None) -> None:
        """End the thread after all queued calls and ``final_call``. Exceptions of ``final_call`` are ignored."""
        if final_call is not None:
            self._calls.put(lambda: _call_ignoring_errors(final_call))
        self._calls.put(None)

    def _run_queued_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class BlockingRunner(Protocol):
    """Interface of `BlockingCallPool` and `ObjectThread`."""

    async def run(self, call: Callable[[], Result], *, timeout: float | None = None, call_name: str = "") -> Result: ...


def _call_ignoring_errors(call: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        call()


def _run_and_set_result(
    call: Callable[[], Result],
    future: asyncio.Future[Result],
    loop: asyncio.AbstractEventLoop,
    on_completion: Callable[[], None] = lambda: None,
) -> None:
    """Run ``call`` in this thread, and set the future's result in ``loop`` unless the future was cancelled."""
    result, error = None, None
    try:
        result = call()
    except BaseException as raised:  # noqa: BLE001  (raised again where the call is awaited)
        error = raised

    def complete() -> None:
        on_completion()
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop may be closed by now
        loop.call_soon_threadsafe(complete)


CLOSE_SECONDS = 5.0
"""Seconds that `LoopThread.close` waits for coroutines that block the loop or ignore their cancellation."""

_STANDARD_LIBRARY_PATHS = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_INSTALLED_PACKAGE_PATHS = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))


class LoopThread:
    """An event loop in a separate thread, for synchronous interfaces to asynchronous code.

    Neither coroutines that never end nor calls through ``asyncio.to_thread`` prevent the process from exiting.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_DaemonThreads())
        self._thread = threading.Thread(target=self._run_until_stopped, name="agentrl-env-loop", daemon=True)
        self._closing = False
        self._thread.start()

    def run(self, coroutine: Coroutine[object, object, Result]) -> Result:
        """Run a coroutine, and return its result or raise its exception. KeyboardInterrupt cancels the coroutine."""
        future = self.start(coroutine)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[object, object, Result]) -> Future[Result]:
        """Start a coroutine. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def current_line(self) -> traceback.FrameSummary | None:
        """Return the line that the loop is executing, or None while the loop waits for events.

        Returns the innermost line outside installed libraries if there is one, otherwise the innermost line.
        """
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack: list[traceback.FrameSummary] = traceback.extract_stack(frame) if frame else []
        stack = [at for at in stack if not at.filename.startswith("<") and at.filename != __file__]
        outside = [
            at
            for at in stack
            if at.filename.startswith(_INSTALLED_PACKAGE_PATHS) or not at.filename.startswith(_STANDARD_LIBRARY_PATHS)
        ]
        preferred = [at for at in outside if not at.filename.startswith(_INSTALLED_PACKAGE_PATHS)]
        return next(reversed(preferred or outside), None)

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

    Otherwise the garbage collector reports pending tasks at an arbitrary later time.
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
    """Executor with one daemon thread per call. Python waits for threads of the base class before it exits."""

    def submit(self, call: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        future: Future[Result] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  (raised again where the call is awaited)
                future.set_exception(error)

        threading.Thread(target=work, name="agentrl-env-call", daemon=True).start()
        return future
