"""OpenEnv's wire: JSON messages over one WebSocket for each session, and the schemas of a server.

The messages are those of OpenEnv 0.10: ``reset`` and ``step`` are answered by ``observation`` or ``error``, and
``close`` ends the session. A server that has no session left says so in its first message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentrl_envs.episode import EnvironmentContractError, UnavailableError
from agentrl_envs.registry import PluginError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_FULL = "CAPACITY_REACHED"
_NO_SESSION = frozenset({"FACTORY_ERROR", "SESSION_ERROR"})
_LONGEST_MESSAGE = 64 * 2**20
_CLOSING = 5.0  # seconds for the end of a session
_SCHEMA_DEADLINE = 30.0
# Seconds until a full server is asked again, if none of our sessions ends before.
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a reset or a step showed."""

    observation: Mapping[str, object]
    reward: float
    done: bool


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The server's error. ``sessions``: how many it allows, where it is full."""

    code: str
    message: str
    sessions: int | None = None


class OpenEnvSession:
    """One session: its messages are answered one after the other."""

    def __init__(self, socket: ClientConnection, *, url: str, deadline: float) -> None:
        self._socket = socket
        self._url = url
        self._deadline = deadline

    async def ask(self, kind: str, data: Mapping[str, object]) -> Observed | Refused:
        """The answer to a message. Raises UnavailableError if the server is gone, takes too long, or has failed."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self._deadline):
                with contextlib.suppress(ConnectionClosed):  # why it was closed may still be read
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                text = await self._socket.recv()
        except TimeoutError:
            said = f"gave no answer to {kind} within {self._deadline:g} s (environment.call_deadline)"
            raise UnavailableError(f"OpenEnv server {self._url} {said}", seconds=self._deadline) from None
        except (ConnectionClosed, OSError) as error:
            raise UnavailableError(f"OpenEnv server {self._url} ended the session: {error}") from error
        reply = _read(text, self._url)
        if isinstance(reply, Refused) and reply.code in _NO_SESSION:
            raise UnavailableError(f"OpenEnv server {self._url}: {reply.code}: {reply.message}")
        return reply

    async def close(self) -> None:
        """End the session and wait until the server has."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed, OSError, TimeoutError):
            async with asyncio.timeout(_CLOSING):
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.wait_closed()
        await self._socket.close()


class OpenEnvServer:
    """A server, and the line of those who wait for one of its sessions."""

    def __init__(self, url: str, *, deadline: float) -> None:
        """``url``: with or without a scheme. Raises PluginError if it is no address."""
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._parts = urlsplit(self.url)
        if self._parts.scheme not in ("http", "https", "ws", "wss") or not self._parts.hostname:
            raise PluginError(f"environment openenv:{url}: write openenv:http://HOST:PORT")
        self._deadline = deadline
        self._proxied = self._parts.hostname not in _HERE
        self._most: int | None = None  # sessions, once the server has said it
        self._held = 0
        self._ended = asyncio.Event()

    async def schemas(self) -> Mapping[str, object]:
        """The JSON schemas of actions and observations. Raises UnavailableError and PluginError."""
        scheme = "https" if self._parts.scheme in ("https", "wss") else "http"
        address = self._parts._replace(scheme=scheme).geturl() + "/schema"
        try:
            text = await asyncio.to_thread(_fetch, address, proxied=self._proxied)
            found = json.loads(text)
        except urllib.error.HTTPError as error:
            raise PluginError(f"{self.url} is no OpenEnv server: {address} answered {error.code}") from None
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UnavailableError(f"OpenEnv server {self.url} cannot be reached: {reason}") from error
        except ValueError as error:
            raise PluginError(f"{self.url} is no OpenEnv server: {address} is not JSON") from error
        if not isinstance(found, dict):
            raise PluginError(f"{self.url} is no OpenEnv server: {address} is no JSON object")
        return found

    async def begin(self, reset: Mapping[str, object]) -> tuple[OpenEnvSession, Observed | Refused]:
        """A session and its answer to ``reset``, once the server has one to give. `end` must follow."""
        wait = _FIRST_WAIT
        while True:
            while self._most is not None and self._held >= self._most:
                self._ended.clear()
                await self._ended.wait()
            self._held += 1
            session, reply = await self._try(reset)
            if session is not None:
                return session, reply
            assert isinstance(reply, Refused)
            self._full(reply)
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), wait)
            wait = min(_LONGEST_WAIT, 1.5 * wait)

    async def end(self, session: OpenEnvSession) -> None:
        """End a session; the next in line may begin."""
        try:
            await session.close()
        finally:
            self._left()

    async def _try(self, reset: Mapping[str, object]) -> tuple[OpenEnvSession | None, Observed | Refused]:
        """A place in the line is left unless a session is returned."""
        session = None
        try:
            session = OpenEnvSession(await self._connected(), url=self.url, deadline=self._deadline)
            reply = await session.ask("reset", reset)
        except BaseException:
            if session is not None:
                await session.close()
            self._left()
            raise
        if isinstance(reply, Refused) and reply.code == _FULL:
            await self.end(session)
            return None, reply
        return session, reply

    async def _connected(self) -> ClientConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake

        scheme = "wss" if self._parts.scheme in ("https", "wss") else "ws"
        address = self._parts._replace(scheme=scheme).geturl() + "/ws"
        try:
            return await connect(
                address,
                max_size=_LONGEST_MESSAGE,
                open_timeout=self._deadline,
                close_timeout=_CLOSING,
                proxy=True if self._proxied else None,
            )
        except (OSError, TimeoutError) as error:
            raise UnavailableError(f"OpenEnv server {self.url} cannot be reached: {error}") from error
        except InvalidHandshake as error:
            raise UnavailableError(f"OpenEnv server {self.url} opens no session: {error}") from error

    def _full(self, reply: Refused) -> None:
        most = max(1, reply.sessions or self._held)
        if self._most is None:
            logger.warning("OpenEnv server %s takes %d sessions at once; the others wait for one", self.url, most)
        self._most = most

    def _left(self) -> None:
        self._held -= 1
        self._ended.set()


def _fetch(address: str, *, proxied: bool) -> bytes:
    opener = urllib.request.build_opener(*([] if proxied else [urllib.request.ProxyHandler({})]))
    with opener.open(address, timeout=_SCHEMA_DEADLINE) as answer:
        content: bytes = answer.read()
    return content


def _read(text: str | bytes, url: str) -> Observed | Refused:
    """A server's message. Raises EnvironmentContractError for one that is none of OpenEnv's."""
    try:
        message = json.loads(text)
        kind, data = message["type"], message["data"]
        if kind == "error":
            most = data.get("max_sessions")
            details = "; ".join(str(one.get("msg")) for one in data.get("errors") or ())
            said = ": ".join(part for part in (str(data["message"]), details) if part)
            return Refused(code=str(data["code"]), message=said, sessions=most if isinstance(most, int) else None)
        if kind == "observation":
            return Observed(
                observation=dict(data["observation"]),
                reward=float(data.get("reward") or 0.0),
                done=bool(data.get("done")),
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvironmentContractError(
            f"OpenEnv server {url} sent what is no message of OpenEnv's: {text!r:.200}"
        ) from error
    raise EnvironmentContractError(f"OpenEnv server {url} answered with the message {kind!r}, expected an observation")
