"""Rejection of unauthorized, cross-site, slow and large requests, before the application processes them.

A web page cannot freely choose the Host header, the Origin and the content type that a browser sends. Therefore a
foreign Host (DNS rebinding) or Origin is rejected. A body must be JSON: a page cannot send JSON to another site without
a preflight request. All paths that run programs also require the bearer token.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Requests to these paths run no programs and reveal no secrets.
_OPEN_PATHS = frozenset({"/health", "/ready", "/docs", "/openapi.json"})


class _ClientDisconnectedError(Exception):
    """The client disconnected before its request was complete."""


@dataclass(frozen=True, slots=True)
class RejectedRequestError(Exception):
    """A request is rejected with an HTTP status."""

    status: int
    detail: str
    headers: Mapping[str, str] | None = None


class RequestGuard:
    """ASGI middleware that rejects invalid requests, limits bodies, and cancels requests of disconnected clients."""

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: frozenset[str], max_body: int) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._hosts = hosts
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request or the application's lifespan."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            if scope["type"] != "http":
                raise RejectedRequestError(400, "only HTTP requests are supported")
            headers = _read_headers(scope)
            self._check_host(headers)
            self._check_origin(headers)
            self._check_token(scope["path"], headers)
            _check_content(scope["method"], headers)
            body = await self._read_body(headers, receive)
        except RejectedRequestError as refusal:
            answer = JSONResponse({"detail": refusal.detail}, refusal.status, refusal.headers)
            await answer(scope, receive, send)
        except _ClientDisconnectedError:
            return
        else:
            await self._run_application(scope, body, receive, send)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        host = _without_port(headers.get(b"host", b"").decode("latin-1"))
        if host not in self._hosts:
            raise RejectedRequestError(421, f"the host {host!r} is not allowed: add it to the setting allowed_hosts")

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        origin = headers.get(b"origin")
        own_origins = (b"http://" + headers[b"host"], b"https://" + headers[b"host"])
        if origin is not None and origin.lower() not in (name.lower() for name in own_origins):
            raise RejectedRequestError(403, "cross-site requests are rejected")
        if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise RejectedRequestError(403, "cross-site requests are rejected")

    def _check_token(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._expected is None or path in _OPEN_PATHS:
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            why = "the header 'Authorization: Bearer TOKEN' is missing or wrong"
            raise RejectedRequestError(401, why, {"WWW-Authenticate": "Bearer"})

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Read the complete body.

        Raises RejectedRequestError if the body is too large, and _ClientDisconnectedError if it is incomplete.
        """
        said = headers.get(b"content-length", b"0")
        if not said.isdigit() or int(said) > self._max_body:
            raise RejectedRequestError(413, f"the body exceeds {self._max_body} bytes")
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientDisconnectedError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise RejectedRequestError(413, f"the body exceeds {self._max_body} bytes")
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _run_application(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application. If the client disconnects, cancel the application and thereby kill the program."""
        parts = [{"type": "http.request", "body": body, "more_body": False}]
        left: asyncio.Future[Message] = asyncio.ensure_future(receive())

        async def replay() -> Message:
            return parts.pop() if parts else await asyncio.shield(left)

        working = asyncio.ensure_future(self._app(scope, replay, send))
        try:
            await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            unfinished = [task for task in (working, left) if not task.done()]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)


def _read_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers. Raises RejectedRequestError if a checked header occurs twice or Host is missing."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in headers and name in (b"host", b"origin", b"authorization", b"content-type", b"content-length"):
            raise RejectedRequestError(400, f"the header {name.decode('latin-1')} occurs twice")
        headers[name] = value
    if b"host" not in headers:
        raise RejectedRequestError(400, "the header host is missing")
    return headers


def _check_content(method: str, headers: dict[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if method not in ("GET", "HEAD", "DELETE") and kind != b"application/json":
        raise RejectedRequestError(415, "the body must be application/json")


def _without_port(host: str) -> str:
    """Return a host without its port: ``localhost`` for ``localhost:8080``, ``::1`` for ``[::1]:8080``."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


_HEADER_SECONDS = 10.0  # from the first byte of a request to the end of its headers
_MAX_HEADER_BYTES = 65_536
_CHUNKED_OVERHEAD_BYTES = 1 << 20  # overhead of the chunked encoding of a body


def bounded_protocol(*, receive_seconds: float, max_body: int) -> type[HttpToolsProtocol]:
    """Return a protocol class that closes connections whose request arrives too slowly or is too large.

    uvicorn has no such limits, and an application cannot apply them before the headers are complete.
    """

    class BoundedProtocol(HttpToolsProtocol):
        _close_timer: asyncio.TimerHandle | None = None
        _received = 0  # bytes of the current request
        _in_body = False

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._close_after(min(_HEADER_SECONDS, receive_seconds))

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if self._close_timer is None and not answering:  # the next request on an idle connection
                self._close_after(min(_HEADER_SECONDS, receive_seconds))
            self._received += len(data)
            super().data_received(data)
            if self._received > (max_body + _CHUNKED_OVERHEAD_BYTES if self._in_body else 0) + _MAX_HEADER_BYTES:
                self.transport.abort()

        def on_headers_complete(self) -> None:
            self._in_body = True
            self._close_after(receive_seconds)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._cancel_timer()
            self._received, self._in_body = 0, False
            super().on_message_complete()

        def _close_after(self, seconds: float) -> None:
            self._cancel_timer()
            self._close_timer = self.loop.call_later(seconds, self.transport.abort)

        def _cancel_timer(self) -> None:
            if self._close_timer is not None:
                self._close_timer.cancel()
                self._close_timer = None

    return BoundedProtocol
