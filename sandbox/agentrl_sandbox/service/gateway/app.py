"""The gateway's HTTP interface. It executes nothing; programs run at the runners of a pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from agentrl_sandbox.call import Call, ImpossibleCallError
from agentrl_sandbox.service.gateway import fusion
from agentrl_sandbox.service.gateway.bodies import (
    BatchAnswer,
    BatchRequest,
    ErrorAnswer,
    ExecutionAnswer,
    ProgramRequest,
    SessionAnswer,
    encode,
    execution_json,
)
from agentrl_sandbox.service.gateway.guard import CONTENT_TYPE, Metrics
from agentrl_sandbox.service.pool import RunnerPool
from agentrl_sandbox.types import (
    BusyError,
    ClosedError,
    Execution,
    QueueFullError,
    SessionForkError,
    SessionLimitError,
    UnknownSessionError,
)

_MOST_NAMED = 16  # most invalid fields that an answer lists
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": meaning}
    for status, meaning in {
        401: "the token is missing or wrong",
        404: "no such session",
        409: "max_sessions sessions are open, or a session cannot be forked",
        415: "not JSON",
        422: "invalid arguments",
        429: "the queue is full; retry after the seconds in Retry-After",
        503: "no runner had room, or the service is stopping; retry after the seconds in Retry-After",
    }.items()
}


class Gateway:
    """The state that endpoints share: the pool, the metrics, and whether the service is stopping."""

    def __init__(self, pool: RunnerPool, *, batch_limit: int) -> None:
        self.pool = pool
        self.batch_limit = batch_limit
        self.metrics = Metrics()
        self.draining = False
        self.calls = 0
        gauge, registry = self.metrics.gauge, pool.registry
        gauge("queue_length", "calls waiting for a runner", lambda: pool.queue.length)
        gauge("running", "requests being run", lambda: registry.running)
        gauge("runners", "runners that accept programs", lambda: registry.runners)
        gauge("workers", "programs that can run at once", lambda: registry.workers)
        gauge("sessions", "open sessions", lambda: len(pool.sessions.book))

    def check_open(self) -> None:
        """Raises BusyError while the service is stopping."""
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
        self.metrics.ran(execution, time.monotonic() - started)
        return execution


def build_app(gateway: Gateway) -> FastAPI:
    """The application; its lifespan opens and closes the pool."""

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
        responses=_PROBLEMS,
    )
    _add_errors(app, gateway)
    _add_state(app, gateway)
    _add_programs(app, gateway)
    _add_sessions(app, gateway)
    _add_fusion(app, gateway)
    return app


_STATUS: dict[type[Exception], HTTPStatus] = {
    QueueFullError: HTTPStatus.TOO_MANY_REQUESTS,
    SessionLimitError: HTTPStatus.CONFLICT,
    SessionForkError: HTTPStatus.CONFLICT,
    UnknownSessionError: HTTPStatus.NOT_FOUND,
    BusyError: HTTPStatus.SERVICE_UNAVAILABLE,
    ClosedError: HTTPStatus.SERVICE_UNAVAILABLE,
    ImpossibleCallError: HTTPStatus.UNPROCESSABLE_ENTITY,
}


def _add_errors(app: FastAPI, gateway: Gateway) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
        gateway.metrics.refused(status)
        after = error.retry_after if isinstance(error, BusyError) else 2
        again = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
        body = {"detail": str(error), "error": type(error).__name__}
        return JSONResponse(body, status, {"Retry-After": str(after)} if again else None)

    async def refuse_body(request: Request, error: Exception) -> Response:
        """Answer with the first invalid fields, without their values: NaN and lone surrogates cannot be sent back."""
        assert isinstance(error, RequestValidationError)
        gateway.metrics.refused(HTTPStatus.UNPROCESSABLE_ENTITY)
        wrong = [{key: field[key] for key in ("loc", "msg", "type")} for field in error.errors()[:_MOST_NAMED]]
        return _json({"detail": wrong}, HTTPStatus.UNPROCESSABLE_ENTITY)

    for kind in _STATUS:
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(RequestValidationError, refuse_body)


def _add_state(app: FastAPI, gateway: Gateway) -> None:
    registry = gateway.pool.registry

    @app.get("/health", tags=["state"])
    async def health() -> dict[str, str]:
        """Whether the gateway is up."""
        return {"status": "ok"}

    @app.get("/ready", tags=["state"])
    async def ready() -> Response:
        """Whether programs can run now, how runners isolate them, and the limits they have."""
        able = registry.runners > 0 and not gateway.draining
        isolation = registry.isolation
        state = {
            "ready": able,
            "runners": registry.runners,
            "workers": registry.workers,
            "isolation": {"mode": isolation.mode, "layers": dict(isolation.layers)},
            "limits": registry.limits,
        }
        return _json(state, HTTPStatus.OK if able else HTTPStatus.SERVICE_UNAVAILABLE)

    @app.get("/metrics", tags=["state"])
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE)


def _add_programs(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/execute", response_model=ExecutionAnswer, tags=["programs"])
    async def execute(request: ProgramRequest) -> Response:
        """Run a program. It is killed if the client disconnects."""
        return _json(execution_json(await gateway.run(request.call(), request.request_id)))

    @app.post("/v1/execute_batch", response_model=BatchAnswer, tags=["programs"])
    async def execute_batch(request: BatchRequest) -> Response:
        """Run many programs; all of them, or none if the queue lacks room."""
        count = len(request.requests)
        if count > gateway.batch_limit:
            raise ImpossibleCallError(f"a batch has at most {gateway.batch_limit} programs, not {count}")
        gateway.check_open()
        gateway.pool.check_room(count)
        tasks = [asyncio.ensure_future(gateway.run(one.call(), one.request_id)) for one in request.requests]
        try:
            executions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return _json({"executions": [execution_json(execution) for execution in executions]})


def _add_sessions(app: FastAPI, gateway: Gateway) -> None:
    pool = gateway.pool

    @app.post("/v1/sessions", response_model=SessionAnswer, status_code=HTTPStatus.CREATED, tags=["sessions"])
    async def open_session() -> Response:
        """Start an interpreter that keeps its state between programs."""
        gateway.check_open()
        return _json({"session": await pool.open_session()}, HTTPStatus.CREATED)

    @app.post("/v1/sessions/{session}/execute", response_model=ExecutionAnswer, tags=["sessions"])
    async def execute_in_session(session: str, request: ProgramRequest) -> Response:
        """Run a program in a session; programs of one session run one after the other."""
        return _json(execution_json(await gateway.run(request.call(session), request.request_id)))

    @app.post(
        "/v1/sessions/{session}/fork", response_model=SessionAnswer, status_code=HTTPStatus.CREATED, tags=["sessions"]
    )
    async def fork_session(session: str) -> Response:
        """Copy a live session."""
        gateway.check_open()
        return _json({"session": await pool.fork_session(session)}, HTTPStatus.CREATED)

    @app.delete("/v1/sessions/{session}", status_code=HTTPStatus.NO_CONTENT, tags=["sessions"])
    async def close_session(session: str) -> Response:
        """End a session."""
        await pool.close_session(session)
        return Response(status_code=HTTPStatus.NO_CONTENT)


def _add_fusion(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/run_code", response_model=fusion.RunCodeResponse, tags=["SandboxFusion"])
    async def run_code(request: fusion.RunCodeRequest) -> Response:
        return _json((await fusion.run_code(request, gateway.run)).model_dump())

    @app.post("/run_jupyter", response_model=fusion.RunJupyterResponse, tags=["SandboxFusion"])
    async def run_jupyter(request: fusion.RunJupyterRequest) -> Response:
        """Run the cells of a notebook."""
        return _json((await fusion.run_jupyter(request, gateway.run)).model_dump())


def _json(value: object, status: int = HTTPStatus.OK) -> Response:
    return Response(encode(value), status, media_type="application/json")
