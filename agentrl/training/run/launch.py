"""Start the training ranks of a run, watch them, and end all of them when one has failed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.cluster.devices import ALL_GPUS, visible_gpus
from agentrl.cluster.launchers import RankPlace
from agentrl.cluster.local import LocalCluster
from agentrl.cluster.processes import Bundle, Cluster, Place, ProcessHandle, ProcessSpec
from agentrl.errors import WorldError
from agentrl.training.run.signals import INTERRUPTED, stop_requests

if TYPE_CHECKING:
    from agentrl.config import Settings

RANK_MODULE = "agentrl.training.run.rank"
# Seconds for ranks to end by themselves once one has failed, and between looks at all of them.
_LAST_WORDS = 30.0
_LOOK = 0.2


def launch(settings: Settings, run_path: Path, *, resume: bool) -> int:
    """Run ``training.num_processes`` ranks on the run directory until they end, and return the exit code.

    Raises WorldError if a rank was killed.
    """
    cluster = _cluster()
    try:
        (place,) = cluster.reserve(_bundles(settings))
        ranks = RankGroup(start_ranks(cluster, [place], settings, run_path, resume=resume))
        with stop_requests(ranks.ask, ranks.insist):
            return ranks.end()
    finally:
        cluster.close()


def _cluster() -> Cluster:
    return LocalCluster(visible_gpus(torch.cuda.device_count()) if torch.cuda.is_available() else None)


def _bundles(settings: Settings) -> list[Bundle]:
    count = settings.training.num_processes
    return [Bundle(holds=f"training.num_processes={count}", cpus=count, gpus=count)]


def start_ranks(
    cluster: Cluster, places: Sequence[Place], settings: Settings, run_path: Path, *, resume: bool
) -> list[ProcessHandle]:
    """Start the ranks, equally many in each place; the first place has rank 0."""
    count = settings.training.num_processes
    here = count // len(places)
    master = (places[0].address, cluster.free_port(places[0]))
    started = []
    for number in range(count):
        place = places[number // here]
        own = RankPlace(rank=number, world=count, local_rank=number % here, local_world=here, master=master)
        spec = ProcessSpec(
            role="rank",
            number=number,
            arguments=("-m", RANK_MODULE, str(run_path), *(["--resume"] if resume else [])),
            environment=own.variables() | _devices(place),
        )
        started.append(cluster.start(spec, place))
    return started


def _devices(place: Place) -> dict[str, str]:
    if not place.gpus:
        return {"DS_ACCELERATOR": "cpu"}
    return {ALL_GPUS: ",".join(visible_gpus(torch.cuda.device_count()))}


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How the first rank that failed has ended; ``code``: its exit code, negative for a signal."""

    rank: ProcessHandle
    code: int

    def __str__(self) -> str:
        how = signal.Signals(-self.code).name if self.code < 0 else f"exit code {self.code}"
        return f"training {self.rank.spec.name} on {self.rank.place.node} was ended by {how}"


class RankGroup:
    """Running ranks. When one fails, all end."""

    def __init__(self, handles: Sequence[ProcessHandle]) -> None:
        self._handles = handles
        self._asked = threading.Event()
        self._insisted = threading.Event()

    def ask(self) -> None:
        """Have the ranks stop at the next safe point."""
        self._asked.set()
        self._signal(signal.SIGTERM)

    def insist(self) -> None:
        """End the ranks at once."""
        self._insisted.set()
        self._signal(signal.SIGKILL)

    def end(self) -> int:
        """The exit code of the ranks, once all have ended. Raises WorldError if one was killed, except on request."""
        failed = self._first_failure()
        code = 0 if failed is None else failed.code
        if self._insisted.is_set() or (self._asked.is_set() and code < 0):
            return INTERRUPTED  # forced, or before the ranks could catch the signal
        if failed is not None and code < 0:
            raise WorldError(f"{failed}; continue from the last checkpoint with --resume")
        return code

    def _first_failure(self) -> RankEnd | None:
        failed: RankEnd | None = None
        running = list(self._handles)
        while running:
            ended = {place: code for place, one in enumerate(running) if (code := one.wait(0.0)) is not None}
            worst = [RankEnd(rank=running[place], code=code) for place, code in ended.items() if code]
            if worst and failed is None:
                failed = min(worst, key=lambda end: end.code)
                if failed.code != INTERRUPTED:
                    _end_others([one for place, one in enumerate(running) if place not in ended])
            running = [one for place, one in enumerate(running) if place not in ended]
            if running:
                running[0].wait(_LOOK)
        return failed

    def _signal(self, number: signal.Signals) -> None:
        for one in self._handles:
            one.send_signal(number)


def _end_others(running: Sequence[ProcessHandle]) -> None:
    """Ask the ranks to end, and kill those that do not, in a thread that ends with this process."""
    for one in running:
        one.send_signal(signal.SIGTERM)

    def kill() -> None:
        for one in running:
            if one.wait(0.0) is None:
                one.send_signal(signal.SIGKILL)

    timer = threading.Timer(_LAST_WORDS, kill)
    timer.daemon = True
    timer.start()
