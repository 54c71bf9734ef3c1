"""A tracker's own thread: what it is told waits in a bounded queue, so that it can neither stop nor slow training."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from agentrl.telemetry.trackers.tracker import Tracker
from agentrl_envs.registry import describe_error

_LONGEST_QUEUE = 1000  # messages: the rows and tables of hundreds of steps
_ELSEWHERE = "the run goes on, and its directory has everything"

Message = Callable[[Tracker], object]


class TrackerThread:
    """Opens a tracker and hands it messages in order. ``say`` and ``warn`` print a line and may be called from here.

    Failures and dropped messages are said once, and counted in a last line.
    """

    def __init__(
        self,
        name: str,
        opening: Callable[[], Tracker],
        *,
        say: Callable[[str], object],
        warn: Callable[[str], object],
        longest_queue: int = _LONGEST_QUEUE,
    ) -> None:
        self._name, self._opening, self._say, self._warn = name, opening, say, warn
        self._longest = longest_queue
        self._waiting: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closing = self._over = False
        self._dropped = self._failed = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Queue a message; returns at once. It is dropped if the queue is full, or the tracker could not be opened."""
        with self._changed:
            if self._over:
                return
            full = len(self._waiting) >= self._longest
            if not full:
                self._waiting.append(message)
                self._changed.notify()
            self._dropped += full
            first = full and self._dropped == 1
        if first:
            self._warn(f"tracker {self._name} is too slow: messages are dropped; {_ELSEWHERE}")

    def close(self, deadline: float) -> None:
        """End the thread once the queue is empty, at the latest at ``deadline`` (monotonic)."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            lost, self._over = self._dropped + len(self._waiting), True
            self._waiting.clear()
        if self._thread.is_alive():
            self._warn(f"tracker {self._name} did not end in time: {lost} messages did not reach it")
        elif lost or self._failed:
            self._warn(f"tracker {self._name}: {lost} messages were dropped, {self._failed} failed")

    def _run(self) -> None:
        try:
            tracker = self._opening()
            self._say(f"tracker {self._name}: {tracker.place}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - others' code, which must not end a run
            self._warn(f"tracker {self._name} cannot be opened: {describe_error(error)}; {_ELSEWHERE}")
            with self._changed:
                self._over = True
                self._waiting.clear()
            return
        while (message := self._next()) is not None:
            self._tell(tracker, message)
        self._tell(tracker, lambda opened: opened.close())

    def _next(self) -> Message | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting and not self._over else None

    def _tell(self, tracker: Tracker, message: Message) -> None:
        try:
            message(tracker)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            self._failed += 1
            if self._failed == 1:
                self._warn(f"tracker {self._name} failed: {describe_error(error)}; {_ELSEWHERE}")
