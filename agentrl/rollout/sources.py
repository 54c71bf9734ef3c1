"""Sources of a step's groups: rolled out on demand, or ahead of training in the background."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque

from agentrl.errors import WorldError
from agentrl.rollout.driver import Driver, Job
from agentrl.rollout.schedule import Schedule
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.work_queue import RolloutRequest, WorkQueue
from agentrl.trajectory import Group


class RolloutSource(ABC):
    """Supplies a step's groups, one batch at a time: ``take``, possibly ``take`` with ``more``, then ``trained``."""

    def __init__(self, driver: Driver, queue: WorkQueue, settings: RolloutSettings, *, greedy: bool) -> None:
        self._driver = driver
        self._queue = queue
        self._settings = settings
        self._greedy = greedy
        self._samples = settings.group_size + int(greedy)
        self._left: deque[int] = deque()  # samples of the newest request that no player has fetched
        self._step = 0  # of the newest request
        self._one = asyncio.Lock()  # one player at a time fetches a rollout
        self._idle = _Idle()

    @abstractmethod
    async def take(self, count: int, *, step: int, deadline: float, more: bool = False) -> list[Group]:
        """Return ``count`` groups in the order of issue. ``more``: for a batch that the filters left too small.

        ``deadline`` is in seconds of the event loop's clock; after it the call raises WorldError.
        """

    def trained(self) -> None:
        """Note that the batch has been trained."""
        return

    async def settle(self, *, step: int, deadline: float) -> None:
        """Return when the weights may change; raises like :meth:`take`."""
        return

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        return {"time/rollout_idle_s": self._idle.take()}

    async def close(self) -> None:
        """End what runs in the background."""
        return

    @abstractmethod
    async def _admit(self) -> bool:
        """Wait until another group may start. Returns False if no more groups start."""

    @abstractmethod
    def _start(self, request: RolloutRequest) -> int:
        """Note that a group starts. Returns its training step."""

    async def _next(self) -> Job | None:
        """The next rollout. Those of a problem follow its first one when that has measured the prompt."""
        async with self._one:
            if self._left:
                request = await self._queue.newest()
            else:
                if not await self._admit():
                    return None
                request = await self._queue.next()
                self._step = self._start(request)
                self._left.extend(range(self._samples))
            return Job(request=request, sample=self._left.popleft(), step=self._step)


class OnDemandSource(RolloutSource):
    """Plays groups only during a call of :meth:`take` (``rollout.schedule=synchronous``)."""

    async def take(self, count: int, *, step: int, deadline: float, more: bool = False) -> list[Group]:
        played: list[Group] = []
        if not more:
            self._queue.requeue()
        self._left.clear()
        self._wanted, self._taking = count, step
        self._idle.ends()
        try:
            async with (
                asyncio.timeout_at(deadline),
                contextlib.aclosing(
                    self._driver.run_jobs(
                        self._next,
                        group_size=self._settings.group_size,
                        greedy=self._greedy,
                        measure=self._queue.measure,
                        rollouts=count * self._samples,
                    )
                ) as groups,
            ):
                async for group in groups:
                    played.append(group)
        except TimeoutError as error:
            raise _too_late(step, len(played), count, self._settings) from error
        self._idle.begins()
        return sorted(played, key=lambda group: group.index)

    async def _admit(self) -> bool:
        return self._wanted > 0

    def _start(self, request: RolloutRequest) -> int:
        self._wanted -= 1
        return self._taking


class BackgroundSource(RolloutSource):
    """Plays groups in a background task, as far ahead as a :class:`Schedule` allows.

    Used for ``rollout.schedule=overlapped`` and ``asynchronous``. Failures of the task raise in :meth:`take`.
    """

    def __init__(
        self,
        driver: Driver,
        queue: WorkQueue,
        settings: RolloutSettings,
        schedule: Schedule,
        *,
        step: int,
        greedy: bool,
    ) -> None:
        """Starts at training step ``step``. Create it within a running event loop."""
        super().__init__(driver, queue, settings, greedy=greedy)
        self._schedule = schedule
        self._first_step = step
        self._overlapped = settings.schedule == "overlapped"
        self._changed = asyncio.Event()
        self._extra = 0
        self._done: dict[int, Group] = {}
        self._task = asyncio.create_task(self._produce(), name="background-rollouts")
        self._task.add_done_callback(lambda _: self._tell())

    async def _admit(self) -> bool:
        while not self._schedule.room(self._extra):
            await self._changed.wait()
        return True

    def _start(self, request: RolloutRequest) -> int:
        self._schedule.start(request.index)
        self._idle.ends()
        return self._first_step + self._schedule.trained

    async def take(self, count: int, *, step: int, deadline: float, more: bool = False) -> list[Group]:
        self._extra = count if more else 0
        self._tell()
        chosen: list[int] | None = None
        try:
            async with asyncio.timeout_at(deadline):
                while (chosen := self._schedule.take(count, more=more)) is None:
                    await self._wait()
        except TimeoutError as error:
            raise _too_late(step, self._schedule.waiting, count, self._settings) from error
        finally:
            self._extra = 0
        self._tell()  # there is room again
        return [self._done.pop(index) for index in chosen]

    def trained(self) -> None:
        self._schedule.train()
        self._tell()

    async def settle(self, *, step: int, deadline: float) -> None:
        """Overlapped: wait for the current batch, which one version must sample. Asynchronous: return at once."""
        if not self._overlapped:
            return
        try:
            async with asyncio.timeout_at(deadline):
                while self._schedule.running or self._schedule.room():
                    await self._wait()
        except TimeoutError as error:
            raise _too_late(step, self._schedule.waiting, self._schedule.groups, self._settings) from error

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {
            "queue/finished_groups": self._schedule.waiting,
            "queue/running_groups": self._schedule.running,
        }

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _produce(self) -> None:
        playing = self._driver.run_jobs(
            self._next, group_size=self._settings.group_size, greedy=self._greedy, measure=self._queue.measure
        )
        async with contextlib.aclosing(playing) as groups:
            async for group in groups:
                self._done[group.index] = group
                self._schedule.finish(group.index)
                if not self._schedule.running:
                    self._idle.begins()
                self._tell()

    def _tell(self) -> None:
        """Wake all callers of :meth:`_wait`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> None:
        """Return after the next change. Raises the error that ended the rollouts, if any."""
        if self._task.done():
            self._task.result()
            raise RuntimeError("the rollouts ended without an error")
        await self._changed.wait()


class _Idle:
    """Adds up the time during which no group is played."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0

    def begins(self) -> None:
        if self._since is None:
            self._since = asyncio.get_running_loop().time()

    def ends(self) -> None:
        if self._since is not None:
            self._seconds += asyncio.get_running_loop().time() - self._since
            self._since = None

    def take(self) -> float:
        """The seconds since the last call."""
        if self._since is not None:
            self.ends()
            self.begins()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _too_late(step: int, finished: int, wanted: int, settings: RolloutSettings) -> WorldError:
    return WorldError(
        f"step {step}: {finished} of {wanted} groups were rolled out within "
        f"rollout.step_deadline={settings.step_deadline:g} s"
    )
