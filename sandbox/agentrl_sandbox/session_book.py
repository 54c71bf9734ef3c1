"""Sessions by the names that callers use: where the live ones are, whose turn it is, and how the others ended."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl_sandbox.types import UnknownSessionError

_Home = TypeVar("_Home")
_Key = TypeVar("_Key")
_REMEMBERED = 65_536  # live sessions, whose end may have gone unnoticed, and as many ended ones


@dataclass(kw_only=True, slots=True, eq=False)
class BookedSession(Generic[_Home, _Key]):
    """A session at a server or runner, its ``home``, which knows it by ``number``."""

    home: _Home
    number: _Key
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionBook(Generic[_Home, _Key]):
    """The sessions of one client."""

    def __init__(self) -> None:
        self._live: OrderedDict[str, BookedSession[_Home, _Key]] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()  # with why

    def __len__(self) -> int:
        return len(self._live)

    def add(self, home: _Home, number: _Key) -> str:
        """Add an open session and return its name, which cannot be guessed."""
        name = secrets.token_hex(16)
        self._live[name] = BookedSession(home=home, number=number)
        if len(self._live) > _REMEMBERED:
            self._live.popitem(last=False)
        return name

    def homes(self) -> list[_Home]:
        return [session.home for session in self._live.values()]

    def find(self, name: str) -> BookedSession[_Home, _Key]:
        """The live session of that name. Raises UnknownSessionError."""
        session = self._live.get(name)
        if session is None:
            raise self.gone(name, "it was never opened")
        self._live.move_to_end(name)
        return session

    def has_ended(self, name: str) -> bool:
        return name in self._ended

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[BookedSession[_Home, _Key]]:
        """Wait for exclusive use of a session. Raises UnknownSessionError."""
        async with self.find(name).lock:
            yield self.find(name)  # it may have ended meanwhile

    def end(self, name: str, why: str) -> None:
        """A session has ended; the first reason counts."""
        if self._live.pop(name, None) is None:
            return
        self._ended[name] = why
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def end_at(self, home: _Home, why: str, number: _Key | None = None) -> None:
        """The session ``number`` of a server or runner has ended, or all of them."""
        for name, session in list(self._live.items()):
            if session.home is home and number in (None, session.number):
                self.end(name, why)

    def gone(self, name: str, why: str) -> UnknownSessionError:
        """The error for a session that does not exist; of several reasons the first counts."""
        self.end(name, why)
        return UnknownSessionError(f"no session {name!r}: {self._ended.get(name, why)}")
