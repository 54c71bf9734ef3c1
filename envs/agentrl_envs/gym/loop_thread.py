"""An event loop in its own thread, for synchronous interfaces to asynchronous code."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

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
