"""The gateway's side of one runner's socket. Runners are untrusted: an invalid message ends the connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import cast

from agentrl_sandbox.service.pool.messages import (
    MAX_FRAME,
    Answer,
    Hello,
    Leaving,
    Ran,
    RefusedMessage,
    SessionMessage,
    read,
)
from agentrl_sandbox.wire import Frame, FrameBuffer, FrameError, fail_all, pack

_HELLO_SECONDS = 10.0
_GRACE_SECONDS = 60.0  # beyond a program's deadline; then the runner counts as hung


class RunnerGoneError(ConnectionError):
    """The runner disconnected during a request."""


class NotSentError(RunnerGoneError):
    """The runner was gone before the request was sent, so another one may run it."""


class RunnerLink(asyncio.Protocol):
    """A connection to one runner, from ``connect`` until it is gone. ``on_change``: it may have capacity."""

    def __init__(self, name: str, on_change: Callable[[RunnerLink], None]) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.gone = False
        self.leaving = False
        self.why_gone = "the runner is gone"
        self.hello: asyncio.Future[Hello] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._on_change = on_change
        self._frames = FrameBuffer[dict[str, object]](MAX_FRAME)
        self._identifiers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, path: str, name: str, on_change: Callable[[RunnerLink], None]) -> RunnerLink:
        """Connect and wait for the runner's hello. Raises OSError and TimeoutError."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(name, on_change), path)
        try:
            await asyncio.wait_for(asyncio.shield(link.hello), _HELLO_SECONDS)
        except BaseException:
            link.abort("it sent no hello")
            raise
        return link

    @property
    def in_flight(self) -> int:
        """Unanswered requests, including cancelled ones, whose programs may still be ending."""
        return len(self._waiting)

    def has_room_for(self, count: int) -> bool:
        """Whether it would start ``count`` more programs at once."""
        return not self.gone and not self.leaving and self.in_flight + count <= self.hello.result().workers

    async def request(self, header: Mapping[str, object], blobs: list[bytes], *, timeout: float) -> Answer:
        """Send a request and return its answer. Cancelling this cancels the request at the runner.

        Raises NotSentError, RunnerGoneError and FrameError.
        """
        if self.gone or self._transport is None or self._transport.is_closing():
            raise NotSentError(self.why_gone)
        identifier = next(self._identifiers)
        frame = pack({**header, "id": identifier}, *blobs)
        if len(frame) > MAX_FRAME:
            raise FrameError(f"a request of {len(frame)} bytes; at most {MAX_FRAME} are carried")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting[identifier] = future
        self._timers[identifier] = loop.call_later(
            timeout + _GRACE_SECONDS, self.abort, "a runner did not answer in time"
        )
        self._transport.write(frame)
        try:
            return await future
        finally:
            if identifier in self._waiting and not self.gone:
                self._transport.write(pack({"op": "cancel", "id": identifier}))

    def abort(self, why: str) -> None:
        if not self.gone:
            self.why_gone = why
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Cut the bytes into frames; the first invalid one ends the connection."""
        try:
            for frame in self._frames.feed(data):
                self._on_frame(frame)
        except FrameError as error:
            self.abort(f"a runner violated the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        for timer in self._timers.values():
            timer.cancel()
        fail_all((self.hello, *self._waiting.values()), RunnerGoneError(self.why_gone))
        self._waiting.clear()
        if not self.closed.done():
            self.closed.set_result(None)
        self._on_change(self)

    def _on_frame(self, frame: Frame[dict[str, object]]) -> None:
        message, execution = read(frame)
        if isinstance(message, Hello) != (not self.hello.done()):
            raise FrameError("hello must be the first message, and sent once")
        if isinstance(message, Hello):
            self.hello.set_result(message)
        elif isinstance(message, Leaving):
            self.leaving = True
            self._hang_up_if_done()
        elif isinstance(message, Ran) and execution is not None:
            self._answer(message.id, execution)
        elif isinstance(message, SessionMessage | RefusedMessage):
            self._answer(message.id, message)

    def _answer(self, identifier: int, answer: Answer) -> None:
        future = self._waiting.pop(identifier, None)
        if future is None:
            raise FrameError("an answer without a request")
        self._timers.pop(identifier).cancel()
        if not future.done():
            future.set_result(answer)
        self._hang_up_if_done()
        self._on_change(self)

    def _hang_up_if_done(self) -> None:
        """A runner that leaves waits for this: until then a request may be on its way to it."""
        if self.leaving and not self._waiting and self._transport is not None:
            self.why_gone = "it left"
            self._transport.close()
