"""Schedule of the groups to start and to train on, and the sources that supply groups.

:class:`GroupSchedule` is pure arithmetic without clocks or tasks. A :class:`RolloutSource` supplies the groups of
a step, either on demand or from rollouts that run ahead of training in the background.

A batch consists of ``groups`` groups. Each group records the number of batches that were completed when the group was
issued. This number limits the age of the group's tokens, because they are sampled later. A group is *due* in the batch
by which its oldest token would be ``max_staleness`` batches old.

Admission. A group starts only if fewer than ``(max_staleness + 1) * groups`` groups are issued and not yet used for
training. All issued groups therefore fit into the batches up to the last batch in which a group is due. This holds for
groups of any length, so no group is ever dropped.

Overtaking. Groups that finish early may be used before earlier groups, as long as the remaining groups can still be
used in time. The condition is that for every k, at most k batches of remaining groups are due within the next k
batches. Otherwise the trainer waits. Taking the earliest finished groups is the best choice (earliest deadline
first). If this choice violates the condition, every choice does.

    >>> schedule = GroupSchedule(groups=2, max_staleness=1)
    >>> [schedule.record_start(index) for index in range(schedule.groups_to_issue())]
    [None, None, None, None]
    >>> schedule.record_finish(1), schedule.record_finish(2)
    (None, None)
    >>> schedule.take_groups(2)  # 0 and 3 are due in the next batch
    [1, 2]
    >>> schedule.groups_to_issue(), schedule.record_trained(), schedule.groups_to_issue()
    (0, None, 2)
    >>> schedule.record_start(4), schedule.record_finish(4), schedule.record_finish(3)
    (None, None, None)
    >>> schedule.take_groups(2)  # 0 is due: wait for it
    >>> schedule.record_finish(0), schedule.take_groups(2)
    (None, [0, 3])
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace

from agentrl.errors import WorldError
from agentrl.rollout.driver import Driver
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.work_queue import WorkQueue
from agentrl.trajectory import Group


@dataclass(slots=True)
class _GroupsOfSameAge:
    """Groups that were issued after the same number of completed batches and are not yet taken."""

    untaken: int = 0
    finished: int = 0


class GroupSchedule:
    """The groups in progress, in the order of issue.

    Finished groups are counted by cohort. There are at most ``max_staleness + 1`` cohorts, so the cost does not grow
    with the number of groups.
    """

    def __init__(
        self, *, groups: int, max_staleness: int, starts_early: bool = True, batches: int | None = None
    ) -> None:
        """Create an empty schedule.

        ``groups``: groups per batch. ``batches``: total number of batches, if known; no group is issued for later
        batches. ``starts_early``: groups may start before the previous batch is taken.
        """
        self.groups = groups
        self.max_staleness = max_staleness
        self._starts_early = starts_early
        self._batches = batches
        self._issued: dict[int, tuple[int, int]] = {}  # not taken: (completed batches when issued, order of issue)
        self._cohorts: dict[int, _GroupsOfSameAge] = {}  # by number of completed batches when issued, oldest first
        self._finished: set[int] = set()
        self._issue_count = 0
        self._in_training = False
        self._taken_batches = 0
        self.trained_batches = 0

    @property
    def finished_groups(self) -> int:
        """The number of groups that are finished and not taken."""
        return len(self._finished)

    @property
    def running_groups(self) -> int:
        """The number of groups that are issued and not finished."""
        return len(self._issued) - len(self._finished)

    def groups_to_issue(self, extra: int = 0) -> int:
        """Return the number of groups that may be issued now. ``extra``: additional groups for the current batch."""
        room = self.groups + extra - len(self._issued)
        if self._starts_early:
            room += (self.max_staleness - self._in_training) * self.groups
        if self._batches is not None:
            room = min(room, (self._batches - self._taken_batches) * self.groups + extra - len(self._issued))
        return max(0, room)

    def record_start(self, index: int) -> None:
        """Record the start of a group."""
        self._issued[index] = self.trained_batches, self._issue_count
        self._issue_count += 1
        self._cohorts.setdefault(self.trained_batches, _GroupsOfSameAge()).untaken += 1

    def record_finish(self, index: int) -> None:
        """Record that all trajectories of a group have ended."""
        self._finished.add(index)
        self._cohorts[self._issued[index][0]].finished += 1

    def take_groups(self, count: int, *, refill: bool = False) -> list[int] | None:
        """Take the next ``count`` groups to train on, in the order of issue. Returns None if the trainer must wait.

        ``refill``: the groups complete the previous batch, which was too small after filtering.
        """
        if len(self._finished) < count or not self._others_stay_fresh_after_taking(count, self._taken_batches - refill):
            return None
        chosen = sorted(self._finished, key=self._issued.__getitem__)[:count]
        for index in chosen:
            issued_at, _ = self._issued.pop(index)
            cohort = self._cohorts[issued_at]
            cohort.untaken -= 1
            cohort.finished -= 1
            if not cohort.untaken and issued_at < self.trained_batches:
                del self._cohorts[issued_at]
        self._finished.difference_update(chosen)
        self._in_training = True
        self._taken_batches += not refill
        return chosen

    def _others_stay_fresh_after_taking(self, count: int, batch: int) -> bool:
        """Return True if the other groups still meet the staleness limit after ``count`` groups are taken."""
        due = 0
        for issued_at, cohort in self._cohorts.items():
            chosen = min(count, cohort.finished)
            count -= chosen
            remaining = cohort.untaken - chosen
            due += remaining
            if remaining and due > (issued_at + self.max_staleness - batch) * self.groups:
                return False
        return True

    def record_trained(self) -> None:
        """Record that training on the last batch taken has finished."""
        self.trained_batches += 1
        self._in_training = False


class RolloutSource(ABC):
    """Supplies a step's groups, one batch at a time.

    For each batch, call :meth:`take_groups`, possibly again with ``refill``, and then :meth:`record_trained`.
    """

    def __init__(self, driver: Driver, queue: WorkQueue, settings: RolloutSettings, *, greedy: bool) -> None:
        self._driver = driver
        self._queue = queue
        self._settings = settings
        self._greedy = greedy
        self._samples_left: deque[int] = deque()  # samples of the newest group that have not started
        self._step = 0  # training step of the newest group
        self._job_lock = asyncio.Lock()  # held by the player that waits for its next rollout
        self._idle_stopwatch = _IdleStopwatch()

    @abstractmethod
    async def take_groups(self, count: int, *, step: int, deadline: float, refill: bool = False) -> list[Group]:
        """Return ``count`` groups in the order of issue. ``refill``: fill a batch that was too small after filtering.

        Raises WorldError after ``deadline``, in seconds of the event loop's clock.
        """

    def record_trained(self) -> None:
        """Record that training on the last batch taken has finished."""
        return

    async def wait_until_weights_may_change(self, *, step: int, deadline: float) -> None:
        """Wait until the weights may change. Raises WorldError after ``deadline``."""
        return

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        return {"time/rollout_idle_s": self._idle_stopwatch.take_idle_seconds()}

    async def close(self) -> None:
        """Stop background rollouts."""
        return

    @abstractmethod
    async def _issue_group(self) -> Group | None:
        """Wait until another group may start, and issue it for its training step. Returns None if no more start."""

    async def _next_job(self) -> tuple[Group, int] | None:
        """Return the next rollout. After a problem's first rollout, wait until the problem's prompt is measured."""
        async with self._job_lock:
            if self._samples_left:
                group = replace(await self._queue.wait_for_newest_prompt_length(), step=self._step)
            else:
                issued = await self._issue_group()
                if issued is None:
                    return None
                group, self._step = issued, issued.step
                self._samples_left.extend(range(group.size + self._greedy))
            return group, self._samples_left.popleft()


class OnDemandSource(RolloutSource):
    """Samples groups only during a call to :meth:`take_groups` (``rollout.schedule=synchronous``)."""

    async def take_groups(self, count: int, *, step: int, deadline: float, refill: bool = False) -> list[Group]:
        played: list[Group] = []
        if not refill:
            self._queue.requeue_untrained()
        self._samples_left.clear()
        self._groups_to_start, self._requested_step = count, step
        rollouts = sum(group.size + self._greedy for group in self._queue.upcoming_groups(count))
        self._idle_stopwatch.stop()
        try:
            async with (
                asyncio.timeout_at(deadline),
                contextlib.aclosing(
                    self._driver.play_jobs(
                        self._next_job,
                        greedy=self._greedy,
                        record_prompt_length=self._queue.record_prompt_length,
                        rollouts=rollouts,
                    )
                ) as groups,
            ):
                async for group in groups:
                    played.append(group)
        except TimeoutError as error:
            raise _deadline_error(step, len(played), count, self._settings) from error
        self._idle_stopwatch.start()
        return sorted(played, key=lambda group: group.index)

    async def _issue_group(self) -> Group | None:
        if not self._groups_to_start:
            return None
        group = await self._queue.issue_next_group()
        self._groups_to_start -= 1
        return replace(group, step=self._requested_step)


class BackgroundSource(RolloutSource):
    """Plays groups in a background task, as far ahead as a :class:`GroupSchedule` allows.

    Used for ``rollout.schedule=overlapped`` and ``asynchronous``. Failures of the task are raised by
    :meth:`take_groups`.
    """

    def __init__(
        self,
        driver: Driver,
        queue: WorkQueue,
        settings: RolloutSettings,
        schedule: GroupSchedule,
        *,
        step: int,
        greedy: bool,
    ) -> None:
        """Start the task at training step ``step``. Requires a running event loop."""
        super().__init__(driver, queue, settings, greedy=greedy)
        self._schedule = schedule
        self._first_step = step
        self._overlapped = settings.schedule == "overlapped"
        self._changed = asyncio.Event()
        self._refill_count = 0
        self._played: dict[int, Group] = {}
        self._task = asyncio.create_task(self._play_groups(), name="background-rollouts")
        self._task.add_done_callback(lambda _: self._wake_waiters())

    async def _issue_group(self) -> Group | None:
        while not self._schedule.groups_to_issue(self._refill_count):
            await self._changed.wait()
        group = await self._queue.issue_next_group()
        self._schedule.record_start(group.index)
        self._idle_stopwatch.stop()
        return replace(group, step=self._first_step + self._schedule.trained_batches)

    async def take_groups(self, count: int, *, step: int, deadline: float, refill: bool = False) -> list[Group]:
        self._refill_count = count if refill else 0
        self._wake_waiters()
        chosen: list[int] | None = None
        try:
            async with asyncio.timeout_at(deadline):
                while (chosen := self._schedule.take_groups(count, refill=refill)) is None:
                    await self._wait_for_change()
        except TimeoutError as error:
            raise _deadline_error(step, self._schedule.finished_groups, count, self._settings) from error
        finally:
            self._refill_count = 0
        self._wake_waiters()  # further groups may start
        return [self._played.pop(index) for index in chosen]

    def record_trained(self) -> None:
        self._schedule.record_trained()
        self._wake_waiters()

    async def wait_until_weights_may_change(self, *, step: int, deadline: float) -> None:
        """With the overlapped schedule, wait until the current batch is sampled, so that one version samples it all."""
        if not self._overlapped:
            return
        try:
            async with asyncio.timeout_at(deadline):
                while self._schedule.running_groups or self._schedule.groups_to_issue():
                    await self._wait_for_change()
        except TimeoutError as error:
            raise _deadline_error(
                step, self._schedule.finished_groups, self._schedule.groups, self._settings
            ) from error

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {
            "queue/finished_groups": self._schedule.finished_groups,
            "queue/running_groups": self._schedule.running_groups,
        }

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _play_groups(self) -> None:
        playing = self._driver.play_jobs(
            self._next_job, greedy=self._greedy, record_prompt_length=self._queue.record_prompt_length
        )
        async with contextlib.aclosing(playing) as groups:
            async for group in groups:
                self._played[group.index] = group
                self._schedule.record_finish(group.index)
                if not self._schedule.running_groups:
                    self._idle_stopwatch.start()
                self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Wake all callers of :meth:`_wait_for_change`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self) -> None:
        """Wait for the next change. Raises the error that ended the rollouts, if any."""
        if self._task.done():
            self._task.result()
            raise RuntimeError("the task that samples in the background ended without an exception")
        await self._changed.wait()


class _IdleStopwatch:
    """Measures the seconds during which no group is being played."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        if self._since is None:
            self._since = asyncio.get_running_loop().time()

    def stop(self) -> None:
        if self._since is not None:
            self._seconds += asyncio.get_running_loop().time() - self._since
            self._since = None

    def take_idle_seconds(self) -> float:
        """Return the idle seconds since the last call."""
        if self._since is not None:
            self.stop()
            self.start()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _deadline_error(step: int, finished: int, needed: int, settings: RolloutSettings) -> WorldError:
    return WorldError(
        f"step {step}: {finished} of {needed} groups finished within rollout.step_deadline={settings.step_deadline:g} s"
    )
