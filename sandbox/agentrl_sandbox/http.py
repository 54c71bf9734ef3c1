"""``http://HOST:PORT``: programs run at a service. Only this module uses httpx."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import random
import ssl
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import httpx

from agentrl_sandbox.call import Call, CallSandbox, to_base64, validate_timeout
from agentrl_sandbox.settings import LIMITS, SandboxSettings
from agentrl_sandbox.types import (
    PROPERTIES,
    BusyError,
    ClosedError,
    Execution,
    Isolation,
    Outcome,
    RefusedError,
    SandboxError,
    SessionForkError,
    SessionLimitError,
    StartError,
    UnisolatedError,
    UnknownSessionError,
    UnreachableServiceError,
    infrastructure_failure,
)

_T = TypeVar("_T")
JsonObject = Mapping[str, Any]
"""An unchecked response of the service."""

_log = logging.getLogger(__name__)
_MAX_REQUESTS = 256  # concurrent requests unless ``workers`` is set; further calls wait in this process
_START_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_READ_TIMEOUT_SECONDS = 600.0  # in addition to a program's timeout, for the service's queue
_IDLE_SECONDS = 30.0  # idle connections are closed after this time, before the service closes them
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_ERRORS: dict[str, type[SandboxError]] = {
    error.__name__: error for error in (UnknownSessionError, SessionLimitError, SessionForkError)
}


@dataclass(frozen=True, kw_only=True)
class ServiceRequest(Generic[_T]):
    """A request to a service. ``seconds`` is the timeout of its program, and ``read`` parses the response."""

    method: str
    path: str
    body: object = None
    seconds: float = 0.0
    read: Callable[[JsonObject], _T]
    opens_session: bool = False  # the response is the name of a new session


class RetryTimer:
    """Pauses between the attempts of a request: exponential backoff with jitter, up to a deadline."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._pause = _FIRST_PAUSE

    async def pause(self, busy: BusyError, message: str) -> None:
        """Sleep before the next attempt. Raises BusyError, prefixed with ``message``, if the deadline is too close."""
        seconds = max(self._pause, busy.retry_after) * random.uniform(0.5, 1.5)
        if time.monotonic() + seconds > self._deadline:
            raise BusyError(f"{message}: {busy}") from busy
        await asyncio.sleep(seconds)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class ServiceSandbox(CallSandbox, ABC):
    """Base class that implements ``Sandbox`` by sending requests, which are retried until ``retry_deadline``."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._closed = False

    async def open(self) -> Self:
        """Wait until a service is ready, and check it.

        Raises StartError if no service becomes ready or a service has other limits or cannot run programs,
        UnisolatedError if a property is missing (unless ``allow_unisolated``), and RefusedError if a service rejects
        the request.
        """
        deadline = time.monotonic() + min(_START_SECONDS, self._settings.retry_deadline)
        try:
            while True:
                try:
                    await self.check_without_retries()
                    return self
                except BusyError as error:
                    if time.monotonic() > deadline:
                        raise StartError(f"no sandbox is ready at {self._settings.url}: {error}") from error
                await asyncio.sleep(random.uniform(0.1, 0.5))
        except BaseException:
            await self.close()
            raise

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """Run a program; see ``Sandbox``. Raises ClosedError after ``close`` and RefusedError for a rejected call."""
        if self._closed:
            raise ClosedError("the sandbox was closed")
        request = build_execute_request(call, request_id, default=self._settings.timeout)
        started = time.monotonic()
        try:
            return await self._request_with_retries(request, call.session)
        except (BusyError, ClosedError) as error:  # the sandbox may be closed while the program runs
            return infrastructure_failure(str(error), started)

    async def open_session(self) -> str:
        """Open a session; see ``Sandbox``. Raises BusyError if no capacity becomes available by ``retry_deadline``."""
        return await self._request_with_retries(
            ServiceRequest(method="POST", path="/v1/sessions", body={}, read=_parse_session, opens_session=True)
        )

    async def fork_session(self, session: str) -> str:
        """Fork a session; see ``Sandbox``. Raises BusyError if no capacity becomes available by ``retry_deadline``."""
        path = f"/v1/sessions/{session}/fork"
        request = ServiceRequest(method="POST", path=path, body={}, read=_parse_session, opens_session=True)
        return await self._request_with_retries(request, session)

    async def close_session(self, session: str) -> None:
        """Close a session; see ``Sandbox``. Raises BusyError if the service does not respond by ``retry_deadline``."""
        path = f"/v1/sessions/{session}"
        await self._request_with_retries(ServiceRequest(method="DELETE", path=path, read=lambda answer: None), session)

    @abstractmethod
    async def check_without_retries(self) -> None:
        """Check a service. Raises the same errors as ``open``, and BusyError if the service is not ready."""

    @abstractmethod
    async def _request_with_retries(self, request: ServiceRequest[_T], session: str | None = None) -> _T:
        """Send a request (for ``session``, if set) until the response is valid. Raises BusyError after the deadline."""


class HttpSandbox(ServiceSandbox):
    """Runs programs at a service. Created by ``open_sandbox``."""

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self.url = settings.url.rstrip("/")
        self._loop = asyncio.get_running_loop()
        self._isolation = Isolation(layers={}, mode="unknown")
        token = settings.token or os.environ.get("SANDBOX_TOKEN")
        self._headers = {"Content-Type": "application/json"}
        if token not in (None, "none"):
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = ssl.create_default_context()
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._active: set[httpx.AsyncHTTPTransport] = set()
        self._request_slots = asyncio.Semaphore(settings.workers or _MAX_REQUESTS)
        self._outage_logged = False  # True from the warning until a request receives a response
        self._why_cancelled = ""
        self.pending: set[asyncio.Timeout] = set()  # one timeout for each request that waits or has been sent

    @property
    def isolation(self) -> Isolation:
        return self._isolation

    async def check_without_retries(self) -> None:
        """Check the service's isolation and limits, and the token."""
        await self.check_reported_state(await self.read_state())

    async def check_reported_state(self, state: JsonObject) -> None:
        """Check the isolation and limits reported by the service, and run a program.

        Raises the same errors as ``open``.
        """
        self._isolation = _parse_isolation(state)
        missing = self._isolation.missing
        if missing and not self._settings.allow_unisolated:
            why = "Fix the service's machine, or set allow_unisolated=true to run programs without these properties"
            raise UnisolatedError(f"the sandbox at {self.url} does not isolate programs", missing, why)
        self._check_limits(state)
        if (first := await self.execute("pass")).outcome is not Outcome.OK:
            raise StartError(f"the sandbox at {self.url} cannot run programs: {first.stderr}")

    async def close(self) -> None:
        """Close the connections and thereby kill running programs."""
        self._closed = True
        for connection in (*self._idle, *self._active):
            await connection.aclose()

    async def request_without_retries(self, request: ServiceRequest[_T]) -> _T:
        """Send a request without retries.

        Raises BusyError if a retry may help (UnreachableServiceError: no response).
        """
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a sandbox belongs to the event loop that opened it: open another sandbox in this loop")
        limit = asyncio.timeout(None)
        self.pending.add(limit)
        try:
            async with limit, self._request_slots:
                return request.read(await self._send_request(request))
        except TimeoutError:
            raise UnreachableServiceError(self._why_cancelled, begun=True) from None
        except UnreachableServiceError as error:
            if not self._closed:
                self.handle_request_failure(error)
            raise
        finally:
            self.pending.discard(limit)

    def handle_request_failure(self, error: SandboxError) -> None:
        """Handle a request without a response. Logs one warning per outage."""
        if not self._outage_logged:
            self._outage_logged = True
            _log.warning(
                "the sandbox at %s does not respond (%s); calls are retried for up to %g s. Restart it if it is down",
                *(self.url, error, self._settings.retry_deadline),
            )

    def cancel_requests(self, why: str) -> None:
        """Fail all pending requests with UnreachableServiceError."""
        self._why_cancelled = why
        for limit in self.pending:
            limit.reschedule(0)

    async def read_state(self) -> JsonObject:
        """Return the state of the service. Raises BusyError if it is not ready, StartError if it is not a sandbox."""
        state = await self._send_request(ServiceRequest(method="GET", path="/ready", read=dict))
        if isinstance(state, dict) and isinstance(state.get("isolation"), dict):
            return state
        raise StartError(f"{self.url} is not an agentrl-sandbox service")

    async def _request_with_retries(self, request: ServiceRequest[_T], session: str | None = None) -> _T:
        timer = RetryTimer(request.seconds + self._settings.retry_deadline)
        while True:
            try:
                return await self.request_without_retries(request)
            except BusyError as error:
                busy = error
            await timer.pause(busy, f"{self.url} did not respond within {self._settings.retry_deadline:g} s")

    async def _send_request(self, request: ServiceRequest[_T]) -> JsonObject:
        """Send one request. Raises BusyError if a retry may help."""
        if self._closed:
            raise ClosedError("the sandbox was closed")
        timeout = httpx.Timeout(
            _CONNECT_SECONDS, read=request.seconds + _READ_TIMEOUT_SECONDS, write=_READ_TIMEOUT_SECONDS
        )
        sent = httpx.Request(
            request.method,
            self.url + request.path,
            headers=self._headers,
            content=b"" if request.body is None else json.dumps(request.body).encode("ascii"),
            extensions={"timeout": timeout.as_dict()},
        )
        connection = self._idle.pop() if self._idle else self._new_connection()
        self._active.add(connection)
        try:
            response = await connection.handle_async_request(sent)
            try:
                await response.aread()
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            begun = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise UnreachableServiceError(f"{type(error).__name__}: {error}", begun=begun) from error
        finally:
            self._active.discard(connection)
            self._idle.append(connection)
        self._outage_logged = False
        if not response.is_success:
            raise self._response_error(response)
        try:
            return response.json() if response.content else {}
        except ValueError as error:  # not text, or not JSON
            raise BusyError(f"{self.url} sent a response that is not JSON: {error}") from error

    def _new_connection(self) -> httpx.AsyncHTTPTransport:
        """Create a transport for one request at a time. A pool would scan all connections on every request.

        A complete client would follow redirects, store cookies, use this process's proxies, and take twice the time.
        """
        return httpx.AsyncHTTPTransport(
            verify=self._tls,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=_IDLE_SECONDS),
            trust_env=False,
        )

    def _response_error(self, response: httpx.Response) -> Exception:
        try:
            problem = response.json()
            why = f"{self.url} answered {response.status_code}: {problem['detail']}"
            kind = _ERRORS.get(problem.get("error"))
        except (ValueError, KeyError, TypeError, AttributeError):
            why, kind = f"{self.url} answered {response.status_code}", None
        if kind is not None:
            return kind(why)
        if response.status_code == 429 or response.status_code >= 500:
            after = response.headers.get("Retry-After", "")
            return BusyError(why, retry_after=int(after) if after.isdigit() else 1)
        if response.status_code == 422:
            return ValueError(why)
        if response.status_code == 401:
            why += ": set token or the environment variable SANDBOX_TOKEN"
        return RefusedError(why)

    def _check_limits(self, state: JsonObject) -> None:
        """Raise StartError if a limit in these settings differs from the service's. Clients cannot change limits."""
        for name in self._settings.model_fields_set & set(LIMITS):
            wanted, there = getattr(self._settings, name), state.get("limits", {}).get(name)
            if there is None:
                raise StartError(f"the sandbox at {self.url} does not report {name} (required: {wanted})")
            if there != wanted:
                raise StartError(
                    f"the sandbox at {self.url} has {name}={there:g}, not {wanted}: change the limit where "
                    "the service runs"
                )


