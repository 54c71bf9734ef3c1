"""The gateway: HTTP endpoints for a pool of runners, and the process that serves them. It executes no programs."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp

from agentrl_sandbox.call import Call, InvalidCallError
from agentrl_sandbox.service import fusion
from agentrl_sandbox.service.bodies import (
    ErrorAnswer,
    ExecutionAnswer,
    ProgramRequest,
    SessionAnswer,
    encode_json,
    execution_to_json,
)
from agentrl_sandbox.service.guard import RequestGuard, bounded_protocol
from agentrl_sandbox.service.pool import RunnerPool
from agentrl_sandbox.settings import NO_TOKEN, GatewaySettings
from agentrl_sandbox.types import (
    BusyError,
    ClosedError,
    Execution,
    Outcome,
    QueueFullError,
    SessionForkError,
    SessionLimitError,
    StartError,
    UnknownSessionError,
)

_MAX_FIELD_ERRORS = 16  # maximum number of invalid fields that an answer lists
_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": meaning}
    for status, meaning in {
        401: "the token is missing or wrong",
        404: "no such session",
        409: "max_sessions sessions are open, or the session cannot be forked",
        415: "the body is not JSON",
        422: "invalid arguments",
        429: "the queue is full; retry after the seconds in Retry-After",
        503: "no runner had capacity, or the service is stopping; retry after the seconds in Retry-After",
    }.items()
}


_METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)


class GatewayMetrics:
    """Prometheus metrics of one gateway, in a separate registry, because a process may run several gateways."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counted = "answered calls by outcome"
        self._outcomes = Counter("agentrl_sandbox_executions", counted, ["outcome"], registry=registry)
        for outcome in Outcome:
            self._outcomes.labels(outcome.value)
        program, name = "wall-clock time of programs", "agentrl_sandbox_execution_seconds"
        self._seconds = Histogram(name, program, buckets=_BUCKETS, registry=registry)
        answer, name = "time from a call's arrival to its answer, including the queue", "agentrl_sandbox_answer_seconds"
        self._answer_seconds = Histogram(name, answer, buckets=_BUCKETS, registry=registry)
        refused = "rejected calls by HTTP status"
        self._refused = Counter("agentrl_sandbox_refused", refused, ["status"], registry=registry)

    def add_gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read at every scrape."""
        Gauge(f"agentrl_sandbox_{name}", meaning, registry=self._registry).set_function(value)

    def record_execution(self, execution: Execution, answer_seconds: float) -> None:
        self._outcomes.labels(execution.outcome.value).inc()
        self._seconds.observe(execution.seconds)
        self._answer_seconds.observe(answer_seconds)

    def record_refusal(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class GatewayState:
    """State shared by the endpoints: the pool, the metrics, and a flag that is set while the service stops."""

    def __init__(self, pool: RunnerPool) -> None:
        self.pool = pool
        self.metrics = GatewayMetrics()
        self.draining = False
        self.calls = 0
        gauge, registry = self.metrics.add_gauge, pool.registry
        gauge("queue_length", "calls waiting for a runner", lambda: len(pool.queue))
        gauge("running", "requests in progress", lambda: registry.in_flight)
        gauge("runners", "runners that accept programs", lambda: registry.runner_count)
        gauge("workers", "programs that can run at once", lambda: registry.workers)
        gauge("sessions", "open sessions", lambda: len(pool.sessions))

    def check_open(self) -> None:
        """Raise BusyError while the service is stopping."""
        if self.draining:
            raise BusyError("the service is stopping", retry_after=2)

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        self.check_open()
        started = time.monotonic()
        self.calls += 1
        try:
            execution = await self.pool.run(call, request_id)
        finally:
            self.calls -= 1
        self.metrics.record_execution(execution, time.monotonic() - started)
        return execution


def build_app(gateway: GatewayState) -> FastAPI:
    """Create the application. Its lifespan opens and closes the pool."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway.pool.open()
        yield
        await gateway.pool.close()

    app = FastAPI(
        title="agentrl-sandbox",
        summary="Runs untrusted Python programs.",
        lifespan=lifespan,
        redoc_url=None,
        responses=_ERROR_RESPONSES,
    )
    _add_error_handlers(app, gateway)
    _add_state_endpoints(app, gateway)
    _add_execution_endpoints(app, gateway)
    return app


_STATUS_BY_ERROR: dict[type[Exception], HTTPStatus] = {
    QueueFullError: HTTPStatus.TOO_MANY_REQUESTS,
    SessionLimitError: HTTPStatus.CONFLICT,
    SessionForkError: HTTPStatus.CONFLICT,
    UnknownSessionError: HTTPStatus.NOT_FOUND,
    BusyError: HTTPStatus.SERVICE_UNAVAILABLE,
    ClosedError: HTTPStatus.SERVICE_UNAVAILABLE,
    InvalidCallError: HTTPStatus.UNPROCESSABLE_ENTITY,
}


def _add_error_handlers(app: FastAPI, gateway: GatewayState) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        status = next(status for error_class, status in _STATUS_BY_ERROR.items() if isinstance(error, error_class))
        gateway.metrics.record_refusal(status)
        after = error.retry_after if isinstance(error, BusyError) else 2
        again = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
        body = {"detail": str(error), "error": type(error).__name__}
        return JSONResponse(body, status, {"Retry-After": str(after)} if again else None)

    async def refuse_body(request: Request, error: Exception) -> Response:
        """Return the first invalid fields, without their values, because NaN and lone surrogates cannot be encoded."""
        assert isinstance(error, RequestValidationError)
        gateway.metrics.record_refusal(HTTPStatus.UNPROCESSABLE_ENTITY)
        wrong = [{key: field[key] for key in ("loc", "msg", "type")} for field in error.errors()[:_MAX_FIELD_ERRORS]]
        return _json_response({"detail": wrong}, HTTPStatus.UNPROCESSABLE_ENTITY)

    for error_class in _STATUS_BY_ERROR:
        app.add_exception_handler(error_class, refuse)
    app.add_exception_handler(RequestValidationError, refuse_body)


