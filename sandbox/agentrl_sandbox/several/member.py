"""One of several services: looked at again and again, out of use while it does not answer, and proved when it is back.

A service that fails a look, or a call, is **silent**: new calls go to the others. After ``service_deadline`` seconds of
silence it is **lost**: calls that still wait there are cut off, and its sessions have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from agentrl_sandbox.errors import AbsentError, BusyError, SandboxError
from agentrl_sandbox.http import HttpSandbox, ServiceRequest
from agentrl_sandbox.settings import SandboxSettings

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_EVERY = 5.0  # seconds between two looks at a service that answers
_SOON, _RARELY = 0.25, 15.0  # between two looks at one that does not: at first, and at most
_LOOK = 10.0  # for the answer to a look, or service_deadline if that is less


class ServiceMember:
    """A service, and the calls under way there."""

    def __init__(self, settings: SandboxSettings, changed: Callable[[ServiceMember], None]) -> None:
        """``settings``: with the address of this service alone. ``changed`` learns when it is lost or back."""
        self.service = HttpSandbox(settings)
        self.address = settings.url
        self.proved = False  # it has answered, isolates programs and runs them; until it is lost
        self.why = "no answer yet"
        self._changed = changed
        self._deadline = settings.service_deadline
        self._workers = 1
        self._calls: set[asyncio.Timeout] = set()
        self._silent_since: float | None = None
        self._look_now = asyncio.Event()

    @property
    def usable(self) -> bool:
        """Whether new calls may come here."""
        return self.proved and self._silent_since is None

    def load(self, sessions: int = 0) -> float:
        """The calls under way, and the ``sessions`` that count, for each program that it runs at once."""
        return (len(self._calls) + sessions) / self._workers

    async def ask(self, request: ServiceRequest[_T]) -> _T:
        """Send a request once. Raises BusyError if another attempt may help, here or elsewhere."""
        try:
            async with asyncio.timeout(None) as cut:
                self._calls.add(cut)
                try:
                    return await self.service.once(request)
                finally:
                    self._calls.discard(cut)
        except TimeoutError:
            raise AbsentError(f"{self.address} is lost: {self.why}", begun=True) from None
        except AbsentError as error:
            self.note_silence(str(error))
            self._look_now.set()
            raise

    async def prove(self) -> None:
        """Take it into use once it answers. Raises StartError, UnisolatedError and RefusedError if it never can be."""
        while (error := await self._look()) is not None:
            if not isinstance(error, BusyError):
                raise error
            await asyncio.sleep(random.uniform(0.1, 0.5))

    async def watch(self) -> None:
        """Look at it for as long as this runs."""
        failures = 0
        while True:
            await self._pause(failures)
            error = await self._look()
            if error is None:
                failures = 0
                continue
            failures += 1
            self.note_silence(str(error))
            if self.proved and self._silent_for >= self._deadline:
                self._lose()

    async def _pause(self, failures: int) -> None:
        """Return when it is time for the next look, after so many that failed."""
        longest = _EVERY if self.proved else _RARELY
        seconds = min(longest, _SOON * 2 ** min(failures, 10)) if failures else longest
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds * random.uniform(0.8, 1.2)):
                await self._look_now.wait()
        self._look_now.clear()

    @property
    def _silent_for(self) -> float:
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    async def _look(self) -> SandboxError | None:
        """Look at the service, and run a program there if it is not in use. What is wrong, or None."""
        try:
            async with asyncio.timeout(min(_LOOK, self._deadline)):
                state = await self.service.look()
            if not self.usable:
                async with asyncio.timeout(self._deadline):
                    await self.service.prove(state)
        except TimeoutError:
            return AbsentError("no answer", begun=False)
        except SandboxError as error:
            return error
        self._workers = max(1, int(state.get("workers", 1)))
        if not self.usable:
            self._welcome()
        return None

    def _welcome(self) -> None:
        if self._silent_since is not None:
            _log.warning("the sandbox at %s works again", self.address)
        self.proved, self._silent_since = True, None
        self._changed(self)

    def note_silence(self, why: str) -> None:
        """It gets no new calls until it answers a look."""
        self.why = why
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            _log.warning("the sandbox at %s gets no calls for now: %s", self.address, why)

    def _lose(self) -> None:
        _log.warning("the sandbox at %s is lost, with its sessions: silent for %.0f s", self.address, self._silent_for)
        self.proved = False
        now = asyncio.get_running_loop().time()
        for cut in self._calls:
            cut.reschedule(now)
        self._changed(self)
