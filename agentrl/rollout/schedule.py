"""When groups may start, and which finished groups form a batch: pure arithmetic without clocks or tasks.

A batch consists of ``groups`` groups. Each group records the number of batches trained when it was issued; none of its
tokens can be older. It is *due* in the batch by which its oldest token would be ``max_staleness`` batches old.

Admission. A group starts only if fewer than ``(max_staleness + 1) * groups`` groups are issued and not trained. All
issued groups therefore fit into the batches up to the one in which the last of them is due, whatever their length, and
no group is ever dropped.

Overtaking. Groups that finish early may be trained before earlier groups, as long as the remaining ones can still be
trained in time: for every k, at most k batches' worth of them are due within the next k batches. Otherwise the trainer
waits. Taking the earliest finished groups is the best choice (earliest deadline first), so if it violates the
condition, every choice does.

    >>> schedule = Schedule(groups=2, max_staleness=1)
    >>> [schedule.start(index) for index in range(schedule.room())]
    [None, None, None, None]
    >>> schedule.finish(1), schedule.finish(2), schedule.take(2)  # 0 is overtaken, 3 too: both due in the next batch
    (None, None, [1, 2])
    >>> schedule.room(), schedule.train(), schedule.room()
    (0, None, 2)
    >>> schedule.start(4), schedule.finish(4), schedule.finish(3), schedule.take(2)  # 0 is due: wait for it
    (None, None, None, None)
    >>> schedule.finish(0), schedule.take(2)
    (None, [0, 3])
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Cohort:
    """The groups that were issued after the same number of trained batches and are not yet taken."""

    left: int = 0
    finished: int = 0


class Schedule:
    """The groups in progress, in the order of issue.

    Finished groups are counted by cohort. There are at most ``max_staleness + 1`` cohorts, so the cost does not grow
    with the number of groups.
    """

    def __init__(self, *, groups: int, max_staleness: int, in_flight: bool = True, batches: int | None = None) -> None:
        """``groups``: groups per batch. ``batches``: batches to train, if known; no group is issued beyond their needs.

        Without ``in_flight`` no group may start until the previous batch is taken (``rollout.schedule=overlapped``).
        """
        self.groups = groups
        self.max_staleness = max_staleness
        self._in_flight = in_flight
        self._batches = batches
        self._issued: dict[
            int, tuple[int, int]
        ] = {}  # groups not taken: the batches trained at their issue, their number
        self._cohorts: dict[int, _Cohort] = {}  # by the batches trained at their issue, oldest first
        self._finished: set[int] = set()
        self._issues = 0
        self._in_training = False
        self._taken = 0
        self._trained = 0

    @property
    def trained(self) -> int:
        """Batches trained so far."""
        return self._trained

    @property
    def waiting(self) -> int:
        """The number of groups that are finished and not taken."""
        return len(self._finished)

    @property
    def running(self) -> int:
        """The number of groups that are issued and not finished."""
        return len(self._issued) - len(self._finished)

    def room(self, extra: int = 0) -> int:
        """How many groups may be issued now. ``extra``: groups that the current batch needs beyond its share."""
        room = self.groups + extra - len(self._issued)
        if self._in_flight:
            room += (self.max_staleness - self._in_training) * self.groups
        if self._batches is not None:
            room = min(room, (self._batches - self._taken) * self.groups + extra - len(self._issued))
        return max(0, room)

    def start(self, index: int) -> None:
        """Note that a group starts."""
        self._issued[index] = self._trained, self._issues
        self._issues += 1
        self._cohorts.setdefault(self._trained, _Cohort()).left += 1

    def finish(self, index: int) -> None:
        """Note that all trajectories of a group have ended."""
        self._finished.add(index)
        self._cohorts[self._issued[index][0]].finished += 1

    def take(self, count: int, *, more: bool = False) -> list[int] | None:
        """Take the next ``count`` groups to train, in the order of issue; None while the trainer has to wait.

        ``more``: the groups complete the batch taken last, which the filters left too small.
        """
        if len(self._finished) < count or not self._leaves_time(count, self._taken - more):
            return None
        chosen = sorted(self._finished, key=self._issued.__getitem__)[:count]
        for index in chosen:
            issued_at, _ = self._issued.pop(index)
            cohort = self._cohorts[issued_at]
            cohort.left -= 1
            cohort.finished -= 1
            if not cohort.left and issued_at < self._trained:
                del self._cohorts[issued_at]
        self._finished.difference_update(chosen)
        self._in_training = True
        self._taken += not more
        return chosen

    def _leaves_time(self, count: int, batch: int) -> bool:
        """Whether the groups after the earliest ``count`` finished ones can still be trained before they are due."""
        behind = 0
        for issued_at, cohort in self._cohorts.items():
            chosen = min(count, cohort.finished)
            count -= chosen
            rest = cohort.left - chosen
            behind += rest
            if rest and behind > (issued_at + self.max_staleness - batch) * self.groups:
                return False
        return True

    def train(self) -> None:
        """Note that the batch taken last has been trained."""
        self._trained += 1
        self._in_training = False
