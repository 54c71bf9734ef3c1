"""The headers of messages between client, fork server, zygotes and session inits. ``op`` says which fields one has.

The modules that read them list the operations: ``server``, ``zygote`` and ``sessions.session_init``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class ServerRequest(TypedDict, total=False):
    """From the client to the fork server."""

    op: str
    id: int
    timeout: float
    session: int | None
    fork: int
    echo: bool
    files: Sequence[str]
    fetch: Sequence[str]


class ServerReply(TypedDict, total=False):
    """From the fork server to the client."""

    op: str
    id: int
    session: int
    kind: str
    why: str
    layers: dict[str, int]
    outcome: str
    exit_code: int | None
    seconds: float
    truncated: bool
    files: Sequence[str]


class ZygoteMessage(TypedDict, total=False):
    """Between the fork server and a zygote."""

    op: str
    id: int
    slot: int
    session: int
    cpu: float
    pid: int
    status: int
    why: str


class InitMessage(TypedDict, total=False):
    """Between the fork server and a session init."""

    op: str
    id: int
    pid: int
    error: int
    status: int
    why: str
