"""GPUs and free ports of this machine."""

from __future__ import annotations

import os
import socket

from agentrl.errors import WorldError

ALL_GPUS = "AGENTRL_GPUS"
"""Environment variable with the GPUs that were visible before training ranks were assigned theirs."""


def visible_gpus(count: int) -> list[str]:
    """Return the names of ``count`` visible GPUs: those before a launcher assigned this process a share, if known."""
    named = os.environ.get(ALL_GPUS) or os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(count)]


def free_port(host: str) -> int:
    """Return a port that is currently free. Another process may take it before it is used."""
    with socket.socket() as free:
        try:
            free.bind((host, 0))
        except OSError as error:
            raise WorldError(f"no server can listen on {host}: {error.strerror}") from error
        port: int = free.getsockname()[1]
        return port
