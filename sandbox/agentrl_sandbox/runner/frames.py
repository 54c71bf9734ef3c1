"""The headers of messages between client, fork server, zygotes and session inits. ``op`` says which fields one has.

The modules that read them list the operations: ``server``, ``zygote`` and ``sessions.session_init``.
"""

from __future__ import annotations

from typing import TypedDict

from agentrl_sandbox.call import CallHeader, ExecutionHeader


class ServerRequest(CallHeader, total=False):
    """From the client to the fork server."""

    op: str
    id: int
    number: int | None
    fork: int


class ServerReply(ExecutionHeader, total=False):
    """From the fork server to the client."""

    number: int
    kind: str
    why: str
    layers: dict[str, int]


class ProcessMessage(TypedDict, total=False):
    """Between the fork server and a zygote or a session init."""

    op: str
    id: int
    slot: int
    session: int
    cpu: float
    pid: int
    status: int
    error: int
    why: str
