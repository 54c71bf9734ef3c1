"""Heartbeats of training ranks. They detect stuck ranks, whose processes are alive and therefore close no connection.

A rank's main thread marks its progress in a :class:`Heartbeat`. Another thread sends the latest mark to the rollout
worker once a second, and the worker's :class:`HeartbeatMonitor` finds the rank that is stuck.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from agentrl.cluster.local import THIS_MACHINE

INTERVAL = 1.0
"""Seconds between two heartbeats of a rank, and between two checks by the worker."""

# A micro-batch may take this many times as long as the longest one so far. A process may also go without a heartbeat
# for this many times `cluster.deadline`, because a library that writes a large file can block Python threads.
_TOLERANCE = 10.0
# Seconds without a heartbeat after which a rank's process counts as not responding, and seconds without a check after
# which the worker itself counts as suspended.
_RESPONSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class HeartbeatState:
    """The latest heartbeat of the main thread of a rank on ``node``.

    ``position`` is the number of worker calls, and of marks since the last call. All ranks make the same calls and
    marks, so positions are comparable. ``allowed_seconds`` is the time in seconds until the next mark, unless the rank
    waits for ranks at the same or an earlier position. ``waits_for_worker`` is True if the rank waits only for the
    worker. ``progress_count`` is the number of marks.
    """

    node: str
    position: tuple[int, int]
    activity: str
    allowed_seconds: float
    waits_for_worker: bool = False
    progress_count: int = 0


class Heartbeat:
    """Progress marks of a rank's main thread. Other threads may read :attr:`beat`.

    A mark that shortens the allowance is reported to :attr:`shortened` at once. Otherwise, if the process is stopped
    within the next second, the worker would apply the longer allowance. A step has about ten such marks.

    The allowance of a micro-batch's pass is ``deadline`` or ten times the longest pass so far, whichever is longer.
    Everything else is allowed ``slow`` seconds: transfers, checkpoints, updates, passes in which torch compiles, and
    the whole first step with a pass, which loads kernels and is not measured.

    >>> now = 0.0
    >>> heartbeat = Heartbeat(deadline=60.0, slow=1800.0, clock=lambda: now)
    >>> for now, step in ((0.0, 1), (100.0, 2)):
    ...     heartbeat.mark_step_start(step)
    ...     heartbeat.mark_pass_start()
    >>> heartbeat.beat.allowed_seconds
    1800.0
    >>> now = 107.0  # a pass of the second step took 7 s
    >>> heartbeat.mark_pass_start()
    >>> heartbeat.beat.activity, heartbeat.beat.allowed_seconds
    ('the training of step 2', 70.0)
    """

    def __init__(self, *, deadline: float, slow: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``deadline`` is ``cluster.deadline``, and ``slow`` is ``training.collective_deadline``."""
        self._deadline = deadline
        self._slow = max(deadline, slow)
        self._clock = clock
        self._step = ""
        self._kernels_loaded = False  # True if an earlier step had a pass
        self._had_pass = False
        self._pass_began: float | None = None  # None unless a measured pass is running
        self._longest_pass = 0.0
        self.beat = HeartbeatState(
            node=THIS_MACHINE.node, position=(0, 0), activity="the start", allowed_seconds=self._slow
        )
        self.shortened: Callable[[], None] = lambda: None

    def mark_wait_start(self, waiting_for: str) -> None:
        """Mark the start of a wait for the worker. Call :meth:`repeat_mark` while waiting."""
        self._end_pass()
        calls = self.beat.position[0] + 1
        self._mark((calls, 0), f"waiting for {waiting_for}", self._deadline, waits=True)

    def repeat_mark(self) -> None:
        """Repeat the last mark, as a sign of progress."""
        self.beat = replace(self.beat, progress_count=self.beat.progress_count + 1)

    def mark_work_start(self, activity: str) -> None:
        """Mark the start of work that may take a long time."""
        self._end_pass()
        self._mark(self._next_position(), activity, self._slow)

    def mark_step_start(self, step: int) -> None:
        """Mark the start of a step's training."""
        self._kernels_loaded = self._had_pass
        self._step = f"the training of step {step}"
        self.mark_work_start(self._step)

    def mark_pass_start(self) -> None:
        """Mark the start of a forward or backward pass over a micro-batch."""
        self._end_pass()
        allowed = max(self._deadline, _TOLERANCE * self._longest_pass) if self._longest_pass else self._slow
        self._mark(self._next_position(), self._step, allowed)
        self._pass_began = self._clock() if self._kernels_loaded else None
        self._had_pass = True

    def allow_compilation_time(self, *_: object) -> None:
        """Allow the current work more time and do not measure it. Torch calls this when a compilation starts."""
        self._pass_began = None
        self.beat = replace(
            self.beat,
            allowed_seconds=max(self._slow, self.beat.allowed_seconds),
            progress_count=self.beat.progress_count + 1,
        )

    def mark_passes_end(self) -> None:
        """Mark the end of this rank's passes, before it waits for other ranks' micro-batches and runs the update."""
        self.mark_work_start(f"{self._step}, after its micro-batches")

    def _end_pass(self) -> None:
        if self._pass_began is not None:
            self._longest_pass = max(self._longest_pass, self._clock() - self._pass_began)
            self._pass_began = None

    def _next_position(self) -> tuple[int, int]:
        calls, marks = self.beat.position
        return calls, marks + 1

    def _mark(self, position: tuple[int, int], activity: str, allowed: float, *, waits: bool = False) -> None:
        before = self.beat
        self.beat = HeartbeatState(
            node=THIS_MACHINE.node,
            position=position,
            activity=activity,
            allowed_seconds=allowed,
            waits_for_worker=waits,
            progress_count=before.progress_count + 1,
        )
        if allowed < before.allowed_seconds:
            self.shortened()


