"""``http://A,http://B``: a list of services with health checks. Calls of a lost service go to the others.

A service that fails a health check or a call gets no new calls. After ``service_deadline`` seconds of failures it is
lost: calls that still wait there are cut off, and its sessions have ended. It is used again after its next good check.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from typing import TypeVar

from agentrl_sandbox.bookkeeping import SessionBook
from agentrl_sandbox.call import Call, CallSandbox
from agentrl_sandbox.http import HttpSandbox, ServiceRequest, closing, forking, opening, running
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import (
    PROPERTIES,
    AbsentError,
    BusyError,
    ClosedError,
    Execution,
    Isolation,
    SandboxError,
    SessionLimitError,
    StartError,
    UnknownSessionError,
    failed_execution,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_START_SECONDS = 60.0
_OTHERS_SECONDS = 10.0  # that the others have to answer once one is in use
_CHECK_EVERY, _RECHECK_EVERY = 5.0, 1.0  # seconds between health checks of a service that answers, and that does not
_CHECK_SECONDS = 10.0  # for the answer to a health check, or service_deadline if that is less
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_MOST_LOSSES = 2  # of services under one call: its program may be what ends them


class _Service:
    """One service and the calls in flight there."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.http = HttpSandbox(settings)
        self.address = settings.url
        self.deadline = settings.service_deadline
        self.proved = False  # it has shown its isolation and limits and run a program; until it is lost
        self.failing_since: float | None = None
        self.why = "no answer yet"
        self.workers = 1
        self.calls: set[asyncio.Timeout] = set()
        self.check_now = asyncio.Event()

    @property
    def usable(self) -> bool:
        return self.proved and self.failing_since is None

    async def send(self, request: ServiceRequest[_T]) -> _T:
        """Send a request once. Raises BusyError if another attempt may help, here or elsewhere."""
        try:
            async with asyncio.timeout(None) as limit:
                self.calls.add(limit)
                try:
                    return await self.http.once(request)
                finally:
                    self.calls.discard(limit)
        except TimeoutError:
            raise AbsentError(f"{self.address} is lost: {self.why}", begun=True) from None
        except AbsentError as error:
            self.fail(str(error))
            self.check_now.set()
            raise

    async def check(self) -> None:
        """Check its health, and also its isolation if it is not in use. Raises SandboxError."""
        try:
            async with asyncio.timeout(min(_CHECK_SECONDS, self.deadline)):
                state = await self.http.look()
            if not self.usable:
                async with asyncio.timeout(self.deadline):
                    await self.http.prove(state)
        except TimeoutError:
            raise AbsentError("no answer", begun=False) from None
        self.workers = max(1, int(state.get("workers", 1)))
        if self.failing_since is not None:
            _log.warning("the sandbox at %s works again", self.address)
        self.proved, self.failing_since = True, None

    def fail(self, why: str) -> None:
        """Send no new calls until the next good check."""
        self.why = why
        if self.failing_since is None:
            self.failing_since = time.monotonic()
            _log.warning("the sandbox at %s gets no calls for now: %s", self.address, why)


