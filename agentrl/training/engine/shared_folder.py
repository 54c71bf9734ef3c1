"""Checks at the start that all ranks see the run's folder: each writes its part of every checkpoint there."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

from agentrl.errors import SettingsError
from agentrl.telemetry.files import world_errors
from agentrl.training.engine.deepspeed_engine import from_rank_zero, gather_from_ranks

# Seconds for a network file system to show a new file on another machine.
_VISIBLE = 10.0


def check_shared_folder(folder: Path, *, rank: int, visible: float = _VISIBLE) -> None:
    """Raise SettingsError on every rank if one of them does not see the files of rank 0. Collective."""

    def write() -> str:
        probe = folder / f".probe-{secrets.token_hex(8)}"
        with world_errors(folder, "write to"):
            probe.touch()
        return probe.name

    name = from_rank_zero(write)
    seen = gather_from_ranks((socket.gethostname(), _appears(folder / name, visible)))
    if rank == 0:
        (folder / name).unlink()
    blind = [f"rank {place} on {host}" for place, (host, found) in enumerate(seen) if not found]
    if blind:
        raise SettingsError(
            f"runs_dir: {', '.join(blind)} cannot see the files that rank 0 on {seen[0][0]} writes to {folder}; give "
            "a folder that all machines share"
        )


def _appears(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
