"""The messages between training ranks and the rollout worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from agentrl.errors import WorldError

if TYPE_CHECKING:
    from agentrl.config import Settings


FOLLOWED = 3
"""Exit code of a rank that ended because the rollout worker or another rank is gone or stuck."""
STUCK = 6
"""Exit code of a rank whose main thread was stuck."""

STOP_TIMEOUT = 60.0
"""Seconds for the worker to cancel its rollouts; it waits only for running programs and requests."""

# Seconds between checks of whether to end a wait.
_LOOK = 0.5


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Rank 0's first message, with everything the worker needs. ``key`` authenticates the other ranks."""

    settings: Settings
    policy_path: str
    ranks: int
    key: bytes


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The first message on the connection of another rank.

    ``control``: the connection carries the rank's beats and interrupts to the worker, and :class:`StuckRanks` back.
    """

    rank: int
    control: bool


@dataclass(frozen=True, kw_only=True)
class WorkerRequest:
    """A call of the service's method ``name``. All ranks send it and wait together; ``arguments`` are rank 0's."""

    name: str
    waiting_for: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a call failed. ``interrupted``: the run was asked to stop; otherwise it ends with ``exit_code``.

    ``lost``: because another rank is gone.
    """

    message: str
    exit_code: int = 1
    interrupted: bool = False
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The method's return value, or the reason why it failed."""

    value: object = None
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class StuckRanks:
    """The worker's last message on every rank's control connection, if ``ranks`` are stuck."""

    ranks: list[int]
    message: str


class WorkerLostError(WorldError):
    """The other end of a connection is gone or did not answer in time."""


def receive(
    connection: Connection,
    *,
    seconds: float,
    waiting_for: str,
    stops: threading.Event | None = None,
    stop_timeout: float = STOP_TIMEOUT,
    waits: Callable[[], None] = lambda: None,
) -> Any:
    """Return the next message. Raises WorkerLostError if the other end is gone or ``seconds`` have passed.

    Once ``stops`` is set, the other end must answer within ``stop_timeout`` seconds. ``waits`` is called twice a
    second.
    """
    began = time.monotonic()
    deadline = began + seconds
    stopping = False
    try:
        while not connection.poll(min(_LOOK, max(0.0, deadline - time.monotonic()))):
            waits()
            if stops is not None and stops.is_set() and not stopping:
                stopping, deadline = True, min(deadline, time.monotonic() + stop_timeout)
            if time.monotonic() >= deadline:
                told = f" ({stop_timeout:g} s of them since it was asked to stop)" if stopping else ""
                raise WorkerLostError(
                    f"no answer after {time.monotonic() - began:.0f} s of waiting for {waiting_for}{told}"
                )
        return connection.recv()
    except (EOFError, OSError) as error:
        raise WorkerLostError(f"the connection ended while waiting for {waiting_for}") from error
