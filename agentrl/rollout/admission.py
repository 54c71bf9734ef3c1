"""The number of trajectories in flight, limited by the engine's KV cache.

A trajectory without room for its next token loses its keys and values and recomputes them later. New trajectories
therefore start only while the running ones have room to grow. ``safe`` trajectories fit at any length. Beyond them:

1. Once ``safe`` trajectories have ended, their mean length tells how many would fit at full length.
2. From there the limit grows by a quarter while the cache stays below ``rollout.kv_high_watermark``, but only half a
   trajectory's duration after the last change: the memory of new trajectories is not visible earlier.
3. Above the watermark, or after a preemption, the limit falls to three quarters of the trajectories in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from statistics import fmean

from agentrl.rollout.engines.base import CacheUse

# Seconds between polls of the engine.
_LOOK = 2.0
_GROWTH = 1.25
_RETREAT = 0.75
# Averages are taken over at least the first number of trajectories, and over the most recent ones up to the second.
_ENOUGH = 8
_REMEMBERED = 512


class Admission:
    """Admits trajectories, first come, first served. ``look`` polls the engine, which may not know (None).

    A task polls while more than the safe number are in flight or any trajectory waits. It ends when all have ended.
    """

    def __init__(
        self, look: Callable[[], Awaitable[CacheUse | None]], *, ceiling: int, longest: int, kv_high_watermark: float
    ) -> None:
        """``ceiling``: ``rollout.concurrency``; ``longest``: most tokens of a trajectory, including its prompt."""
        self._look = look
        self._ceiling = ceiling
        self._longest = longest
        self._kv_high_watermark = kv_high_watermark
        self._safe = 0  # not known yet
        self._limit = 0
        self._last: CacheUse | None = None
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)
        self._lives: deque[float] = deque(maxlen=_REMEMBERED)
        self._changed_at = 0.0  # when the limit changed or the cache was too full
        self._retreated = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watch: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._in_flight = 0
        self._lowest = ceiling
        self._most_used = 0.0
        self._preempted = 0

    async def __aenter__(self) -> None:
        """Return when one more trajectory may run."""
        if self._failure is not None:
            raise self._failure
        if self._waiting or self._in_flight >= self._limit:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            self._attend()
            try:
                await future
            except asyncio.CancelledError:
                if not future.cancelled() and future.exception() is None:
                    self._in_flight -= 1  # admitted and cancelled at the same time
                self._settle()
                raise
        else:
            self._in_flight += 1
            self._attend()

    async def __aexit__(self, *error: object) -> None:
        self._in_flight -= 1
        self._settle()

    def ended(self, tokens: int, seconds: float) -> None:
        """Note that a trajectory of ``tokens`` tokens has ended after ``seconds`` seconds."""
        self._lengths.append(tokens)
        self._lives.append(seconds)

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call; {} if the engine does not report its cache."""
        if self._last is None:
            return {}
        metrics = {
            "rollout/concurrency_limit": self._limit,
            "rollout/concurrency_limit_min": min(self._lowest, self._limit),
            "rollout/kv_use_max": self._most_used,
            "rollout/preemptions": self._preempted,
        }
        self._lowest, self._most_used, self._preempted = self._limit, self._last.used, 0
        return metrics

    # -- inside ---------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Admit the trajectories that fit; stop polling when none is left."""
        while self._waiting and (self._waiting[0].done() or self._in_flight < self._limit):
            future = self._waiting.popleft()
            if not future.done():
                self._in_flight += 1
                future.set_result(None)
        if self._watch is not None and not self._needs_look():
            self._watch.cancel()
            self._watch = None

    def _attend(self) -> None:
        if self._watch is None and self._needs_look():
            self._watch = asyncio.create_task(self._watching(), name="admission")
            self._watch.add_done_callback(self._crashed)

    def _needs_look(self) -> bool:
        waiting = any(not future.done() for future in self._waiting)
        return waiting or (self._safe < self._ceiling and self._in_flight > self._safe)

    async def _watching(self) -> None:
        while True:
            self._take(await self._look())
            self._settle()
            await asyncio.sleep(_LOOK)

    def _crashed(self, watch: asyncio.Task[None]) -> None:
        """Raise a crash of the watch in every trajectory that waits or arrives later."""
        if watch.cancelled() or (failure := watch.exception()) is None:
            return
        self._failure = failure
        for future in self._waiting:
            if not future.done():
                future.set_exception(failure)

    def _take(self, use: CacheUse | None) -> None:
        if use is None:
            if self._last is None:  # the engine may never report
                self._limit = self._ceiling
            return
        before, now = self._last or use, asyncio.get_running_loop().time()
        self._safe = safe_number(use, longest=self._longest, ceiling=self._ceiling)
        limit = self._safe if self._last is None else max(self._limit, self._safe)
        self._last = use
        new = limit
        if use.used > self._kv_high_watermark or use.preemptions > before.preemptions:
            new = max(self._safe, min(limit, int(self._in_flight * _RETREAT)))
            self._retreated, self._changed_at = True, now
        elif self._in_flight >= limit and len(self._lengths) >= max(_ENOUGH, self._safe):
            if now - self._changed_at >= fmean(self._lives) / 2:
                new = min(self._ceiling, max(limit + 1, int(limit * _GROWTH)))
            if not self._retreated:
                new = max(new, min(self._ceiling, int(self._kv_high_watermark * use.tokens / fmean(self._lengths))))
        if new != self._limit:
            self._limit, self._changed_at = new, now
        self._lowest = min(self._lowest, self._limit)
        self._most_used = max(self._most_used, use.used)
        self._preempted += max(0, use.preemptions - before.preemptions)


def safe_number(use: CacheUse, *, longest: int, ceiling: int) -> int:
    """The number of trajectories that fit into the cache at any length; at least 1.

    >>> safe_number(CacheUse(tokens=10_000, used=0.0, preemptions=0), longest=2_000, ceiling=100)
    5
    """
    return max(1, min(ceiling, use.tokens // longest))
