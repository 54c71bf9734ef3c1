"""JSON over HTTP: the one module of this distribution that knows the HTTP library.

ServerCallError
├── UnreachableError   no connection, or it broke: the server is gone or not yet up
├── TooSlowError       no answer within the deadline
├── StatusError        an error answer, with its ``status`` and message
└── GarbageError       an answer with unexpected content
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec


class ServerCallError(Exception):
    """A call that gave no usable answer."""


class UnreachableError(ServerCallError):
    """No connection, or it broke."""


class TooSlowError(ServerCallError):
    """No answer within the deadline."""


class StatusError(ServerCallError):
    """An answer with a status of 400 or above."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status
        self.message = message


class GarbageError(ServerCallError):
    """An answer with unexpected content."""


Response = httpx.Response
Transport = httpx.AsyncBaseTransport

# Maximum number of characters of an answer that an error quotes.
_QUOTED = 300
_JSON = {"content-type": "application/json"}


class JSONClient:
    """Calls to one address. Cancelling a call closes its connection; by that the server learns of it."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.address,
            timeout=None,  # each call sets its own deadline, or none, because a slow server is not a dead one
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0),
            trust_env=False,
        )

    async def get(self, path: str, *, seconds: float) -> object:
        """The JSON at ``path``; None for an empty answer."""
        return await self._call("GET", path, None, seconds)

    async def text(self, path: str, *, seconds: float) -> str:
        return (await self._content("GET", path, None, seconds)).decode(errors="replace")

    async def post(self, path: str, body: object = None, *, seconds: float | None) -> object:
        """The JSON answer of ``path`` to ``body``; None for an empty answer.

        With ``seconds`` None, wait as long as the connection is open.
        """
        return await self._call("POST", path, body, seconds)

    async def command(self, path: str, body: object, *, seconds: float | None) -> None:
        """As :meth:`post`, for an answer that says nothing but that it worked."""
        await self._content("POST", path, body, seconds)

    async def content(self, path: str, body: object, *, seconds: float | None) -> bytes:
        """As :meth:`post`, for an answer that the caller decodes."""
        return await self._content("POST", path, body, seconds)

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: object, seconds: float | None) -> object:
        content = await self._content(method, path, body, seconds)
        try:
            return json.loads(content) if content else None
        except ValueError:
            raise GarbageError(f"{self.address}{path} answered with invalid JSON: {_quoted(content)}") from None

    async def _content(self, method: str, path: str, body: object, seconds: float | None) -> bytes:
        # A long prompt is sent again with every turn: msgspec encodes its tokens ten times faster than json.
        sent = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._client.request(method, path, content=sent, headers=_JSON if sent else None)
        except TimeoutError:
            raise TooSlowError(f"{self.address}{path} gave no answer within {seconds:g} s") from None
        except (httpx.TransportError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise UnreachableError(f"{self.address}{path} cannot be reached: {reason}") from error
        except httpx.HTTPError as error:
            raise GarbageError(f"{self.address}{path} answered with invalid HTTP: {error}") from error
        if answer.status_code >= 400:
            raise StatusError(answer.status_code, _message(answer.content))
        return answer.content


class StreamClient:
    """Requests to one endpoint with streamed answers; the caller reads their status.

    An answer may last as long as pieces arrive, each within ``read_timeout`` seconds.
    """

    def __init__(
        self, url: str, *, key: str | None, read_timeout: float, connections: int, transport: Transport | None = None
    ) -> None:
        """``transport`` is for tests."""
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(read_timeout, connect=min(30.0, read_timeout), pool=None),
            limits=httpx.Limits(max_connections=connections),
            transport=transport,
        )

    async def get(self, path: str) -> Response:
        """The whole answer. Raises UnreachableError."""
        async with self._reached():
            return await self._client.get(path)

    @asynccontextmanager
    async def post(self, path: str, body: object) -> AsyncIterator[Response]:
        """The answer, not yet read. Leaving the context closes the connection. Raises UnreachableError, also inside."""
        async with self._reached(), self._client.stream("POST", path, json=body) as response:
            yield response

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _reached(self) -> AsyncIterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise UnreachableError(str(error) or type(error).__name__) from error


def _message(content: bytes) -> str:
    """The message of an error answer: in vLLM's format, or the plain text."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return _quoted(content)


def _quoted(content: bytes) -> str:
    text = content[: _QUOTED + 1].decode(errors="replace").strip()
    return repr(text[:_QUOTED] + "..." if len(text) > _QUOTED else text)
