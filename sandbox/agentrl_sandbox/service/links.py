"""Messages between gateway and runners, and the gateway's connections to the runners' sockets in one directory.

    gateway -> runner    {"op": "execute", "id", ...} program stdin contents...
                         {"op": "open_session", "id"} · {"op": "fork_session" | "close_session", "id", "session"}
                         {"op": "cancel", "id"}
    runner -> gateway    {"op": "hello", ...RunnerHelloMessage}, once, first · {"op": "stopping"}: send nothing more
                         {"op": "execution", "id", ...} stdout stderr contents... · {"op": "session", "id", "session"}
                         {"op": "refused", "id", "kind", "why"}

Every request, including a cancelled request, is answered exactly once. The gateway validates all messages from runners.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentrl_sandbox.call import (
    CallHeader,
    ExecutionHeader,
    Frame,
    FrameBuffer,
    FrameError,
    execution_from_frame,
    fail_futures,
    pack_frame,
)
from agentrl_sandbox.settings import LIMITS, SandboxSettings
from agentrl_sandbox.types import (
    Execution,
    Isolation,
    Outcome,
    SandboxError,
    SessionForkError,
    SessionLimitError,
    StartError,
    UnknownSessionError,
)

MAX_FRAME = 64 << 20
"""Maximum size of a frame in bytes, in both directions."""

MAX_ANSWER = MAX_FRAME // 2
"""Maximum number of bytes of output and files that a runner sends for one program."""

REFUSALS: dict[str, type[SandboxError]] = {
    "unknown_session": UnknownSessionError,
    "session_limit": SessionLimitError,
    "session_fork": SessionForkError,
}
"""Errors for the kinds of refusal that a caller can handle."""

_ANNOUNCED_SETTINGS = ("timeout", *LIMITS)  # the settings that a runner announces
_MAX_ENCODED_BYTES = 3  # bytes of U+FFFD, which replaces an invalid byte
_MAX_NOTE_BYTES = 1024  # maximum bytes of notes about dropped output
_Identifier = Annotated[int, Field(ge=1)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Reason = Annotated[str, Field(max_length=65_536)]


class RunnerRequest(CallHeader, total=False):
    """Header of a request to a runner."""

    op: str
    id: int


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RunnerHelloMessage(_Message):
    """A runner's first message: its capacity, isolation and limits."""

    op: Literal["hello"]
    workers: Annotated[int, Field(ge=1, le=4096)]
    mode: Annotated[str, Field(max_length=64)]
    layers: Annotated[dict[_Name, _Reason | None], Field(max_length=64)]
    limits: Annotated[dict[_Name, float], Field(max_length=64)]

    @property
    def isolation(self) -> Isolation:
        return Isolation(layers=self.layers, mode=self.mode)


class StoppingMessage(_Message):
    """The runner is stopping: it finishes running requests and accepts no new requests."""

    op: Literal["stopping"]


class ExecutionMessage(_Message):
    """Result of a program."""

    op: Literal["execution"]
    id: _Identifier
    outcome: Annotated[Outcome, Field(strict=False)]
    exit_code: Annotated[int, Field(ge=-64, le=255)] | None
    seconds: Annotated[float, Field(ge=0, le=1e6)]
    truncated: bool
    files: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=4096)]
    session_ended: bool


class SessionMessage(_Message):
    """Name of a session that was opened, forked or closed."""

    op: Literal["session"]
    id: _Identifier
    session: _Name


class RefusedMessage(_Message):
    """Reason for a refused request."""

    op: Literal["refused"]
    id: _Identifier
    kind: Literal["unknown_session", "session_limit", "session_fork", "bad_call", "cancelled", "failed"]
    why: _Reason


Answer = Execution | SessionMessage | RefusedMessage

RunnerMessage = RunnerHelloMessage | StoppingMessage | ExecutionMessage | SessionMessage | RefusedMessage
_MESSAGE: TypeAdapter[RunnerMessage] = TypeAdapter(Annotated[RunnerMessage, Field(discriminator="op")])


