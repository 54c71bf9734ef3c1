"""What a process finds on its machine: GPUs and free ports."""

from __future__ import annotations

import os
import socket

from agentrl.errors import WorldError

ALL_GPUS = "AGENTRL_GPUS"
"""Environment variable with the GPUs that were visible before training ranks took theirs."""


def visible_gpus(count: int) -> list[str]:
    """The names of this process's ``count`` visible GPUs, or of those visible before a launcher assigned it a share."""
    named = os.environ.get(ALL_GPUS) or os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(place) for place in range(count)]


def free_port(host: str) -> int:
    """A port that is currently free."""
    with socket.socket() as free:
        try:
            free.bind((host, 0))
        except OSError as error:
            raise WorldError(f"no server can listen on {host}: {error.strerror}") from error
        port: int = free.getsockname()[1]
        return port
