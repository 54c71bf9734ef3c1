"""``http://A,http://B``: a list of services with health checks. Calls to a lost service are sent to other services."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from typing import TypeVar

from agentrl_sandbox.bookkeeping import SessionRegistry
from agentrl_sandbox.http import HttpSandbox, RetryTimer, ServiceRequest, ServiceSandbox
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import (
    BusyError,
    ClosedError,
    Isolation,
    SandboxError,
    SessionLimitError,
    UnknownSessionError,
    UnreachableServiceError,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_CHECK_EVERY, _RECHECK_EVERY = 5.0, 1.0  # seconds between health checks of usable and unusable services
_CHECK_SECONDS = 10.0  # maximum duration of a health check, or service_deadline if that is less
_MAX_LOSSES = 2  # a call that loses more services fails, because its program may be the cause


class _MonitoredService(HttpSandbox):
    """One service of the list, its health, and its pending calls."""

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self.error: SandboxError | None = UnreachableServiceError("not checked yet", begun=False)  # None: usable
        self.failing_since = math.inf  # start of the latest outage; infinite if there was none or the service is lost
        self.workers = 1

    def handle_request_failure(self, error: SandboxError) -> None:
        """Send no new calls until the next successful health check."""
        if self.error is None:
            self.failing_since = time.monotonic()
            _log.warning("the sandbox at %s failed and receives no new calls: %s", self.url, error)
        self.error = error


class SeveralSandboxes(ServiceSandbox):
    """Runs programs at several services. Created by ``open_sandbox``.

    A service that fails a health check or a call receives no new calls until a health check succeeds. If it fails for
    ``service_deadline`` seconds, it is lost: its pending calls are cancelled and its sessions end. A program without a
    session then runs again at another service. The second run is safe, because such a program leaves no state.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self._services = [_MonitoredService(settings.model_copy(update={"url": url})) for url in settings.addresses]
        self._health_checks: list[asyncio.Task[None]] = []
        self._sessions: SessionRegistry[_MonitoredService, str] = SessionRegistry()

    @property
    def isolation(self) -> Isolation:
        """Properties that hold at all services that have responded."""
        return Isolation.combine([service.isolation for service in self._services if service.isolation.layers])

    async def check_without_retries(self) -> None:
        """Check all services. Raises the error of a faulty service. Services that do not respond may join later."""
        await asyncio.gather(*map(self._check_health, self._services))
        for service in self._services:
            if not isinstance(service.error, BusyError | None):
                raise service.error
        if all(service.error for service in self._services):
            raise BusyError(self._outages)
        self._health_checks = [asyncio.create_task(self._check_repeatedly(service)) for service in self._services]

    async def close_session(self, session: str) -> None:
        with contextlib.suppress(UnknownSessionError):  # the session has ended, possibly with its service
            await super().close_session(session)
        self._sessions.record_end(session, "it was closed")

    async def close(self) -> None:
        self._closed = True
        for check in self._health_checks:
            check.cancel()
        await asyncio.gather(*self._health_checks, return_exceptions=True)
        for service in self._services:
            await service.close()

    async def _request_with_retries(self, request: ServiceRequest[_T], session: str | None = None) -> _T:
        timer = RetryTimer(request.seconds + self._settings.retry_deadline)
        losses = 0
        while not self._closed:
            busy: BusyError | SessionLimitError = BusyError(f"no sandbox is usable: {self._outages}", retry_after=0)
            usable = (service for service in sorted(self._services, key=self._load_per_worker) if service.error is None)
            for service in usable if session is None else [self._sessions.find(session).owner]:
                try:
                    answer = await service.request_without_retries(request)
                    if request.opens_session:
                        self._sessions.add(service, str(answer), name=str(answer))
                    return answer
                except (BusyError, SessionLimitError) as error:
                    busy = error
                losses += session is None and isinstance(busy, UnreachableServiceError) and busy.begun
                # Without isolation, the program may have ended the service. Do not run the program on another service.
                if losses and (losses > _MAX_LOSSES or self.isolation.missing):
                    raise BusyError(f"gave up after {losses} services were lost while running the program: {busy}")
            if isinstance(busy, SessionLimitError):
                raise busy
            await timer.pause(busy, f"no response within {self._settings.retry_deadline:g} s")
        raise ClosedError("the sandbox was closed")

    def _load_per_worker(self, service: _MonitoredService) -> tuple[float, float]:
        """Return the pending calls and sessions per worker. A random number orders services with equal load."""
        return (len(service.pending) + self._sessions.count_at(service)) / service.workers, random.random()

    async def _check_repeatedly(self, service: _MonitoredService) -> None:
        while True:
            await asyncio.sleep((_RECHECK_EVERY if service.error else _CHECK_EVERY) * random.uniform(0.8, 1.2))
            await self._check_health(service)

    async def _check_health(self, service: _MonitoredService) -> None:
        """Check a service's health and, if the service is currently unusable, also its isolation."""
        deadline = self._settings.service_deadline
        try:
            async with asyncio.timeout(min(_CHECK_SECONDS, deadline)):
                state = await service.read_state()
            if service.error:
                async with asyncio.timeout(deadline):
                    await service.check_reported_state(state)
                if self._health_checks:
                    _log.warning("the sandbox at %s has recovered", service.url)
            service.workers = max(1, int(state.get("workers", 1)))
            service.error = None
        except TimeoutError:
            service.handle_request_failure(UnreachableServiceError("no answer", begun=False))
        except SandboxError as error:
            service.handle_request_failure(error)
        if service.error and time.monotonic() - service.failing_since >= deadline:
            _log.warning("the sandbox at %s and its sessions were lost: %s", service.url, service.error)
            service.failing_since = math.inf
            self._sessions.record_end_at_owner(service, f"its service, {service.url}, was lost: {service.error}")
            service.cancel_requests(f"{service.url} was lost: {service.error}")

    @property
    def _outages(self) -> str:
        return "; ".join(f"{service.url} ({service.error})" for service in self._services if service.error)
