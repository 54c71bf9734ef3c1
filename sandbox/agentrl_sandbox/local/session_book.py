"""The client's sessions: where the live ones are, and how the others ended."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from agentrl_sandbox.errors import UnknownSessionError
from agentrl_sandbox.local.fork_server import ForkServerProcess

_REMEMBERED = 4096  # ended sessions whose reason is kept


@dataclass(kw_only=True, slots=True, eq=False)
class LiveSession:
    """A session of a live server. Whoever holds ``turn`` may use it."""

    name: str
    number: int
    server: ForkServerProcess
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionBook:
    """Sessions by the names that callers use."""

    def __init__(self) -> None:
        self._live: dict[str, LiveSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def add(self, number: int, server: ForkServerProcess) -> str:
        """Add an open session and return its name, which cannot be guessed."""
        name = secrets.token_hex(16)
        self._live[name] = LiveSession(name=name, number=number, server=server)
        return name

    def find(self, name: str) -> LiveSession:
        """The live session of that name. Raises UnknownSessionError."""
        session = self._live.get(name)
        if session is None:
            raise _unknown(name, self._ended.get(name, "it was never opened"))
        return session

    def has_ended(self, name: str) -> bool:
        """Whether there was such a session."""
        return name in self._ended

    def end(self, name: str, why: str) -> None:
        """A session has ended; the first reason counts."""
        if self._live.pop(name, None) is None:
            return
        self._ended[name] = why
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def gone(self, name: str, why: str) -> UnknownSessionError:
        """The error for a session that the server no longer has; of several reasons the first counts."""
        self.end(name, why)
        return _unknown(name, self._ended.get(name, why))

    def end_number(self, server: ForkServerProcess, number: int, why: str) -> None:
        """The server says that a session has ended."""
        for session in list(self._live.values()):
            if session.server is server and session.number == number:
                self.end(session.name, why)

    def end_all(self, server: ForkServerProcess, why: str) -> None:
        """A server has ended, and its sessions with it."""
        for session in list(self._live.values()):
            if session.server is server:
                self.end(session.name, why)


def _unknown(name: str, why: str) -> UnknownSessionError:
    """The error that says how a session ended."""
    return UnknownSessionError(f"no session {name!r}: {why}")