def _add_state_endpoints(app: FastAPI, gateway: GatewayState) -> None:
    registry = gateway.pool.registry

    @app.get("/health", tags=["state"])
    async def health() -> dict[str, str]:
        """Report that the gateway is running."""
        return {"status": "ok"}

    @app.get("/ready", tags=["state"])
    async def ready() -> Response:
        """Report whether programs can run now, how they are isolated, and their limits."""
        able = registry.runner_count > 0 and not gateway.draining
        isolation = registry.isolation
        state = {
            "ready": able,
            "runners": registry.runner_count,
            "workers": registry.workers,
            "isolation": {"mode": isolation.mode, "layers": dict(isolation.layers)},
            "limits": registry.limits,
        }
        return _json_response(state, HTTPStatus.OK if able else HTTPStatus.SERVICE_UNAVAILABLE)

    @app.get("/metrics", tags=["state"])
    async def metrics() -> Response:
        """Return Prometheus metrics."""
        return Response(gateway.metrics.render(), media_type=_METRICS_CONTENT_TYPE)


def _add_execution_endpoints(app: FastAPI, gateway: GatewayState) -> None:
    pool = gateway.pool

    @app.post("/v1/execute", response_model=ExecutionAnswer, tags=["programs"])
    async def execute(request: ProgramRequest) -> Response:
        """Run a program. If the client disconnects, the program is killed."""
        return _json_response(execution_to_json(await gateway.run(request.to_call(), request.request_id)))

    @app.post("/v1/sessions", response_model=SessionAnswer, status_code=HTTPStatus.CREATED, tags=["sessions"])
    async def open_session() -> Response:
        """Start an interpreter that keeps its state between programs."""
        gateway.check_open()
        return _json_response({"session": await pool.open_session()}, HTTPStatus.CREATED)

    @app.post("/v1/sessions/{session}/execute", response_model=ExecutionAnswer, tags=["sessions"])
    async def execute_in_session(session: str, request: ProgramRequest) -> Response:
        """Run a program in a session. The programs of a session run one at a time."""
        return _json_response(execution_to_json(await gateway.run(request.to_call(session), request.request_id)))

    @app.post(
        "/v1/sessions/{session}/fork", response_model=SessionAnswer, status_code=HTTPStatus.CREATED, tags=["sessions"]
    )
    async def fork_session(session: str) -> Response:
        """Copy a live session."""
        gateway.check_open()
        return _json_response({"session": await pool.fork_session(session)}, HTTPStatus.CREATED)

    @app.delete("/v1/sessions/{session}", status_code=HTTPStatus.NO_CONTENT, tags=["sessions"])
    async def close_session(session: str) -> Response:
        """End a session."""
        await pool.close_session(session)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    @app.post("/run_code", response_model=fusion.RunCodeResponse, tags=["SandboxFusion"])
    async def run_code(request: fusion.RunCodeRequest) -> Response:
        return _json_response((await fusion.run_code(request, gateway.run)).model_dump())


def _json_response(value: object, status: int = HTTPStatus.OK) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


_log = logging.getLogger(__name__)
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that clients close first


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
    """Server that finishes running calls after a signal and rejects new calls with 503. A second signal stops it."""

    def __init__(self, config: uvicorn.Config, gateway: GatewayState, drain_seconds: float) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._drain_seconds = drain_seconds
        self._drain: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining, or stop at a second signal. uvicorn calls this method in its signal handler."""
        if self._gateway.draining:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
            return
        self._gateway.draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._drain = self._loop.create_task(self._wait_until_idle())

    async def _wait_until_idle(self) -> None:
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
    """Serve until SIGTERM, SIGINT or a cancellation. ``on_listening`` receives the port.

    Raises StartError if the address is not available.
    """
    token = settings.token or read_or_create_token(settings.token_file)
    pool = RunnerPool(sockets, queue_limit=settings.queue_limit, queue_seconds=settings.queue_seconds)
    gateway = GatewayState(pool)
    max_body = settings.max_body_mb << 20
    app = RequestGuard(
        build_app(gateway),
        token=None if token == NO_TOKEN else token,
        hosts=settings.hosts,
        max_body=max_body,
    )
    with _open_listener(settings.host, settings.port) as listener:
        config = server_config(app, receive_seconds=settings.receive_seconds, max_body=max_body)
        on_listening(listener.getsockname()[1])
        server = DrainingServer(config, gateway, settings.drain_seconds)
        serving = asyncio.ensure_future(server.serve([listener]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            server.should_exit = True  # uvicorn prints a traceback if it is cancelled
            await serving
            raise


def _open_listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error}") from error


def read_or_create_token(file: Path | None) -> str:
    """Return the token in ``file``, creating the file if needed. Without a file, return a new token and log it once.

    Raises StartError if the file cannot be used.
    """
    if file is None:
        token = secrets.token_urlsafe(32)
        _log.warning("token: %s (set SANDBOX_TOKEN to choose it, or --no-token to disable authentication)", token)
        return token
    try:
        if not file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as opened:
                opened.write(secrets.token_urlsafe(32) + "\n")
        token = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read or store the token in {file}: {error}") from error
    if not token:
        raise StartError(f"{file} contains no token: delete the file to generate one")
    _log.info("the token is in %s", file)
    return token
