"""The client's side of the fork server: the process, its socket, and the calls that wait for an answer."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  (asyncio imports it late, which fails once no descriptor is left)
import contextlib
import itertools
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import IO

from agentrl_sandbox.call import Call, Frame, FrameBuffer, fail_all, pack, read_execution
from agentrl_sandbox.runner import config as runner_config
from agentrl_sandbox.runner.config import RunnerConfig, ServerReply
from agentrl_sandbox.types import Execution, StartError

_GRACE_SECONDS = 30.0  # beyond a program's deadline; then the server counts as hung
_SESSION_SECONDS = 60.0  # for opening, forking and closing sessions, for which the server has deadlines of its own
_START_SECONDS = 60.0  # importing SymPy from a cold disk
_END_SECONDS = 15.0  # for a server to end; without namespaces it removes files of programs first


class ServerGoneError(ConnectionError):
    """The server ended while programs waited for it."""


class ServerRefusedError(Exception):
    """The server refused a request. ``kind``: limit, unknown, fork or start."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why


class ForkServerProcess(asyncio.Protocol):
    """One server process. Create it with ``start``."""

    def __init__(self, process: subprocess.Popen[bytes], messages: IO[bytes]) -> None:
        loop = asyncio.get_running_loop()
        self.gone = False
        self.layers: dict[str, int] = {}  # see ``isolation.layers``
        self.hello: asyncio.Future[str] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.on_session_ended: Callable[[int, str], None] = lambda session, why: None
        self.on_gone: Callable[[], None] = lambda: None
        self._closed: asyncio.Future[None] = loop.create_future()
        self._process = process
        self._messages = messages
        self._frames = FrameBuffer[ServerReply]()
        self._waiting: dict[int, asyncio.Future[Frame[ServerReply]]] = {}
        self._identifiers = itertools.count(1)
        self._to_warm = {"bare", "science"}
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def start(cls, config: RunnerConfig) -> ForkServerProcess:
        """Start a server with a clean environment. Raises StartError with the kernel's reason."""
        try:
            process, messages, ours = _spawn(config)
        except OSError as error:
            raise StartError(f"the sandbox's server did not start: {error}") from error
        server = cls(process, messages)
        try:
            await asyncio.get_running_loop().create_connection(lambda: server, sock=ours)
            why = await asyncio.wait_for(asyncio.shield(server.hello), _START_SECONDS)
        except (ServerGoneError, TimeoutError) as error:
            raise StartError(await server.fail(str(error))) from error
        except asyncio.CancelledError:
            if server._transport is None:
                ours.close()
                server.connection_lost(None)
            await server.close()
            raise
        if why:
            await server.close()
            raise StartError(why)
        return server

    async def warm(self) -> None:
        """Wait until both interpreters are warm. Raises StartError."""
        try:
            await asyncio.wait_for(asyncio.shield(self.ready), _START_SECONDS)
        except (ServerGoneError, TimeoutError) as error:
            raise StartError(await self.fail(str(error))) from error

    async def fail(self, what: str) -> str:
        """Close, and return an error message with the server's last output."""
        self._messages.seek(0)
        last = self._messages.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        await self.close()
        return f"the sandbox's server did not start: {' '.join([what or 'no answer', *last])}"

    async def run(self, call: Call, session: int | None) -> Execution:
        """Send one program and wait for its end.

        Raises ServerGoneError, TimeoutError and, in a session, ServerRefusedError.
        """
        header, blobs = call.frame()
        return read_execution(*await self._ask({**header, "op": "run", "number": session}, blobs, call.timeout or 0.0))

    async def ask(self, operation: str, session: int, **more: int) -> None:
        """Open, fork or close a session. Raises ServerGoneError, TimeoutError and ServerRefusedError."""
        await self._ask({"op": operation, "number": session, **more}, [], _SESSION_SECONDS)

    def close_session(self, session: int) -> None:
        """End an abandoned session without waiting."""
        if self._transport is not None and not self.gone:
            self._transport.write(pack({"op": "close", "id": 0, "number": session}))

    async def _ask(self, header: Mapping[str, object], blobs: list[bytes], timeout: float) -> Frame[ServerReply]:
        """Send one message and wait for the answer.

        The grace period is a separate wait: after a long pause of the event loop, answers already in the socket are
        read before the server counts as hung.
        """
        if self._transport is None or self.gone:
            raise ServerGoneError("the sandbox's server is gone")
        identifier = next(self._identifiers)
        future: asyncio.Future[Frame[ServerReply]] = asyncio.get_running_loop().create_future()
        self._waiting[identifier] = future
        self._transport.write(pack({**header, "id": identifier}, *blobs))
        try:
            for seconds in (timeout, _GRACE_SECONDS):
                done, _ = await asyncio.wait((future,), timeout=seconds)
                if done:
                    answer, content = future.result()
                    if answer["op"] == "refused":
                        raise ServerRefusedError(answer["kind"], answer["why"])
                    return answer, content
            raise TimeoutError(f"no answer {_GRACE_SECONDS:g} s after the deadline")
        finally:
            if self._waiting.pop(identifier, None) is not None and not self.gone:
                self._transport.write(pack({"op": "cancel", "id": identifier}))

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        await self._closed
        if self._process.poll() is None:
            await asyncio.to_thread(self._end)
        self._messages.close()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._on_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        fail_all((self.hello, self.ready, *self._waiting.values()), ServerGoneError("the sandbox's server ended"))
        if not self._closed.done():
            self._closed.set_result(None)
        self.on_gone()

    def _on_frame(self, frame: Frame[ServerReply]) -> None:
        header, _ = frame
        if header["op"] == "hello":
            self.layers = header["layers"]
            self.hello.set_result(header["why"])
        elif header["op"] == "ready":
            self._to_warm.discard(header["kind"])
            if not self._to_warm and not self.ready.done():
                self.ready.set_result(None)
        elif header["op"] == "ended":
            self.on_session_ended(header["number"], header["why"])
        else:
            future = self._waiting.pop(header["id"], None)
            if future is not None and not future.done():
                future.set_result(frame)


def _spawn(config: RunnerConfig) -> tuple[subprocess.Popen[bytes], IO[bytes], socket.socket]:
    """(the process, the file of its messages, our end of its socket). Raises OSError, and then leaves nothing open."""
    with contextlib.ExitStack() as opened:
        ours, theirs = socket.socketpair()
        opened.enter_context(ours)
        with theirs:
            messages = opened.enter_context(tempfile.TemporaryFile())
            arguments = (config.to_json(), str(theirs.fileno()))
            process = subprocess.Popen(
                runner_config.command(sys.executable, "agentrl_sandbox.runner.server", config.package_path, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                pass_fds=(theirs.fileno(),),
                env=runner_config.ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        opened.pop_all()  # they live as long as the server
    return process, messages, ours
