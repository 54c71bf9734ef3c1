"""Groups of ranks under ``training.sequence_parallel``: ranks that share rows, and peers with different rows.

The ranks of a sequence-parallel group split each row. Peers hold the same slice of different rows. With groups of two
on four ranks, the sequence-parallel groups are {0, 1} and {2, 3}, and the peers are {0, 2} and {1, 3}.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch.distributed
from torch.distributed import ProcessGroup

from agentrl.errors import SettingsError
from agentrl.kernels.attention import SequenceParallelGroup
from agentrl.training.settings import TrainingSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class RankGroups:
    """The process groups of this rank. Sums over rows are all-reduced over :attr:`peers`, which have different rows."""

    replica: int  # index of this rank's sequence-parallel group
    replicas: int
    sequence: SequenceParallelGroup | None = None  # the group of this rank; None if every rank has different rows
    peers: ProcessGroup | None = None  # one rank of each sequence-parallel group; None: all ranks

    @property
    def is_first_in_group(self) -> bool:
        """True on the first rank of each sequence-parallel group."""
        return self.sequence is None or self.sequence.rank == 0


def get_rank_groups(training: TrainingSettings) -> RankGroups:
    """Return this rank's process groups. The first call creates the groups and is collective.

    Raises SettingsError if ``training.sequence_parallel`` does not divide the number of ranks.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    size = training.sequence_parallel
    obstacle = reason_ranks_not_groupable(size, ranks=world)
    if obstacle is not None:
        raise SettingsError(obstacle)
    if size == 1:
        return RankGroups(replica=rank, replicas=world)
    every = torch.distributed.group.WORLD
    assert every is not None  # the default group exists, because its size is known
    return _create_groups(every, size, training.collective_deadline)


def reason_ranks_not_groupable(size: int, *, ranks: int) -> str | None:
    """Return the reason why ``ranks`` ranks cannot form sequence-parallel groups of ``size``, or None.

    >>> reason_ranks_not_groupable(2, ranks=3)
    'training.sequence_parallel=2 does not divide the 3 training ranks; valid: 1, 3, or training.num_processes=2 or 4'
    """
    if ranks % size == 0:
        return None
    valid = ", ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
    more = -(-ranks // size) * size
    counts = f"{more}" if more == size else f"{more - size} or {more}"
    noun = "rank" if ranks == 1 else "ranks"
    return (
        f"training.sequence_parallel={size} does not divide the {ranks} training {noun}; valid: {valid}, or "
        f"training.num_processes={counts}"
    )


@cache
def _create_groups(every: ProcessGroup, size: int, deadline: float) -> RankGroups:
    """Create the process groups. Every rank creates every process group, in the same order."""
    rank, world = every.rank(), every.size()
    wait = timedelta(seconds=deadline)
    sequence_groups = [list(range(first, first + size)) for first in range(0, world, size)]
    peer_groups = [list(range(index, world, size)) for index in range(size)]
    sequence, _ = torch.distributed.new_subgroups_by_enumeration(sequence_groups, timeout=wait)
    peers, _ = torch.distributed.new_subgroups_by_enumeration(peer_groups, timeout=wait)
    assert sequence is not None  # every rank is in one group of each kind
    return RankGroups(
        replica=rank // size,
        replicas=world // size,
        sequence=SequenceParallelGroup(rank=rank % size, size=size, group=sequence),
        peers=peers,
    )
