"""What training ranks and the rollout worker say to each other over their connections."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from agentrl.errors import WorldError

if TYPE_CHECKING:
    from agentrl.config import Settings


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Rank 0's first message: everything the worker needs. ``key`` authenticates the other ranks."""

    settings: Settings
    policy_path: str
    ranks: int
    host: str
    key: bytes


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call of the method ``name`` of the service."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why there is no answer. ``interrupted``: the run was asked to stop; else it ends with ``exit_code``."""

    message: str
    exit_code: int = 1
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The method's value, or why there is none."""

    value: Any = None
    failure: Failure | None = None


class WorkerLostError(WorldError):
    """The other end of a connection is gone, or did not answer in time."""


def receive(connection: Connection, *, seconds: float, waiting_for: str) -> Any:
    """The next message. Raises WorkerLostError when the other end is gone or ``seconds`` have passed."""
    deadline = time.monotonic() + seconds
    try:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise WorkerLostError(f"waited {seconds:g} s in vain for {waiting_for}")
        return connection.recv()
    except (EOFError, ConnectionError) as error:
        raise WorkerLostError(f"the connection ended while waiting for {waiting_for}") from error