def check_answers_fit(settings: SandboxSettings) -> None:
    """Check that every possible answer fits into a message. Larger answers would count as sandbox failures.

    Raises StartError if the limits allow larger answers.
    """
    largest = settings.fetch_limit + 2 * _MAX_ENCODED_BYTES * settings.output_limit + _MAX_NOTE_BYTES
    if largest > MAX_ANSWER:
        raise StartError(
            f"fetch_limit={settings.fetch_limit} and output_limit={settings.output_limit} allow answers of {largest} "
            f"bytes (an invalid byte expands to {_MAX_ENCODED_BYTES} bytes), but the maximum is {MAX_ANSWER}: lower "
            "one of the limits"
        )


def hello_header(settings: SandboxSettings, isolation: Isolation) -> dict[str, object]:
    """Return the header of a runner's first frame."""
    return {
        "op": "hello",
        "workers": settings.concurrency,
        "mode": isolation.mode,
        "layers": dict(isolation.layers),
        "limits": {name: float(getattr(settings, name)) for name in _ANNOUNCED_SETTINGS},
    }


def _parse_execution(message: ExecutionMessage, blobs: list[bytes]) -> Execution:
    if len(blobs) != 2 + len(message.files) or len(set(message.files)) != len(message.files):
        raise FrameError("the size of an execution's payload does not match its header")
    if (message.exit_code is None) != (message.outcome is Outcome.INFRASTRUCTURE_FAILURE):
        raise FrameError("an execution's exit code does not fit its outcome")
    return execution_from_frame(cast(ExecutionHeader, message.model_dump()), blobs)


# The gateway's end of a runner's socket. Runners are untrusted, so an invalid message ends the connection.

_HELLO_SECONDS = 10.0
_GRACE_SECONDS = 60.0  # seconds after a program's deadline until the runner counts as hung


class RunnerLostError(ConnectionError):
    """The runner disconnected during a request."""


class NotSentError(RunnerLostError):
    """The runner exited before the request was sent, so another runner may run it."""


