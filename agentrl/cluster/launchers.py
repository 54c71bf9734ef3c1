"""Rank and world size as set by a launcher: torchrun, DeepSpeed's launcher, srun or ``agentrl.cluster``.

All launchers set environment variables. Slurm uses different names, and the batch script sets the address of rank 0.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping

from agentrl.errors import SettingsError

# Maps each of torchrun's variables to the srun variable with the same value.
_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
}
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launcher_variables(
    *, rank: int, world: int, local_rank: int, local_world: int, master: tuple[str, int]
) -> dict[str, str]:
    """Return the environment variables that launchers set for a rank. ``master`` is the address of rank 0.

    >>> launcher_variables(rank=3, world=4, local_rank=1, local_world=2, master=("10.0.0.1", 29500))["MASTER_PORT"]
    '29500'
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def started_by_launcher(kind: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if a launcher started this process as a rank. ``kind`` is the setting ``cluster.kind``."""
    return kind == "environment" or (kind == "auto" and "RANK" in environment)


def set_variables_from_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables from srun's. Variables that are already set keep their values.

    >>> variables = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "MASTER_PORT": "29500"}
    >>> set_variables_from_slurm(variables)
    >>> variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]
    ('3', '4', '1')
    """
    for name, slurm_name in _SLURM.items():
        if name not in environment and slurm_name in environment:
            environment[name] = environment[slurm_name]


def require_launcher_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raise SettingsError if environment variables that a launcher sets are missing."""
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise SettingsError(
            f"missing environment variables for cluster.kind=environment: {', '.join(missing)}; start this command "
            "with torchrun, DeepSpeed's launcher or srun, or set cluster.kind=local (for srun, the batch script must "
            "set MASTER_ADDR and MASTER_PORT, see docs/how-to/cluster.md)"
        )


def address_of_rank_zero() -> str:
    """Return the address at which other ranks and servers reach rank 0: MASTER_ADDR."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def count_local_ranks(world: int) -> int:
    """Return the number of ranks on this machine, among ``world`` ranks."""
    count = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(count) if count else world


def listen_for_ranks(world: int) -> tuple[socket.socket, tuple[str, int]]:
    """Listen on rank 0 for connections from the other ranks. Returns the socket and the address to connect to.

    The socket listens only at the address of MASTER_ADDR. It listens at all addresses if MASTER_ADDR is not an address
    of this machine, or if it is a loopback address although ranks run on other machines.
    """
    host = address_of_rank_zero()
    try:
        address = socket.gethostbyname(host)
        # On other machines, MASTER_ADDR may resolve to an address other than the loopback address of this machine.
        remote_ranks = ipaddress.ip_address(address).is_loopback and count_local_ranks(world) < world
        listener = socket.create_server(("" if remote_ranks else address, 0), backlog=2 * world)
    except OSError:
        listener = socket.create_server(("", 0), backlog=2 * world)
    return listener, (host, listener.getsockname()[1])
