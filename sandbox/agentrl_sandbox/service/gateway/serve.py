"""The gateway process: runs the application in uvicorn and drains it on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl_sandbox.service.gateway.app import Gateway, build_app
from agentrl_sandbox.service.gateway.guard import Guard
from agentrl_sandbox.service.gateway_settings import NO_TOKEN, GatewaySettings
from agentrl_sandbox.service.pool import RunnerPool
from agentrl_sandbox.types import StartError

_log = logging.getLogger(__name__)
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that they close first
_HEAD_SECONDS = 10.0  # from the first byte of a request to the end of its headers
_HEAD_BYTES = 65_536
_CHUNKS_BYTES = 1 << 20  # overhead of the chunked encoding of a body


def bounded_protocol(*, receive_seconds: float, max_body: int) -> type[HttpToolsProtocol]:
    """Return a protocol class that closes connections whose request arrives too slowly or is too large.

    uvicorn has no such limits, and an application cannot apply them before the headers are complete.
    """

    class BoundedProtocol(HttpToolsProtocol):
        _closing: asyncio.TimerHandle | None = None
        _received = 0  # bytes of the current request
        _in_body = False

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._close_in(min(_HEAD_SECONDS, receive_seconds))

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if self._closing is None and not answering:  # the next request on an idle connection
                self._close_in(min(_HEAD_SECONDS, receive_seconds))
            self._received += len(data)
            super().data_received(data)
            if self._received > (max_body + _CHUNKS_BYTES if self._in_body else 0) + _HEAD_BYTES:
                self.transport.abort()

        def on_headers_complete(self) -> None:
            self._in_body = True
            self._close_in(receive_seconds)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._stop()
            self._received, self._in_body = 0, False
            super().on_message_complete()

        def _close_in(self, seconds: float) -> None:
            self._stop()
            self._closing = self.loop.call_later(seconds, self.transport.abort)

        def _stop(self) -> None:
            if self._closing is not None:
                self._closing.cancel()
                self._closing = None

    return BoundedProtocol


def server_config(app: ASGIApp, *, receive_seconds: float, max_body: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        http=bounded_protocol(receive_seconds=receive_seconds, max_body=max_body),
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=5,
    )


class DrainingServer(uvicorn.Server):
    """On the first signal new calls get 503 while the others finish; on the second it stops at once."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, drain_seconds: float) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._drain_seconds = drain_seconds
        self._drain: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn in its signal handler."""
        if self._gateway.draining:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
            return
        self._gateway.draining = True
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._drain = self._loop.create_task(self._until_idle())

    async def _until_idle(self) -> None:
        _log.info("stopping: %d calls are still running", self._gateway.calls)
        try:
            async with asyncio.timeout(self._drain_seconds):
                while self._gateway.calls:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            _log.warning("%d calls did not finish within %g s", self._gateway.calls, self._drain_seconds)
        self.should_exit = True


async def serve_gateway(
    settings: GatewaySettings, sockets: Path, *, on_listening: Callable[[int], None] = lambda port: None
) -> None:
    """Serve until SIGTERM, SIGINT or a cancellation. ``on_listening`` gets the port.

    Raises StartError if it cannot listen.
    """
    token = settings.token or kept_token(settings.token_file)
    pool = RunnerPool(sockets, queue_limit=settings.queue_limit, queue_seconds=settings.queue_seconds)
    gateway = Gateway(pool, batch_limit=settings.batch_limit)
    max_body = settings.max_body_mb << 20
    app = Guard(
        build_app(gateway),
        token=None if token == NO_TOKEN else token,
        hosts=settings.hosts,
        max_body=max_body,
    )
    with _listening(settings.host, settings.port) as listener:
        config = server_config(app, receive_seconds=settings.receive_seconds, max_body=max_body)
        on_listening(listener.getsockname()[1])
        server = DrainingServer(config, gateway, settings.drain_seconds)
        serving = asyncio.ensure_future(server.serve([listener]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            server.should_exit = True  # uvicorn writes a traceback where it is cancelled
            await serving
            raise


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise StartError(f"cannot listen at {host}:{port}: {error}") from error


def kept_token(file: Path | None) -> str:
    """The token in ``file``, which is created if needed; without a file, a new token, which is logged once.

    Raises StartError.
    """
    if file is None:
        token = secrets.token_urlsafe(32)
        _log.warning("token: %s (set SANDBOX_TOKEN to choose one, --no-token to turn authentication off)", token)
        return token
    try:
        if not file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as opened:
                opened.write(secrets.token_urlsafe(32) + "\n")
        token = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot store the token in {file}: {error}") from error
    if not token:
        raise StartError(f"{file} contains no token; remove the file")
    _log.info("the token is in %s", file)
    return token
