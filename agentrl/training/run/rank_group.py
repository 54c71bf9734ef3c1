"""The running ranks of a training: when one fails or its node is lost, all end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.cluster.processes import NodeLostError, ProcessHandle
from agentrl.training.run.signals import INTERRUPTED

# Seconds for ranks to end by themselves once one has failed, and between looks at all of them.
_LAST_WORDS = 30.0
_LOOK = 0.2


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank has ended. ``code``: its exit code, negative for a signal. ``lost``: what happened to its node."""

    rank: ProcessHandle
    code: int
    lost: str | None = None

    @property
    def killed(self) -> bool:
        return self.code < 0

    def __str__(self) -> str:
        if self.lost is not None:
            return f"training {self.rank.spec.name} is lost: the node {self.lost}"
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
        failed: RankEnd | None = None
        running = list(self._handles)
        while running:
            ends = {place: end for place, one in enumerate(running) if (end := _end_of(one)) is not None}
            running = [one for place, one in enumerate(running) if place not in ends]
            if failed is None and any(end.code for end in ends.values()):
                failed = min(ends.values(), key=lambda end: (end.lost is None, end.code))
                if failed.code != INTERRUPTED:
                    if self._report is not None and not self.asked:
                        self._report(failed)
                    _end_soon(running)
            if running:
                time.sleep(_LOOK)
        return failed


def _end_of(rank: ProcessHandle) -> RankEnd | None:
    try:
        code = rank.wait(0.0)
    except NodeLostError as error:
        return RankEnd(rank=rank, code=-signal.SIGKILL, lost=str(error))
    return None if code is None else RankEnd(rank=rank, code=code)


def _signal(ranks: Sequence[ProcessHandle], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send_signal(number)


def _end_soon(running: Sequence[ProcessHandle]) -> None:
    """Ask the ranks to end, and kill those that have not after a while, in a thread that ends with this process."""
    _signal(running, signal.SIGTERM)
    timer = threading.Timer(_LAST_WORDS, _signal, args=(running, signal.SIGKILL))
    timer.daemon = True
    timer.start()
