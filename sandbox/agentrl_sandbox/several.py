"""``http://A,http://B``: several services with health checks. Calls to a lost service are sent to the others.

A service that fails a health check or a call receives no new calls. After ``service_deadline`` seconds of failures it
is lost: its pending calls are cancelled and its sessions end. It is used again after a successful health check.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from typing import TypeVar

from agentrl_sandbox.bookkeeping import SessionRegistry
from agentrl_sandbox.http import START_SECONDS, HttpSandbox, RetryTimer, ServiceRequest, ServiceSandbox
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import (
    BusyError,
    ClosedError,
    Isolation,
    SandboxError,
    SessionLimitError,
    StartError,
    UnknownSessionError,
    UnreachableServiceError,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_CHECK_EVERY, _RECHECK_EVERY = 5.0, 1.0  # seconds between health checks of usable and unusable services
_CHECK_SECONDS = 10.0  # for a response to a health check, or service_deadline if that is less
_MOST_LOSSES = 2  # of services during one call; its program may be the cause


class _Service(HttpSandbox):
    """A service, its health, and its calls in flight."""

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self.address = settings.url
        self.error: SandboxError | None = UnreachableServiceError(
            "not checked yet", begun=False
        )  # reason why it receives no calls
        self.failing_since = math.inf  # finite from a failure until the service recovers or is lost
        self.workers = 1
        self.calls: set[asyncio.Timeout] = set()

    async def send(self, request: ServiceRequest[_T]) -> _T:
        """Send a request once. Raises BusyError if a retry at this or another service may help."""
        limit = asyncio.timeout(None)
        self.calls.add(limit)
        try:
            async with limit:
                return await self.send_once(request)
        except TimeoutError:
            raise UnreachableServiceError(f"{self.address} was lost: {self.error}", begun=True) from None
        except UnreachableServiceError as error:
            self.fail(error)
            raise
        finally:
            self.calls.discard(limit)

    def fail(self, error: SandboxError) -> None:
        """Send no new calls until the next successful check."""
        if self.error is None:
            self.failing_since = time.monotonic()
            _log.warning("the sandbox at %s failed and receives no new calls: %s", self.address, error)
        self.error = error


class SeveralSandboxes(ServiceSandbox):
    """Runs programs at several services. Created by ``open_sandbox``.

    A program without a session runs at the service with the lowest load, and at another service if that service is
    lost. It may run twice, because it leaves no state. A session belongs to one service and ends with it.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self._services = [_Service(settings.model_copy(update={"url": address})) for address in settings.addresses]
        self._checks: list[asyncio.Task[None]] = []
        self._book: SessionRegistry[_Service, str] = SessionRegistry()

    @property
    def isolation(self) -> Isolation:
        """Properties that hold at all services that have responded."""
        known = [service.isolation for service in self._services if service.isolation.layers]
        layers = {name: layer for one in known for name, layer in one.layers.items()}
        layers |= dict.fromkeys((name for one in known for name in one.missing), None)
        return Isolation(layers=layers, mode=", ".join(sorted({one.mode for one in known})) or "unknown")

    async def check(self) -> None:
        """Wait until a service is usable. Services that do not respond may join later, but a faulty one is an error."""
        deadline = time.monotonic() + min(START_SECONDS, self._settings.retry_deadline)
        while True:
            await asyncio.gather(*map(self._check, self._services))
            for service in self._services:
                if not isinstance(service.error, BusyError | None):
                    raise service.error
            if any(service.error is None for service in self._services):
                break
            if time.monotonic() > deadline:
                raise StartError(f"no sandbox is ready: {self._outages}")
            await asyncio.sleep(random.uniform(0.1, 0.5))
        self._checks = [asyncio.create_task(self._watch(service)) for service in self._services]

    async def close_session(self, session: str) -> None:
        with contextlib.suppress(UnknownSessionError):  # the session has ended, possibly with its service
            await super().close_session(session)
        self._book.record_end(session, "it was closed")

    async def close(self) -> None:
        self._closed = True
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        for service in self._services:
            await service.close()

    async def _call(self, request: ServiceRequest[_T], session: str | None = None) -> _T:
        timer = RetryTimer(request.seconds + self._settings.retry_deadline)
        losses = 0
        while not self._closed:
            busy: BusyError | SessionLimitError = UnreachableServiceError(
                f"no sandbox is usable: {self._outages}", begun=False
            )
            homes = self._book.owners()
            load = {one: (len(one.calls) + homes.count(one)) / one.workers for one in self._services}
            order = sorted(self._services, key=lambda one: (load[one], random.random()))
            usable = (one for one in order if one.error is None)  # when its turn comes
            for service in usable if session is None else [self._book.find(session).owner]:
                try:
                    answer = await service.send(request)
                    if request.opens_session:
                        self._book.add(service, str(answer), name=str(answer))
                    return answer
                except (BusyError, SessionLimitError) as error:
                    busy = error
                losses += session is None and isinstance(busy, UnreachableServiceError) and busy.begun
                # Without isolation, a program can end the service itself, so do not send it to another service.
                if losses and (losses > _MOST_LOSSES or self.isolation.missing):
                    raise BusyError(f"gave up after {losses} services were lost while running the program: {busy}")
            if isinstance(busy, SessionLimitError):
                raise busy
            await timer.pause(busy, f"no response within {self._settings.retry_deadline:g} s")
        raise ClosedError("the sandbox was closed")

    async def _watch(self, service: _Service) -> None:
        while True:
            await asyncio.sleep((_RECHECK_EVERY if service.error else _CHECK_EVERY) * random.uniform(0.8, 1.2))
            await self._check(service)

    async def _check(self, service: _Service) -> None:
        """Check a service's health and, if it is not in use, its isolation."""
        deadline = self._settings.service_deadline
        try:
            async with asyncio.timeout(min(_CHECK_SECONDS, deadline)):
                state = await service.read_state()
            if service.error:
                async with asyncio.timeout(deadline):
                    await service.check_state(state)
                if self._checks:
                    _log.warning("the sandbox at %s has recovered", service.address)
            service.workers = max(1, int(state.get("workers", 1)))
            service.error = None
        except TimeoutError:
            service.fail(UnreachableServiceError("no answer", begun=False))
        except SandboxError as error:
            service.fail(error)
        if service.error and time.monotonic() - service.failing_since >= deadline:
            _log.warning("the sandbox at %s and its sessions were lost: %s", service.address, service.error)
            service.failing_since = math.inf
            self._book.record_end_at_owner(service, f"its service, {service.address}, was lost: {service.error}")
            for limit in service.calls:
                limit.reschedule(asyncio.get_running_loop().time())

    @property
    def _outages(self) -> str:
        return "; ".join(f"{one.address} ({one.error})" for one in self._services if one.error)