class SeveralSandboxes(CallSandbox):
    """Runs programs at several services. Created by ``open_several``.

    A program without a session goes to the service with the least load, and to another one if that is lost: it leaves
    nothing behind but its result, so it may run twice. A session lives at one service and ends with it.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._services = [_Service(settings.model_copy(update={"url": address})) for address in settings.addresses]
        self._watching: list[asyncio.Task[None]] = []
        self._book: SessionBook[_Service, str] = SessionBook()
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def isolation(self) -> Isolation:
        """The properties that hold at every service in use."""
        known = [service.http.isolation for service in self._services if service.proved]
        layers = {
            name: known[0].layers[name] if all(one.layers[name] for one in known) else None
            for name in (PROPERTIES if known else ())
        }
        return Isolation(layers=layers, mode=", ".join(sorted({one.mode for one in known})) or "unknown")

    async def open(self) -> None:
        """Wait for the services. Those that do not answer may join later.

        Raises StartError if none answers, and UnisolatedError, RefusedError and StartError if one cannot be used.
        """
        checks = {asyncio.create_task(self._first_check(service)) for service in self._services}
        try:
            seconds = min(_START_SECONDS, self._settings.retry_deadline)
            await asyncio.wait(checks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait(checks, timeout=min(seconds, _OTHERS_SECONDS))
            for check in done:
                check.result()
        finally:
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        if not any(service.usable for service in self._services):
            raise StartError(f"no sandbox is ready: {self._outages}")
        self._watching = [asyncio.create_task(self._watch(service)) for service in self._services]

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """See ``Sandbox``. Retries at the same or another service, up to ``retry_deadline``.

        Raises ClosedError, UnknownSessionError, RefusedError, and ValueError for impossible arguments.
        """
        if self._closed:
            raise ClosedError("the sandbox was closed")
        started, default = time.monotonic(), self._settings.timeout
        try:
            if call.session is None:
                return (await self._send(running(call, None, request_id, default=default)))[1]
            async with self._book.turn(call.session) as booked:
                request = running(call, booked.number, request_id, default=default)
                return (await self._send(request, call.session))[1]
        except (BusyError, ClosedError) as error:  # closed while it ran
            return failed_execution(str(error), started)

    async def open_session(self) -> str:
        """See ``Sandbox``. Raises BusyError if no service has capacity until ``retry_deadline``."""
        return self._book.add(*await self._send(opening()))

    async def fork_session(self, session: str) -> str:
        """See ``Sandbox``. The fork lives where the session lives."""
        return self._book.add(*await self._send(forking(self._book.find(session).number), session))

    async def close_session(self, session: str) -> None:
        """See ``Sandbox``. Raises BusyError if its service is unreachable until ``retry_deadline``."""
        if not self._book.has_ended(session):
            with contextlib.suppress(UnknownSessionError):  # it may end with its service meanwhile
                await self._send(closing(self._book.find(session).number), session)
                self._book.end(session, "it was closed")

    async def close(self) -> None:
        """Close the connections, which kills running programs."""
        self._closed = True
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for service in self._services:
            await service.http.close()
        self._changed.set()

    async def _send(self, request: ServiceRequest[_T], session: str | None = None) -> tuple[_Service, _T]:
        """Send a request until it succeeds: to a session's service, or first to the one with the least load.

        Raises BusyError after the deadline, and UnknownSessionError once the session's service is lost.
        """
        deadline = time.monotonic() + request.seconds + self._settings.retry_deadline
        tried: set[_Service] = set()
        pause, losses = _FIRST_PAUSE, 0
        while True:
            home = None if session is None else self._book.find(session).home
            service = home or await self._choose(tried, deadline)
            try:
                return service, await service.send(request)
            except UnknownSessionError as error:
                raise self._book.gone(session or "", str(error)) from None
            except (BusyError, SessionLimitError) as error:
                busy = error
            if session is None:
                losses += isinstance(busy, AbsentError) and busy.begun
                if losses and (losses > _MOST_LOSSES or self.isolation.missing):
                    raise BusyError(f"given up after {losses} services were lost while it ran: {busy}") from busy
                tried.add(service)
                if not tried.issuperset(one for one in self._services if one.usable):
                    continue
                tried.clear()
            if isinstance(busy, SessionLimitError):
                raise busy
            rest = max(pause, busy.retry_after) * random.uniform(0.5, 1.5)
            if time.monotonic() + rest > deadline:
                raise BusyError(f"no answer within {self._settings.retry_deadline:g} s: {busy}") from busy
            await asyncio.sleep(rest)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _choose(self, tried: set[_Service], deadline: float) -> _Service:
        """The service for the next call, once one is usable. Raises BusyError after the deadline."""
        while not self._closed:
            homes = self._book.homes()
            if usable := [service for service in self._services if service.usable]:
                load = {one: (len(one.calls) + homes.count(one)) / one.workers for one in usable}
                return min(usable, key=lambda one: (one in tried, load[one], random.random()))
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                seconds = self._settings.retry_deadline
                raise BusyError(f"no sandbox works, for {seconds:g} s: {self._outages}") from None
        raise ClosedError("the sandbox was closed")

    async def _first_check(self, service: _Service) -> None:
        """Check until the service answers. Raises SandboxError if it can never be used."""
        while True:
            try:
                return await service.check()
            except BusyError as error:
                service.why = str(error)
            await asyncio.sleep(random.uniform(0.1, 0.5))

    async def _watch(self, service: _Service) -> None:
        """Check the service again and again, and declare it lost after ``service_deadline`` seconds of failures."""
        while True:
            pause = _CHECK_EVERY if service.usable else _RECHECK_EVERY
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(0.8, 1.2)):
                    await service.check_now.wait()
            service.check_now.clear()
            try:
                await service.check()
                self._changed.set()
            except SandboxError as error:
                service.fail(str(error))
                silent = time.monotonic() - (service.failing_since or 0.0)
                if service.proved and silent >= service.deadline:
                    _log.warning("the sandbox at %s is lost, with its sessions: %s", service.address, service.why)
                    service.proved = False
                    self._book.end_at(service, f"its service, {service.address}, was lost: {service.why}")
                    for limit in service.calls:
                        limit.reschedule(asyncio.get_running_loop().time())

    @property
    def _outages(self) -> str:
        return "; ".join(f"{one.address} ({one.why})" for one in self._services if not one.usable)


async def open_several(settings: SandboxSettings) -> SeveralSandboxes:
    """Connect to the services. Raises StartError, UnisolatedError (unless ``allow_unisolated``) and RefusedError."""
    sandbox = SeveralSandboxes(settings)
    try:
        await sandbox.open()
    except BaseException:
        await sandbox.close()
        raise
    return sandbox
