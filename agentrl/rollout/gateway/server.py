"""The gateway's HTTP server, which runs in the rollout worker's event loop. Each rollout has an address and a key.

With the rollout's key, agents send ``POST`` requests to ``/chat/completions``, ``/messages`` or ``/responses`` below
``/rollouts/ID/v1``, or below ``/v1`` with the header ``X-Session-ID``. With the same key, ``GET
/rollouts/ID/v1/models`` lists the models, ``POST /rollouts/ID/reward`` sets the reward, and ``GET /rollouts/ID``
returns the state. The gateway's key is valid for every rollout. Only the gateway's key is accepted by ``POST
/rollouts/ID/finish``, which ends a rollout, and by ``POST /rollouts``, which assigns the next waiting rollout to a
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentrl.errors import SettingsError
from agentrl.rollout.gateway.chat_completions import ChatCompletionsRequest
from agentrl.rollout.gateway.messages import MessagesRequest
from agentrl.rollout.gateway.responses import ResponsesRequest
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.settings import KEY_VARIABLE, AgentGatewaySettings
from agentrl.rollout.gateway.tree import Generation
from agentrl.rollout.gateway.wire import (
    FROZEN,
    AgentRequest,
    ApiRequestBody,
    GatewayAccess,
    GatewayRequestError,
    WireModel,
    parse_api_request,
    parse_body,
)
from agentrl_envs.types import MAX_REWARD

_DIALECTS: dict[str, type[ApiRequestBody]] = {
    "/chat/completions": ChatCompletionsRequest,
    "/messages": MessagesRequest,
    "/responses": ResponsesRequest,
}
_Answer = Callable[[Request, AgentRollout, bytes, ApiRequestBody, AgentRequest], Awaitable[Response]]
_PREFIXES = ("/v1", "/rollouts/{name}/v1")
_KEEP_ALIVE_SECONDS = 15.0  # seconds between comments in a stream while the engine samples
_BODY_DEADLINE = 60.0  # seconds to receive the body of a request, so that slow clients do not hold memory
_IDLE_SECONDS = 60.0  # seconds to receive the head of a request, so that silent clients do not hold connections
_BACKLOG = 2048
_EPOCH = "1970-01-01T00:00:00Z"
_MAX_WAIT_SECONDS = 60.0  # maximum seconds that a worker's request may wait for a rollout


class _NextRolloutBody(WireModel):
    wait: float = 0.0


class _RewardBody(WireModel):
    reward: float = Field(ge=-MAX_REWARD, le=MAX_REWARD)


class _FinishBody(WireModel):
    error: str | None = None


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers. The surrounding program handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _LimitedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with limits on the number of connections and on the idle time of clients.

    uvicorn's ``limit_concurrency`` refuses requests but keeps their connections. This class closes a connection if
    there are more than ``max_connections``, if no request arrives, or if the client does not read. h11 limits the size
    of heads and trailers.
    """

    def __init__(self, *args: Any, max_connections: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_connections = max_connections
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_timer = self.loop.call_later(_IDLE_SECONDS, self._close_if_idle)
        if len(self.connections) > self._max_connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle_timer.cancel()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart_idle_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(_IDLE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _restart_idle_timer(self) -> None:
        self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(_IDLE_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.transport.is_closing():  # the transport waits for a client that does not read
            self.transport.abort()
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        self._restart_idle_timer()


class AgentGateway:
    """The gateway, which serves registered rollouts from :meth:`open` to :meth:`close`."""

    def __init__(self, settings: AgentGatewaySettings) -> None:
        self._settings = settings
        self._rollouts: dict[str, AgentRollout] = {}
        self._waiting_names: asyncio.Queue[str] = asyncio.Queue()  # names of rollouts; "" when the server closes
        self.url = ""
        self.key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(24)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start listening. Raises SettingsError if the address is not available."""
        host, port = self._settings.host, self._settings.port
        try:
            listener = socket.create_server((host, port), backlog=_BACKLOG)
        except OSError as error:
            raise SettingsError(f"cannot listen on gateway.host={host}, gateway.port={port}: {error}") from error
        config = uvicorn.Config(
            self.app(),
            http=partial(_LimitedProtocol, max_connections=self._settings.max_connections),  # type: ignore[arg-type]
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="agent-gateway")

    async def serve_also_on(self, listener: socket.socket) -> asyncio.Server:
        """Serve the same rollouts on another listening socket, such as a container's. The caller closes the server."""
        assert self._server is not None, "the gateway is not open"
        config, state = self._server.config, self._server.server_state
        protocol: Any = config.http_protocol_class
        connection = partial(protocol, config=config, server_state=state, app_state={})
        return await asyncio.get_running_loop().create_server(connection, sock=listener)

    async def close(self) -> None:
        """Stop the server. May be called more than once."""
        if self._server is not None and self._serving is not None:
            self._waiting_names.put_nowait("")
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    def register_rollout(self, rollout: AgentRollout) -> None:
        """Serve a rollout under a new name, so that late calls from an earlier attempt cannot reach it."""
        name = f"{rollout.policy.name}-{secrets.token_hex(4)}"
        url, key = f"{self.url}/rollouts/{name}/v1", secrets.token_urlsafe(24)
        rollout.access = GatewayAccess(name=name, base_url=url, api_key=key, model=self._settings.model)
        self._rollouts[name] = rollout

    def unregister_rollout(self, rollout: AgentRollout) -> None:
        """Stop serving a rollout."""
        del self._rollouts[rollout.access.name]

    async def offer_to_workers(self, rollout: AgentRollout) -> None:
        """Offer a rollout to workers, and wait until a worker takes it."""
        self._waiting_names.put_nowait(rollout.access.name)
        await rollout.taken_event.wait()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        calls: list[tuple[str, type[ApiRequestBody], _Answer]] = [
            *((path, kind, self._answer_api_call) for path, kind in _DIALECTS.items()),
            ("/messages/count_tokens", MessagesRequest, self._count_tokens),
        ]
        return Starlette(
            routes=[
                *(
                    Route(prefix + path, partial(self._handle_api_request, kind, answer), methods=["POST"])
                    for prefix in _PREFIXES
                    for path, kind, answer in calls
                ),
                Route("/rollouts/{name}/v1/models", self._get_models, methods=["GET"]),
                Route("/rollouts", self._assign_rollout, methods=["POST"]),
                Route("/rollouts/{name}/reward", self._post_reward, methods=["POST"]),
                Route("/rollouts/{name}/finish", self._post_finish, methods=["POST"]),
                Route("/rollouts/{name}", self._get_state, methods=["GET"]),
            ],
            exception_handlers={
                GatewayRequestError: _error_response,
                HTTPException: _unknown_path_response,
                ClientDisconnect: _disconnected_response,
            },
        )

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _handle_api_request(self, kind: type[ApiRequestBody], answer: _Answer, http: Request) -> Response:
        """Read a request to one of the APIs and answer it. Errors are returned in the format of that API."""
        try:
            rollout = self._find_rollout(http)
            body = await self._read_body(http)
            call = parse_api_request(kind, body, model=self._settings.model)
            trainable = not call.model.endswith(FROZEN) and http.headers.get("x-agentrl-train") != "0"
            request = replace(call.to_agent_request(rollout.conversation_up_to), trainable=trainable)
            return await answer(http, rollout, body, call, request)
        except GatewayRequestError as error:
            return JSONResponse(kind.error_body(error), status_code=error.status)

    async def _answer_api_call(
        self, http: Request, rollout: AgentRollout, body: bytes, call: ApiRequestBody, request: AgentRequest
    ) -> Response:
        name, key = type(call).__name__, http.headers.get("idempotency-key")
        waiting = asyncio.ensure_future(
            rollout.answer_request(
                request,
                body=name.encode() + body,
                retry=http.headers.get("x-stainless-retry-count", "0") != "0",
                key=key and f"{name} {key}",
            )
        )
        if call.stream:
            await asyncio.wait([waiting], timeout=_KEEP_ALIVE_SECONDS)
            if not waiting.done() or waiting.exception() is None:
                stream = self._stream_reply(rollout, call, request, waiting)
                return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        generation = await waiting
        rollout.record_delivery(generation, received=not await http.is_disconnected())
        return JSONResponse(call.complete_response(rollout.build_reply(generation, request)))

    async def _stream_reply(
        self, rollout: AgentRollout, call: ApiRequestBody, request: AgentRequest, waiting: asyncio.Future[Generation]
    ) -> AsyncIterator[bytes]:
        """Yield the reply as events when it is complete. Until then, yield comments that keep the connection open."""
        sent = False
        try:
            while not waiting.done():
                yield b": waiting for the engine\n\n"
                await asyncio.wait([waiting], timeout=_KEEP_ALIVE_SECONDS)
            try:
                generation = waiting.result()
            except GatewayRequestError as error:
                yield call.error_event(error)
                return
            for event in call.stream_events(rollout.build_reply(generation, request)):
                yield event
            sent = True
            rollout.record_delivery(generation, received=True)
        finally:
            if not sent:
                waiting.add_done_callback(lambda task: _record_undelivered(rollout, task))

    async def _count_tokens(
        self, http: Request, rollout: AgentRollout, body: bytes, call: ApiRequestBody, request: AgentRequest
    ) -> Response:
        return JSONResponse({"input_tokens": rollout.count_context_tokens(request)})

    async def _get_models(self, http: Request) -> Response:
        self._find_rollout(http)
        names = (self._settings.model, self._settings.model + FROZEN)
        # Fields of a model in both OpenAI's and Anthropic's API.
        fields = {"object": "model", "owned_by": "agentrl", "created": 0, "type": "model", "created_at": _EPOCH}
        models = [{"id": name, "display_name": name, **fields} for name in names]
        return JSONResponse(
            {"object": "list", "data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        )

    async def _assign_rollout(self, http: Request) -> Response:
        """Return the data of the next waiting rollout, or status 204 if no rollout arrives within ``wait`` seconds."""
        if not _keys_equal(_read_api_key(http), self.key):
            raise GatewayRequestError("invalid key for this gateway", status=401, code="invalid_api_key")
        wait = parse_body(_NextRolloutBody, await self._read_body(http)).wait
        try:
            async with asyncio.timeout(min(_MAX_WAIT_SECONDS, wait)):
                rollout = await self._next_untaken_rollout()
        except TimeoutError:
            return Response(status_code=204)
        if await http.is_disconnected():
            self._waiting_names.put_nowait(rollout.access.name)
            return Response(status_code=204)
        rollout.taken_event.set()
        policy, access = rollout.policy, asdict(rollout.access)
        return JSONResponse(
            {
                "rollout_id": access.pop("name"),
                **access,
                "problem": self._settings.visible_columns(policy.problem),
                "step": policy.step,
                "group": policy.group,
                "sample": policy.sample_index,
            }
        )

    async def _next_untaken_rollout(self) -> AgentRollout:
        while True:
            name = await self._waiting_names.get()
            if not name:
                self._waiting_names.put_nowait("")
                raise TimeoutError
            rollout = self._rollouts.get(name)
            if rollout is not None and not rollout.finished:
                return rollout

    async def _post_reward(self, http: Request) -> Response:
        rollout = self._find_rollout(http)
        if not self._settings.agent_rewards:
            raise GatewayRequestError(
                "this run does not accept rewards from agents; set gateway.agent_rewards=true to accept them",
                status=403,
                code="reward_not_accepted",
            )
        value = parse_body(_RewardBody, await self._read_body(http)).reward
        rollout.raise_if_finished()
        rollout.reward = value
        return JSONResponse({"reward": rollout.reward})

    async def _post_finish(self, http: Request) -> Response:
        rollout = self._find_rollout(http)
        # Require the gateway's key. Code written by the policy may have the rollout's key and could use this key to
        # exclude its own rollout.
        if not _keys_equal(_read_api_key(http), self.key):
            raise GatewayRequestError(
                "finishing a rollout requires the gateway's key", status=403, code="gateway_key_needed"
            )
        error = parse_body(_FinishBody, await self._read_body(http)).error
        if error is not None and not rollout.finished:
            rollout.abandon_reason = f"the agent failed: {error}"
        await rollout.reject_further_requests()
        return JSONResponse(rollout.describe_state())

    async def _get_state(self, http: Request) -> Response:
        return JSONResponse(self._find_rollout(http).describe_state())

    def _find_rollout(self, http: Request) -> AgentRollout:
        name = http.path_params.get("name") or http.headers.get("x-session-id", "")
        rollout = self._rollouts.get(name)
        if rollout is None:
            raise GatewayRequestError(
                f"the rollout {name!r} does not exist or has ended", status=404, code="rollout_not_found"
            )
        if not (_keys_equal(_read_api_key(http), rollout.access.api_key) or _keys_equal(_read_api_key(http), self.key)):
            raise GatewayRequestError("invalid key for this rollout", status=401, code="invalid_api_key")
        return rollout

    async def _read_body(self, http: Request) -> bytes:
        parts, size, most = [], 0, self._settings.max_request_bytes
        try:
            async with asyncio.timeout(_BODY_DEADLINE):
                async for part in http.stream():
                    size += len(part)
                    if size > most:
                        raise GatewayRequestError(
                            f"the request body exceeds {most} bytes (gateway.max_request_bytes)",
                            status=413,
                            code="request_too_large",
                        )
                    parts.append(part)
        except TimeoutError:
            message = f"the request body did not arrive within {_BODY_DEADLINE:g} s"
            raise GatewayRequestError(message, status=408, code="request_timeout") from None
        return b"".join(parts)


def _read_api_key(http: Request) -> str:
    """Return the key of a request. Anthropic's clients send it in ``x-api-key``."""
    return http.headers.get("x-api-key") or http.headers.get("authorization", "").removeprefix("Bearer ")


def _keys_equal(key: str, expected: str) -> bool:
    return secrets.compare_digest(key.encode(), expected.encode())


def _record_undelivered(rollout: AgentRollout, task: asyncio.Future[Generation]) -> None:
    if not task.cancelled() and task.exception() is None:
        rollout.record_delivery(task.result(), received=False)


async def _disconnected_response(http: Request, error: Exception) -> Response:
    """Return an empty response, because the client disconnected before its request was complete."""
    return Response(status_code=499)


async def _unknown_path_response(http: Request, error: Exception) -> Response:
    """Return an error for a path or method that the gateway does not serve."""
    assert isinstance(error, HTTPException), "this handler is registered only for HTTPException"
    message = f"the gateway does not serve {http.method} {http.url.path}; it serves POST " + ", ".join(
        f"/v1{path}" for path in _DIALECTS
    )
    return await _error_response(http, GatewayRequestError(message, status=error.status_code, code="not_found"))


async def _error_response(http: Request, error: Exception) -> Response:
    """Return a GatewayRequestError in OpenAI's format."""
    assert isinstance(error, GatewayRequestError), "this handler is registered only for GatewayRequestError"
    return JSONResponse(error.openai_body(), status_code=error.status)
