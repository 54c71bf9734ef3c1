"""The numbers of ranks that a run may have: with ``cluster.elastic`` fewer after a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cluster.plan import UnplaceableError
from agentrl.cluster.processes import Bundle, Cluster, Place
from agentrl.training.run.rank_group import RankEnd

if TYPE_CHECKING:
    from agentrl.config import Settings


class RunSizes:
    """What a run reserves: all its ranks if it can, otherwise as many as ``cluster.elastic`` allows."""

    def __init__(self, settings: Settings, bundles_of: Callable[[Settings], list[Bundle]], checkpoints: Path) -> None:
        sizes = [settings, *(_smaller(settings) if settings.cluster.elastic else ())]
        self._sizes = [(size, bundles_of(size)) for size in sizes]
        self._largest = self._last = 0
        self._checkpoints = checkpoints
        self._lost: tuple[str, int, str] | None = None

    def reserve(
        self, cluster: Cluster, *, patience: float = 0.0, say: Callable[[str], None]
    ) -> tuple[Settings, list[Place]]:
        """The settings of the largest size that there is room for, and its places.

        Waits ``patience`` seconds for the size of last time, and says so. Raises UnplaceableError without room for any.
        """
        last = self._last = max(self._last, self._largest)
        attempts = [(number, 0.0) for number in range(self._largest, last + 1)]
        attempts += [(last, patience)] if patience else []
        attempts += [(number, 0.0) for number in range(last + 1, len(self._sizes))]
        refused: UnplaceableError | None = None
        for number, seconds in attempts:
            if seconds and refused is not None:
                say(f"{refused}; waiting for at most {seconds:g} s")
            size, bundles = self._sizes[number]
            try:
                places = cluster.reserve(bundles, patience=seconds)
            except UnplaceableError as error:
                refused = error
            else:
                self._last = number
                return size, places
        assert refused is not None
        raise refused

    def learn(self, cluster: Cluster, end: RankEnd) -> None:
        """Give up the place of a rank that failed there before, unless a checkpoint was saved in between."""
        place, slot = end.rank.place, end.rank.spec.number
        lost = (place.address, slot, max((one.name for one in self._checkpoints.glob("step-*")), default=""))
        again, self._lost = lost == self._lost, lost
        if again and end.own_fault and len(self._sizes) > 1:
            cluster.give_up(place, slot % self._ranks_a_node())
            if not place.gpus and self._sizes[0][0].cluster.kind != "ray":  # nothing there is counted
                self._largest = min(self._last + 1, len(self._sizes) - 1)

    def _ranks_a_node(self) -> int:
        size, _ = self._sizes[self._last]
        return size.training.num_processes // size.cluster.nodes


def _smaller(settings: Settings) -> Iterator[Settings]:
    """The settings with fewer ranks, the largest number first."""
    ranks, nodes = settings.training.num_processes, settings.cluster.nodes
    if nodes > 1:
        counts: Sequence[tuple[int, int]] = [(one * ranks // nodes, one) for one in range(nodes - 1, 0, -1)]
    else:
        shared = settings.training.sequence_parallel
        counts = [(fewer, 1) for fewer in range(ranks - shared, 0, -shared)]
    for fewer, there in counts:
        training = settings.training.model_copy(update={"num_processes": fewer})
        cluster = settings.cluster.model_copy(update={"nodes": there})
        yield settings.model_copy(update={"training": training, "cluster": cluster})
