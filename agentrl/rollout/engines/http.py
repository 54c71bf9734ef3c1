"""JSON over HTTP: the one module of this distribution that knows the HTTP library.

HTTPFailure
├── UnreachableError   no connection, or it broke; the server is gone or not there yet
├── TooSlowError       no answer within the deadline
├── RefusedError       an answer that says no; ``status`` and its message
└── GarbageError       an answer that is not what was asked for
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx


class HTTPFailure(Exception):
    """A call that gave no usable answer."""


class UnreachableError(HTTPFailure):
    """No connection, or it broke."""


class TooSlowError(HTTPFailure):
    """No answer within the deadline."""


class RefusedError(HTTPFailure):
    """An answer with a status of 400 or above."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status
        self.message = message


class GarbageError(HTTPFailure):
    """An answer that is not what was asked for."""


# Characters of an answer that an error quotes.
_QUOTED = 300


class JSONClient:
    """Calls to one address. Cancelling a call closes its connection, which is how the server hears of it."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.address,
            timeout=None,  # every call has a deadline of its own, or none because slow is not dead
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0),
            trust_env=False,
        )

    async def get(self, path: str, *, seconds: float) -> Any:
        """The JSON at ``path``; None for an empty answer."""
        return await self._call("GET", path, None, seconds)

    async def text(self, path: str, *, seconds: float) -> str:
        """The text at ``path``."""
        return (await self._content("GET", path, None, seconds)).decode(errors="replace")

    async def post(self, path: str, body: Any = None, *, seconds: float | None) -> Any:
        """The JSON that ``path`` answers to ``body``; None for an empty answer.

        ``seconds`` None waits as long as the connection holds.
        """
        return await self._call("POST", path, body, seconds)

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: Any, seconds: float | None) -> Any:
        content = await self._content(method, path, body, seconds)
        try:
            return json.loads(content) if content else None
        except ValueError:
            raise GarbageError(f"{self.address}{path} answered what is not JSON: {_quoted(content)}") from None

    async def _content(self, method: str, path: str, body: Any, seconds: float | None) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                answer = await self._client.request(method, path, json=body)
        except TimeoutError:
            raise TooSlowError(f"{self.address}{path} gave no answer within {seconds:g} s") from None
        except (httpx.TransportError, OSError) as error:
            said = str(error) or type(error).__name__
            raise UnreachableError(f"{self.address}{path} cannot be reached: {said}") from error
        except httpx.HTTPError as error:
            raise GarbageError(f"{self.address}{path} answered what is not HTTP: {error}") from error
        if answer.status_code >= 400:
            raise RefusedError(answer.status_code, _message(answer.content))
        return answer.content


def _message(content: bytes) -> str:
    """What a refusal says: vLLM's own form, or the text as it is."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return _quoted(content)


def _quoted(content: bytes) -> str:
    text = content[: _QUOTED + 1].decode(errors="replace").strip()
    return repr(text[:_QUOTED] + "..." if len(text) > _QUOTED else text)