class RunnerLink(asyncio.Protocol):
    """A connection to one runner. ``on_change`` is called when the runner may have capacity."""

    def __init__(self, name: str, on_change: Callable[[RunnerLink], None]) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.disconnected = False
        self.stopping = False
        self.why_disconnected = "the runner disconnected"
        self.hello: asyncio.Future[RunnerHelloMessage] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._on_change = on_change
        self._frames = FrameBuffer[dict[str, object]](MAX_FRAME)
        self._identifiers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, path: str, name: str, on_change: Callable[[RunnerLink], None]) -> RunnerLink:
        """Connect and wait for the runner's hello.

        Raises OSError if the connection fails, and TimeoutError if no hello arrives.
        """
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
        """Number of unanswered requests. Includes cancelled requests, because their programs may still be exiting."""
        return len(self._waiting)

    def has_room_for(self, count: int) -> bool:
        """Return True if the runner would start ``count`` more programs immediately."""
        return not self.disconnected and not self.stopping and self.in_flight + count <= self.hello.result().workers

    async def request(self, header: Mapping[str, object], blobs: list[bytes], *, timeout: float) -> Answer:
        """Send a request and return its answer. Cancelling the call cancels the request at the runner.

        Raises NotSentError if the runner has exited, RunnerLostError if it disconnects before it answers, and
        FrameError if the request is too large.
        """
        if self.disconnected or self._transport is None or self._transport.is_closing():
            raise NotSentError(self.why_disconnected)
        identifier = next(self._identifiers)
        frame = pack_frame({**header, "id": identifier}, *blobs)
        if len(frame) > MAX_FRAME:
            raise FrameError(f"a request of {len(frame)} bytes exceeds the limit of {MAX_FRAME} bytes")
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
            if identifier in self._waiting and not self.disconnected:
                self._transport.write(pack_frame({"op": "cancel", "id": identifier}))

    def abort(self, why: str) -> None:
        if not self.disconnected:
            self.why_disconnected = why
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        """Split the bytes into frames. The first invalid frame ends the connection."""
        try:
            for frame in self._frames.feed(data):
                self._on_frame(frame)
        except FrameError as error:
            self.abort(f"a runner violated the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.disconnected = True
        for timer in self._timers.values():
            timer.cancel()
        fail_futures((self.hello, *self._waiting.values()), RunnerLostError(self.why_disconnected))
        self._waiting.clear()
        if not self.closed.done():
            self.closed.set_result(None)
        self._on_change(self)

    def _on_frame(self, frame: Frame[dict[str, object]]) -> None:
        header, blobs = frame
        try:
            message = _MESSAGE.validate_python(header)
        except ValidationError as error:
            raise FrameError(f"it sent an invalid message: {error.errors()[0]['msg']}") from error
        if blobs and not isinstance(message, ExecutionMessage):
            raise FrameError("it sent unexpected bytes after a header")
        if isinstance(message, RunnerHelloMessage) != (not self.hello.done()):
            raise FrameError("hello must be sent exactly once, as the first message")
        if isinstance(message, RunnerHelloMessage):
            self.hello.set_result(message)
        elif isinstance(message, StoppingMessage):
            self.stopping = True
            self._disconnect_if_idle()
        elif isinstance(message, ExecutionMessage):
            self._answer(message.id, _parse_execution(message, blobs))
        else:
            self._answer(message.id, message)

    def _answer(self, identifier: int, answer: Answer) -> None:
        future = self._waiting.pop(identifier, None)
        if future is None:
            raise FrameError("it sent an answer without a request")
        self._timers.pop(identifier).cancel()
        if not future.done():
            future.set_result(answer)
        self._disconnect_if_idle()
        self._on_change(self)

    def _disconnect_if_idle(self) -> None:
        """Disconnect from a stopping runner after its last answer. Before that, a request may be in transit."""
        if self.stopping and not self._waiting and self._transport is not None:
            self.why_disconnected = "it stopped"
            self._transport.close()


_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2  # seconds between scans of the directory
_MAX_RUNNERS = 1024


class RunnerLinks:
    """Links to all runners in a directory. ``on_change`` is called when a runner may have capacity or has exited."""

    def __init__(self, directory: Path, on_change: Callable[[RunnerLink], None]) -> None:
        self._directory = directory
        self._on_change = on_change
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._polling: asyncio.Task[None] | None = None
        self.links: dict[str, RunnerLink] = {}

    def open(self) -> None:
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def close(self) -> None:
        tasks = [*self._connecting.values(), *([self._polling] if self._polling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        links = list(self.links.values())
        for link in links:
            link.abort("the sandbox was closed")
        await asyncio.gather(*(link.closed for link in links))

    @property
    def runner_count(self) -> int:
        return sum(not link.stopping for link in self.links.values())

    @property
    def in_flight(self) -> int:
        return sum(link.in_flight for link in self.links.values())

    @property
    def workers(self) -> int:
        return sum(link.hello.result().workers for link in self.links.values() if not link.stopping)

    @property
    def limits(self) -> dict[str, float]:
        """Smallest value of each limit among all runners."""
        hellos = [link.hello.result() for link in self.links.values()]
        names = {name for hello in hellos for name in hello.limits}
        return {name: min(hello.limits.get(name, 0.0) for hello in hellos) for name in sorted(names)}

    @property
    def isolation(self) -> Isolation:
        """Properties that all runners provide. Without runners, all properties are missing."""
        return Isolation.combine([link.hello.result().isolation for link in self.links.values()])

    async def wait_for_runner(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a connected runner. Returns True if there is one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.runner_count:
                    await asyncio.sleep(_POLL_SECONDS / 4)
        return self.runner_count > 0

    async def _poll(self) -> None:
        while True:
            for name in self._socket_names():
                if name not in self.links and name not in self._connecting:
                    self._connecting[name] = asyncio.get_running_loop().create_task(self._connect(name))
            await asyncio.sleep(_POLL_SECONDS)

    def _socket_names(self) -> list[str]:
        try:
            with os.scandir(self._directory) as entries:
                names = [entry.name for entry in entries if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)]
        except OSError:
            return []  # the directory or a socket is missing or changing: scan again
        return [name for name in sorted(names)[:_MAX_RUNNERS] if name.endswith(".sock")]

    async def _connect(self, name: str) -> None:
        try:
            link = await RunnerLink.connect(str(self._directory / name), name, self._on_link_change)
        except (OSError, TimeoutError):  # the socket of a killed runner, or a runner that sent no hello
            await asyncio.sleep(_POLL_SECONDS)
        else:
            if not link.disconnected:
                self.links[name] = link
                _log.info("runner %s connected: %s", name, link.hello.result().isolation.describe())
                self._on_change(link)
        finally:
            del self._connecting[name]

    def _on_link_change(self, link: RunnerLink) -> None:
        if link.disconnected and self.links.get(link.name) is link:
            del self.links[link.name]
            _log.warning("runner %s disconnected: %s", link.name, link.why_disconnected)
        self._on_change(link)
