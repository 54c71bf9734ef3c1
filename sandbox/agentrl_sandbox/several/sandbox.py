"""``http://A,http://B``: programs are shared by several services, and what one loses goes to the others."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Sequence
from typing import TypeVar

from agentrl_sandbox.call import Call, CallSandbox
from agentrl_sandbox.errors import (
    AbsentError,
    BusyError,
    ClosedError,
    SessionLimitError,
    StartError,
    UnknownSessionError,
)
from agentrl_sandbox.http import ServiceRequest, closing, forking, opening, running
from agentrl_sandbox.session_book import SessionBook
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.several.member import ServiceMember
from agentrl_sandbox.types import PROPERTIES, Execution, Isolation, failed_execution

_T = TypeVar("_T")
_START_SECONDS = 60.0
_OTHERS_SECONDS = 10.0  # that the others have to answer once one is in use
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_MOST_LOSSES = 2  # of services under one call: it may be what ends them


class SeveralSandboxes(CallSandbox):
    """Runs programs at several services. Created by ``open_several``.

    A program without a session goes to the service with the least load, and to another one if that is lost: it leaves
    nothing behind but its result, so it may run twice. A session lives at one service and ends with it.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._members = [
            ServiceMember(settings.model_copy(update={"url": address}), self._changed_at)
            for address in settings.addresses
        ]
        self._watching: list[asyncio.Task[None]] = []
        self._book: SessionBook[ServiceMember, str] = SessionBook()
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def isolation(self) -> Isolation:
        """What holds at every service that is in use."""
        known = [member.service.isolation for member in self._members if member.proved]
        layers = {
            name: known[0].layers[name] if all(one.layers[name] for one in known) else None
            for name in PROPERTIES
            if known
        }
        return Isolation(layers=layers, mode=", ".join(sorted({one.mode for one in known})) or "unknown")

    async def open(self) -> None:
        """Wait for the services, which are then watched. Those that do not answer may join later.

        Raises StartError if none answers, and UnisolatedError, RefusedError and StartError if one cannot be used.
        """
        proving = {asyncio.create_task(member.prove()) for member in self._members}
        try:
            seconds = min(_START_SECONDS, self._settings.retry_deadline)
            await asyncio.wait(proving, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait(proving, timeout=min(seconds, _OTHERS_SECONDS))
            for task in done:
                task.result()
        finally:
            for task in proving:
                task.cancel()
            await asyncio.gather(*proving, return_exceptions=True)
        if not any(member.usable for member in self._members):
            raise StartError(f"no sandbox is ready: {self._outages}")
        for member in self._members:
            if not member.usable:
                member.note_silence(member.why)
        self._watching = [asyncio.create_task(member.watch()) for member in self._members]

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """See ``Sandbox``. Retries, here or there, up to ``retry_deadline``.

        Raises ClosedError, UnknownSessionError, RefusedError, and ValueError for impossible arguments.
        """
        if self._closed:
            raise ClosedError("the sandbox was closed")
        started = time.monotonic()
        try:
            if call.session is not None:
                return await self._in_session(call, call.session, request_id)
            _, execution = await self._anywhere(running(call, None, request_id, default=self._settings.timeout))
            return execution
        except (BusyError, ClosedError) as error:  # closed while it ran
            return failed_execution(str(error), started)

    async def open_session(self) -> str:
        """See ``Sandbox``. Raises BusyError if no service has capacity until ``retry_deadline``."""
        member, number = await self._anywhere(opening(), session=True)
        return self._book.add(member, number)

    async def fork_session(self, session: str) -> str:
        """See ``Sandbox``. The fork lives where the session lives."""
        booked = self._book.find(session)
        return self._book.add(booked.home, await self._there(booked.home, forking(booked.number), session))

    async def close_session(self, session: str) -> None:
        """See ``Sandbox``. Raises BusyError if its service is unreachable until ``retry_deadline``."""
        if self._book.has_ended(session):
            return
        booked = self._book.find(session)
        with contextlib.suppress(UnknownSessionError):  # it has ended with its service
            await self._there(booked.home, closing(booked.number), session)
        self._book.end(session, "it was closed")

    async def close(self) -> None:
        """Close the connections, which kills running programs."""
        self._closed = True
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for member in self._members:
            await member.service.close()
        self._changed.set()

    # -- where calls go -------------------------------------------------------------------------------------------

    async def _anywhere(self, request: ServiceRequest[_T], *, session: bool = False) -> tuple[ServiceMember, _T]:
        """Send a request to the least loaded service, then to others. Raises BusyError after the deadline.

        ``session``: it opens one, so that the sessions that live there count as load.
        """
        deadline = time.monotonic() + request.seconds + self._settings.retry_deadline
        avoid: set[ServiceMember] = set()
        pause, losses = _FIRST_PAUSE, 0
        while True:
            homes = self._book.homes() if session else []
            member = await self._member(avoid, homes, deadline)
            try:
                return member, await member.ask(request)
            except (BusyError, SessionLimitError) as error:
                busy = error
            losses += isinstance(busy, AbsentError) and busy.begun
            if losses and (losses > _MOST_LOSSES or self.isolation.missing):
                raise BusyError(f"given up after {losses} services were lost while it ran: {busy}") from busy
            avoid.add(member)
            if avoid.issuperset(member for member in self._members if member.usable):
                if isinstance(busy, SessionLimitError):
                    raise busy
                avoid.clear()
                rest = max(pause, busy.retry_after) * random.uniform(0.5, 1.5)
                if time.monotonic() + rest > deadline:
                    raise BusyError(f"no sandbox took it within {self._settings.retry_deadline:g} s: {busy}") from busy
                await asyncio.sleep(rest)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _member(
        self, avoid: Collection[ServiceMember], homes: Sequence[ServiceMember], deadline: float
    ) -> ServiceMember:
        """The service for the next call, once there is one. Raises BusyError after the deadline."""
        while not self._closed:
            usable = [member for member in self._members if member.usable]
            if usable:
                return min(usable, key=lambda one: (one in avoid, one.load(homes.count(one)), random.random()))
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                seconds = self._settings.retry_deadline
                raise BusyError(f"no sandbox works, for {seconds:g} s: {self._outages}") from None
        raise ClosedError("the sandbox was closed")

    async def _in_session(self, call: Call, session: str, request_id: str | None) -> Execution:
        async with self._book.turn(session) as booked:
            request = running(call, booked.number, request_id, default=self._settings.timeout)
            return await self._there(booked.home, request, session)

    async def _there(self, member: ServiceMember, request: ServiceRequest[_T], session: str) -> _T:
        """Send a request to a session's service until it answers. Raises UnknownSessionError once that is lost."""
        deadline = time.monotonic() + request.seconds + self._settings.retry_deadline
        pause = _FIRST_PAUSE
        while not self._closed:
            self._book.find(session)
            try:
                return await member.ask(request)
            except UnknownSessionError as error:
                raise self._book.gone(session, str(error)) from None
            except BusyError as error:
                rest = max(pause, error.retry_after) * random.uniform(0.5, 1.5)
                if time.monotonic() + rest > deadline:
                    raise
            await asyncio.sleep(rest)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise ClosedError("the sandbox was closed")

    def _changed_at(self, member: ServiceMember) -> None:
        if not member.proved:
            self._book.end_at(member, f"its service, {member.address}, was lost: {member.why}")
        self._changed.set()

    @property
    def _outages(self) -> str:
        return "; ".join(f"{member.address} ({member.why})" for member in self._members if not member.usable)


async def open_several(settings: SandboxSettings) -> SeveralSandboxes:
    """Connect to the services. Raises StartError, UnisolatedError (unless ``allow_unisolated``) and RefusedError."""
    sandbox = SeveralSandboxes(settings)
    try:
        await sandbox.open()
    except BaseException:
        await sandbox.close()
        raise
    return sandbox
