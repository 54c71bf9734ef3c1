"""A bounded queue in front of runners of bounded capacity."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable

from agentrl_sandbox.errors import BusyError, ClosedError, QueueFullError
from agentrl_sandbox.service.pool.link import RunnerLink

Waiter = tuple[asyncio.Future[RunnerLink], RunnerLink | None]  # with the required runner, if any


class Queue:
    """Calls that wait for capacity, first come, first served. ``links`` returns the connected runners."""

    def __init__(self, links: Callable[[], Iterable[RunnerLink]], *, limit: int, seconds: float) -> None:
        self._links = links
        self._limit = limit
        self._seconds = seconds
        self._waiters: deque[Waiter] = deque()
        self._length = 0
        self._promised: dict[RunnerLink, int] = {}  # assigned to a waiter that has not sent its request yet

    @property
    def length(self) -> int:
        return self._length

    def check_room(self, count: int = 1) -> None:
        """Raises QueueFullError unless ``count`` more calls could wait."""
        if self._length + count > self._limit:
            raise QueueFullError(f"{self._length} calls are waiting; at most {self._limit} may wait")

    async def place(self, only: RunnerLink | None = None) -> RunnerLink:
        """Wait for a runner with capacity. The caller must send its request without awaiting anything else first.

        Raises QueueFullError when the queue is full, BusyError when no runner had room for too long, and ClosedError.
        """
        if not self._waiters and (link := self._freest(only)) is not None:
            return link
        self.check_room()
        future: asyncio.Future[RunnerLink] = asyncio.get_running_loop().create_future()
        waiter = future, only
        self._waiters.append(waiter)
        self._length += 1
        self.serve()
        promised: RunnerLink | None = None
        try:
            async with asyncio.timeout(self._seconds):
                promised = await future
                return promised
        except TimeoutError as error:
            raise BusyError(f"no runner had room for {self._seconds:g} s", retry_after=5) from error
        finally:
            self._length -= 1
            if future.cancelled():
                with contextlib.suppress(ValueError):  # `serve` may have removed it
                    self._waiters.remove(waiter)
            elif future.exception() is None:
                self._release(future.result())
                if promised is None:  # cancelled just as its turn came
                    self.serve()

    def close(self) -> None:
        """Fail all waiting calls with ClosedError."""
        for future, _ in self._waiters:
            if not future.done():
                future.set_exception(ClosedError("the sandbox was closed"))
        self._waiters.clear()

    def serve(self) -> None:
        """Assign free capacity to the longest-waiting calls. Call it whenever there may be more capacity."""
        passed: deque[Waiter] = deque()
        while self._waiters:
            future, only = self._waiters.popleft()
            if future.done():
                continue
            link = only if only is not None and only.gone else self._freest(only)
            if link is None:
                passed.append((future, only))
                if only is None:
                    break  # no runner has capacity for any later call either
                continue
            self._promised[link] = self._promised.get(link, 0) + 1
            future.set_result(link)
        self._waiters.extendleft(reversed(passed))

    def _freest(self, only: RunnerLink | None) -> RunnerLink | None:
        links = self._links() if only is None else (only,)
        free = [link for link in links if link.has_room_for(1 + self._promised.get(link, 0))]
        return min(free, key=lambda link: link.in_flight + self._promised.get(link, 0), default=None)

    def _release(self, link: RunnerLink) -> None:
        self._promised[link] -= 1
        if not self._promised[link]:
            del self._promised[link]
