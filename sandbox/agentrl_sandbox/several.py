"""``http://A,http://B``: several services with health checks. Calls to a lost service are sent to the others.

A service that fails a health check or a call receives no new calls. After ``service_deadline`` seconds of failures it
is lost: its pending calls are cancelled and its sessions end. It is used again after a successful health check.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from typing import TypeVar

from agentrl_sandbox.bookkeeping import SessionBook
from agentrl_sandbox.http import START_SECONDS, HttpSandbox, RetryTimer, ServiceRequest, ServiceSandbox
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import (
    PROPERTIES,
    AbsentError,
    BusyError,
    ClosedError,
    Isolation,
    SandboxError,
    SessionLimitError,
    StartError,
    UnknownSessionError,
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
        self.address, self.deadline = settings.url, settings.service_deadline
        self.verified = False  # its isolation and limits were checked and it ran a program; reset when it is lost
        self.error: SandboxError | None = None  # why it receives no calls; reset by a successful check
        self.failing_since = 0.0
        self.workers = 1
        self.calls: set[asyncio.Timeout] = set()

    @property
    def usable(self) -> bool:
        return self.verified and self.error is None

    async def send(self, request: ServiceRequest[_T]) -> _T:
        """Send a request once. Raises BusyError if a retry at this or another service may help."""
        try:
            async with asyncio.timeout(None) as limit:
                self.calls.add(limit)
                try:
                    return await self.once(request)
                finally:
                    self.calls.discard(limit)
        except TimeoutError:
            raise AbsentError(f"{self.address} was lost: {self.error}", begun=True) from None
        except AbsentError as error:
            self.fail(error)
            raise

    def fail(self, error: SandboxError) -> None:
        """Send no new calls until the next successful check."""
        if self.error is None:
            self.failing_since = time.monotonic()
            _log.warning("the sandbox at %s failed and receives no new calls: %s", self.address, error)
        self.error = error

    async def check(self) -> None:
        """Check the service's health and, if it is not in use, its isolation. Raises SandboxError if a check fails."""
        try:
            async with asyncio.timeout(min(_CHECK_SECONDS, self.deadline)):
                state = await self.read_state()
            if not self.usable:
                async with asyncio.timeout(self.deadline):
                    await self.verify(state)
        except TimeoutError:
            raise AbsentError("no answer", begun=False) from None
        self.workers = max(1, int(state.get("workers", 1)))
        if self.error is not None:
            _log.warning("the sandbox at %s has recovered", self.address)
        self.verified, self.error = True, None


class SeveralSandboxes(ServiceSandbox):
    """Runs programs at several services. Created by ``open_sandbox``.

    A program without a session runs at the service with the lowest load, and at another service if that service is
    lost. It may run twice, because it leaves no state. A session belongs to one service and ends with it.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self._services = [_Service(settings.model_copy(update={"url": address})) for address in settings.addresses]
        self._checks: list[asyncio.Task[None]] = []
        self._book: SessionBook[_Service, str] = SessionBook()

    @property
    def isolation(self) -> Isolation:
        """Properties that hold at all services in use."""
        known = [service.isolation for service in self._services if service.verified]
        layers = {
            name: known[0].layers[name] if all(one.layers[name] for one in known) else None
            for name in (PROPERTIES if known else ())
        }
        return Isolation(layers=layers, mode=", ".join(sorted({one.mode for one in known})) or "unknown")

    async def check(self) -> None:
        """Wait until a service is usable. Services that do not respond may join later.

        Raises StartError if no service responds, and UnisolatedError, RefusedError or StartError if a service is
        unusable.
        """
        deadline = time.monotonic() + min(START_SECONDS, self._settings.retry_deadline)
        while True:
            await asyncio.gather(*map(self._check, self._services))
            for service in self._services:
                if not isinstance(service.error, BusyError | None):
                    raise service.error
            if any(service.usable for service in self._services):
                break
            if time.monotonic() > deadline:
                raise StartError(f"no sandbox is ready: {self._outages}")
            await asyncio.sleep(random.uniform(0.1, 0.5))
        self._checks = [asyncio.create_task(self._watch(service)) for service in self._services]

    async def close_session(self, session: str) -> None:
        if not self._book.has_ended(session):
            with contextlib.suppress(UnknownSessionError):  # its service may be lost meanwhile
                await super().close_session(session)
                self._book.end(session, "it was closed")

    async def close(self) -> None:
        """Close the connections, which kills running programs."""
        self._closed = True
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        for service in self._services:
            await service.close()

    async def _call(self, request: ServiceRequest[_T], session: str | None = None) -> _T:
        """Send a request until it succeeds, to the session's service or to the service with the lowest load.

        Raises BusyError after the deadline, and UnknownSessionError once the session's service is lost.
        """
        timer = RetryTimer(request.seconds + self._settings.retry_deadline)
        tried: set[_Service] = set()
        losses = 0
        while not self._closed:
            busy: BusyError | SessionLimitError = AbsentError(f"no sandbox is usable: {self._outages}", begun=False)
            homes = self._book.homes()
            load = {one: (len(one.calls) + homes.count(one)) / one.workers for one in self._services if one.usable}
            service = min(load, key=lambda one: (one in tried, load[one], random.random()), default=None)
            if session is not None:
                service = self._book.find(session).home
            if service is not None:
                try:
                    answer = await service.send(request)
                    if request.opens_session:
                        self._book.add(service, str(answer), name=str(answer))
                    return answer
                except UnknownSessionError as error:
                    raise self._book.gone(session or "", str(error)) from None
                except (BusyError, SessionLimitError) as error:
                    busy = error
                tried.add(service)
                losses += session is None and isinstance(busy, AbsentError) and busy.begun
            # Without isolation, a program can end the service itself, so do not send it to another service.
            if losses and (losses > _MOST_LOSSES or self.isolation.missing):
                raise BusyError(f"gave up after {losses} services were lost while running the program: {busy}")
            if session is None and any(one.usable and one not in tried for one in self._services):
                continue
            tried.clear()
            if isinstance(busy, SessionLimitError):
                raise busy
            await timer.pause(busy, f"no response within {self._settings.retry_deadline:g} s")
        raise ClosedError("the sandbox was closed")

    async def _watch(self, service: _Service) -> None:
        """Check a service periodically."""
        while True:
            await asyncio.sleep((_CHECK_EVERY if service.usable else _RECHECK_EVERY) * random.uniform(0.8, 1.2))
            await self._check(service)

    async def _check(self, service: _Service) -> None:
        """Check a service, and declare it lost after ``service_deadline`` seconds of failures."""
        try:
            await service.check()
        except SandboxError as error:
            service.fail(error)
            if service.verified and time.monotonic() - service.failing_since >= service.deadline:
                _log.warning("the sandbox at %s and its sessions were lost: %s", service.address, error)
                service.verified = False
                self._book.end_at(service, f"its service, {service.address}, was lost: {error}")
                for limit in service.calls:
                    limit.reschedule(asyncio.get_running_loop().time())

    @property
    def _outages(self) -> str:
        return "; ".join(f"{one.address} ({one.error})" for one in self._services if not one.usable)
