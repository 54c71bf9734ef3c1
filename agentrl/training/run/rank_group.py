"""The running ranks of a training: when one fails or its node is lost, all end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.cluster.processes import NodeLostError, ProcessHandle
from agentrl.errors import OutOfMemoryError, SettingsError
from agentrl.training.run.signals import INTERRUPTED
from agentrl.training.worker.wire import FOLLOWED, STUCK

# Seconds for ranks to end by themselves once one has failed, and once one or the worker is lost, when there is
# nothing left to say; for the cause of a loss to show; and between two looks.
_LAST_WORDS = 30.0
_SPEECHLESS = 5.0
_DOUBT = 3.0
_LOOK = 0.2

CRASHED = 1
"""Exit code of a rank that ended by an error that is not one of ours, such as that of a broken GPU."""
REPORTED = 4
"""Exit code of a rank that ended by an AgentRLError whose own code that is."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank has ended. ``code``: its exit code, negative for a signal. ``lost``: what happened to its node."""

    rank: ProcessHandle
    code: int
    lost: str | None = None

    @property
    def killed(self) -> bool:
        return self.code < 0

    @property
    def own_fault(self) -> bool:
        """Whether it was killed, crashed or was stuck, on a node that is there."""
        return self.lost is None and (self.killed or self.code in (CRASHED, STUCK))

    @property
    def gravity(self) -> int:
        """Of several ends, the gravest is the cause: whoever ends with a peer's connection is not."""
        if self.lost is not None:
            return 3
        if self.killed:
            return 2 if self.code != -signal.SIGTERM else 0
        if self.code in (STUCK, OutOfMemoryError.exit_code, SettingsError.exit_code):
            return 2  # the other ranks crash when this one closes its connections
        return 0 if self.code == FOLLOWED else 1

    def __str__(self) -> str:
        if self.lost is not None:
            return f"training {self.rank.spec.name} is lost: {self.lost}"
        if self.code == FOLLOWED:
            return f"training {self.rank.spec.name} on {self.rank.place.node} has lost the rollout worker"
        if self.code == STUCK:
            return f"training {self.rank.spec.name} on {self.rank.place.node} was stuck"
        if self.code == OutOfMemoryError.exit_code:
            return f"training {self.rank.spec.name} on {self.rank.place.node} ran out of memory"
        if self.code == REPORTED:
            return f"training {self.rank.spec.name} on {self.rank.place.node} ended with an error"
        how = f"was ended by {signal.Signals(-self.code).name}" if self.killed else f"ended with exit code {self.code}"
        return f"training {self.rank.spec.name} on {self.rank.place.node} {how}"


class RankGroup:
    """Running ranks."""

    def __init__(self, handles: Sequence[ProcessHandle], report: Callable[[RankEnd], None] | None = None) -> None:
        """``report`` learns of the first failure at once; the other ranks take a while to end."""
        self._handles = handles
        self._report = report
        self._asked = threading.Event()
        self._insisted = threading.Event()
        self._killing = threading.Event()
        self._ending = False
        self._cause: RankEnd | None = None
        self._told: RankEnd | None = None
        self._found = 0.0

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def insisted(self) -> bool:
        return self._insisted.is_set()

    def ask(self) -> None:
        """Have the ranks stop at the next safe point."""
        self._asked.set()
        _signal(self._handles, signal.SIGTERM)

    def insist(self) -> None:
        """End the ranks at once."""
        self._insisted.set()
        _signal(self._handles, signal.SIGKILL)

    def end(self) -> RankEnd | None:
        """Return when all ranks have ended: how the first one failed, or None if none did."""
        running = list(self._handles)
        while running:
            ends = {place: end for place, one in enumerate(running) if (end := _end_of(one)) is not None}
            running = [one for place, one in enumerate(running) if place not in ends]
            for end in ends.values():
                self._judge(end)
            if self._cause is not None and self._cause.code != INTERRUPTED:
                self._tell(self._cause, at_once=not running)
                if not self._ending:
                    self._ending = True
                    self._end_soon(running, _LAST_WORDS if self._cause.gravity == 1 else _SPEECHLESS)
            if running:
                time.sleep(_LOOK)
        return self._cause

    def _judge(self, end: RankEnd) -> None:
        if self._killing.is_set() and end.lost is None:
            return  # it was killed here
        if end.code and (self._cause is None or end.gravity > self._cause.gravity):
            self._cause = end
            self._found = time.monotonic()

    def _tell(self, cause: RankEnd, *, at_once: bool) -> None:
        """Report the cause once; one that only follows from another has a while to turn out so."""
        sure = at_once or cause.gravity > 0 or time.monotonic() > self._found + _DOUBT
        if sure and cause is not self._told and not self.asked:
            self._told = cause
            if self._report is not None:
                self._report(cause)

    def _end_soon(self, running: Sequence[ProcessHandle], seconds: float) -> None:
        """Ask the ranks to end, and kill those that have not after a while, in a thread that ends with this process."""

        def kill() -> None:
            self._killing.set()
            _signal(running, signal.SIGKILL)

        _signal(running, signal.SIGTERM)
        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()


def _end_of(rank: ProcessHandle) -> RankEnd | None:
    try:
        code = rank.wait(0.0)
    except NodeLostError as error:
        return RankEnd(rank=rank, code=-signal.SIGKILL, lost=str(error))
    return None if code is None else RankEnd(rank=rank, code=code)


def _signal(ranks: Sequence[ProcessHandle], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send_signal(number)
