"""The place of a rank among the others, as its launcher tells it: torchrun, DeepSpeed's launcher, srun, or a cluster.

All of them set environment variables; Slurm has names of its own, and leaves the meeting point to the batch script.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from agentrl.errors import SettingsError

_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
}
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank of ``world``, one of ``local_world`` on its machine; rank 0 is at ``master``."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    master: tuple[str, int]

    def variables(self) -> dict[str, str]:
        """The environment variables that say so.

        >>> place = RankPlace(rank=3, world=4, local_rank=1, local_world=2, master=("10.0.0.1", 29500))
        >>> place.variables()["LOCAL_RANK"], place.variables()["MASTER_ADDR"]
        ('1', '10.0.0.1')
        """
        host, port = self.master
        counts = {"RANK": self.rank, "WORLD_SIZE": self.world, "LOCAL_RANK": self.local_rank}
        counts |= {"LOCAL_WORLD_SIZE": self.local_world, "MASTER_PORT": port}
        return {"MASTER_ADDR": host} | {name: str(count) for name, count in counts.items()}


def under_a_launcher(kind: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank that a launcher has started; ``kind``: of ``cluster.kind``."""
    return kind == "environment" or (kind == "auto" and "RANK" in environment)


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what srun calls by other names; what is set already stays.

    >>> variables = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "MASTER_PORT": "29500"}
    >>> adopt_slurm(variables)
    >>> variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]
    ('3', '4', '1')
    """
    for name, theirs in _SLURM.items():
        if name not in environment and theirs in environment:
            environment[name] = environment[theirs]


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise SettingsError if a launcher has not told this process its place."""
    lacking = [name for name in _NEEDED if name not in environment]
    if lacking:
        raise SettingsError(
            f"cluster.kind=environment: {', '.join(lacking)} not set: start this command with torchrun, DeepSpeed's "
            "launcher or srun (which leaves MASTER_ADDR and MASTER_PORT to the batch script, docs/cluster.md), or set "
            "cluster.kind=local"
        )


def address_of_rank_zero() -> str:
    """The address at which other ranks and servers reach rank 0: that of MASTER_ADDR."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def ranks_here(world: int) -> int:
    """How many of ``world`` ranks are on this machine."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(told) if told else world


def listen_for_ranks(world: int) -> tuple[socket.socket, tuple[str, int]]:
    """A socket at rank 0 that the other ranks reach, and its address for them.

    It listens at the address of MASTER_ADDR alone, unless only other machines know that address.
    """
    host = address_of_rank_zero()
    try:
        own = socket.gethostbyname(host)
        elsewhere = ipaddress.ip_address(own).is_loopback and ranks_here(world) < world
        door = socket.create_server(("" if elsewhere else own, 0), backlog=2 * world)
    except OSError:
        door = socket.create_server(("", 0), backlog=2 * world)
    return door, (host, door.getsockname()[1])