def build_execute_request(call: Call, request_id: str | None, *, default: float) -> ServiceRequest[Execution]:
    """Build a request to run a program, with a default timeout in seconds. Raises ValueError for an invalid timeout."""
    seconds = validate_timeout(default if call.timeout is None else call.timeout)
    body = {
        "program": call.program,
        "timeout": seconds,
        "stdin": call.stdin,
        "request_id": request_id or uuid.uuid4().hex,
        "files": to_base64(call.files),
        "fetch_files": call.fetch_files,
    }
    path = "/v1/execute" if call.session is None else f"/v1/sessions/{call.session}/execute"
    return ServiceRequest(method="POST", path=path, body=body, seconds=seconds, read=_parse_execution)


def _parse_isolation(state: JsonObject) -> Isolation:
    layers = state["isolation"].get("layers", {})
    return Isolation(
        layers={name: layers.get(name) for name in PROPERTIES}, mode=str(state["isolation"].get("mode", "unknown"))
    )


def _parse_session(answer: JsonObject) -> str:
    """Parse the name of a session. Raises BusyError for an invalid response."""
    try:
        return str(answer["session"])
    except (KeyError, TypeError) as error:
        raise BusyError(f"the service sent an invalid response: {error}") from error


def _parse_execution(answer: JsonObject) -> Execution:
    """Parse an execution. Raises BusyError for an invalid response, as for a broken connection."""
    try:
        files = {name: base64.b64decode(content) for name, content in answer["files"].items()}
        outcome, seconds = Outcome(answer["outcome"]), float(answer["seconds"])
        return Execution(**{**answer, "outcome": outcome, "seconds": seconds, "files": files})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BusyError(f"the service sent an invalid response: {error}") from error