@dataclass(frozen=True, kw_only=True)
class _RankHeartbeat:
    """The last heartbeat of a rank."""

    beat: HeartbeatState
    since: float  # time of the mark's first heartbeat
    last: float  # time of the last heartbeat


class HeartbeatMonitor:
    """Detects ranks whose main threads are stuck. The caller passes the time in seconds."""

    def __init__(self, ranks: int, *, deadline: float) -> None:
        """``deadline`` is ``cluster.deadline``."""
        self._ranks = ranks
        self._process_deadline = _TOLERANCE * deadline
        self._states: dict[int, _RankHeartbeat] = {}
        self._checked: float | None = None

    def record_heartbeat(self, rank: int, beat: HeartbeatState, now: float) -> None:
        """Record a heartbeat of a rank. Time during which its process was suspended is not counted."""
        known = self._states.get(rank)
        since = now
        if known is not None and known.beat.progress_count == beat.progress_count:
            gap = now - known.last
            since = known.since + (gap if gap > _RESPONSE_SECONDS else 0.0)
        self._states[rank] = _RankHeartbeat(beat=beat, since=since, last=now)

    def stuck_ranks(self, now: float) -> list[int]:
        """Return the ranks that block the run: the overdue ranks at the earliest position.

        A rank that waits in a collective is not overdue before the ranks that it may wait for. If the processes of some
        of these ranks do not respond, only the ranks of these processes are returned. A single rank that does not
        respond is not blocking: it was suspended, for example with Ctrl-Z.
        """
        if self._checked is not None and now - self._checked > _RESPONSE_SECONDS:
            self._extend_allowances(now - self._checked, now)  # the worker was suspended, perhaps with all ranks
        self._checked = now
        if len(self._states) < self._ranks:
            return []
        overdue = {rank for rank, one in self._states.items() if now > one.since + one.beat.allowed_seconds}
        unresponsive = {rank for rank, one in self._states.items() if now > one.last + self._process_deadline}
        blamed = unresponsive | {rank for rank in overdue if not self._may_wait_for_rank_not_overdue(rank, overdue)}
        found = {rank: self._states[rank] for rank in sorted(blamed)}
        first = min((one.beat.position for one in found.values()), default=None)
        found = {rank: one for rank, one in found.items() if one.beat.position == first}
        not_responding = [rank for rank, one in found.items() if now > one.last + _RESPONSE_SECONDS]
        if not_responding and self._ranks == 1:
            return []
        return not_responding or list(found)

    def describe_stuck_rank(self, rank: int, now: float) -> str:
        """Return a message about a stuck rank."""
        one = self._states[rank]
        text = f"training rank {rank} on {one.beat.node} is stuck: no progress for {now - one.since:.0f} s in "
        text += one.beat.activity
        if now > one.since + one.beat.allowed_seconds:
            text += f", longer than the {one.beat.allowed_seconds:.0f} s allowed (cluster.deadline)"
        if now > one.last + _RESPONSE_SECONDS:
            text += "; its process does not respond, as when it was stopped with SIGSTOP"
        return text

    def _may_wait_for_rank_not_overdue(self, rank: int, overdue: set[int]) -> bool:
        """Return True if a rank may be waiting in a collective for a rank that is not overdue."""
        beat = self._states[rank].beat
        others = (one.beat.position for other, one in self._states.items() if other not in overdue)
        return not beat.waits_for_worker and any(position <= beat.position for position in others)

    def _extend_allowances(self, seconds: float, now: float) -> None:
        for rank, one in self._states.items():
            since, last = min(now, one.since + seconds), min(now, one.last + seconds)
            self._states[rank] = replace(one, since=since, last=last)
