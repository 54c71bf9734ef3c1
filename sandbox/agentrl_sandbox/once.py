"""Calls with one key share one run, while it runs and while its result is cached."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from agentrl_sandbox.types import Execution, Outcome

_REMEMBERED_BYTES = 16 << 20  # a minute of small results at 270 calls a second
_OVERHEAD_BYTES = 1024


@dataclass(slots=True)
class _SharedRun:
    task: asyncio.Task[Execution]
    waiters: int = 0


class Once:
    """Runs each key once. Infrastructure failures are not cached, so that a retry can run.

    It caches the latest results, up to ``remembered_bytes`` of output and files.
    """

    def __init__(self, remembered_bytes: int = _REMEMBERED_BYTES) -> None:
        self._limit = remembered_bytes
        self._bytes = 0
        self._running: dict[object, _SharedRun] = {}
        self._tasks: set[asyncio.Task[Execution]] = set()  # including those that nobody waits for
        self._finished: OrderedDict[object, Execution] = OrderedDict()

    async def run(self, key: object, start: Callable[[], Coroutine[None, None, Execution]]) -> Execution:
        """The result of ``start()``, of a running call with this key, or of a cached one.

        Cancelling every call that waits cancels the run.
        """
        if key in self._finished:
            self._finished.move_to_end(key)
            return self._finished[key]
        shared = self._running.get(key)
        if shared is None:
            task = asyncio.get_running_loop().create_task(start())
            shared = self._running[key] = _SharedRun(task=task)
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._on_done(key, done))
        shared.waiters += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiters -= 1
            if shared.waiters == 0 and not shared.task.done():
                shared.task.cancel()
                del self._running[key]

    async def settle(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _on_done(self, key: object, task: asyncio.Task[Execution]) -> None:
        self._tasks.discard(task)
        shared = self._running.get(key)
        if shared is not None and shared.task is task:
            del self._running[key]
        if task.cancelled() or task.exception() is not None:
            return
        if task.result().outcome is Outcome.INFRASTRUCTURE_FAILURE:
            return
        self._finished[key] = task.result()
        self._bytes += _size(task.result())
        while self._bytes > self._limit:
            _, oldest = self._finished.popitem(last=False)
            self._bytes -= _size(oldest)


def _size(execution: Execution) -> int:
    files = sum(map(len, execution.files.values()))
    return _OVERHEAD_BYTES + len(execution.stdout) + len(execution.stderr) + files
