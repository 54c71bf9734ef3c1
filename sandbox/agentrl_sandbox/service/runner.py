"""The runner: a local sandbox behind a Unix socket. It has no token, no reference answers and no network.

Only the owner can enter the socket's directory, and programs cannot connect to Unix sockets, so only the gateway can
connect. A gateway's programs and sessions end with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from agentrl_sandbox.call import Call, CallSandbox, Frame, FrameBuffer, FrameError, build_execution_frame, pack_frame
from agentrl_sandbox.local import open_local
from agentrl_sandbox.runner import kernel
from agentrl_sandbox.service import links
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import SandboxError, StartError

_log = logging.getLogger(__name__)
_DISCONNECT_SECONDS = 5.0  # seconds to wait until a gateway that has no running requests disconnects


async def serve_runner(
    settings: SandboxSettings, sockets: Path, name: str, *, linger: float | None = None, parent: int | None = None
) -> None:
    """Run until SIGTERM or SIGINT, then finish running requests. Raises SandboxError if it cannot start.

    ``name`` is unique in the directory ``sockets``. The runner also exits ``linger`` seconds after the last gateway
    disconnected, and when the process ``parent`` exits.
    """
    links.check_answers_fit(settings)
    if parent is not None:
        kernel.die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:
            return
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sandbox = await open_local(settings)
    try:
        service = RunnerService(sandbox, links.hello_header(settings, sandbox.isolation))
        with listen_on_unix_socket(sockets, name) as listener:
            server = await loop.create_unix_server(service.new_connection, sock=listener)
            _log.info("runner %s is ready: %s", name, sandbox.isolation.describe())
            unused = asyncio.create_task(service.wait_until_unused(linger))
            await asyncio.wait((asyncio.create_task(stop.wait()), unused), return_when=asyncio.FIRST_COMPLETED)
            server.close()
        await service.drain()
    finally:
        await sandbox.close()


@contextmanager
def listen_on_unix_socket(directory: Path, name: str) -> Iterator[socket.socket]:
    """Listen on a socket ``NAME.sock`` that only the directory's owner can reach. The file is removed afterwards.

    The file appears when connections are accepted. The directory of another user, such as a directory mounted into a
    container, temporarily belongs to this process, because root without CAP_DAC_OVERRIDE cannot write to it. Raises
    StartError if the socket cannot be created.
    """
    path, temporary = directory / f"{name}.sock", directory / f".{name}.early"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_socket_unused(path)
        listener = socket.socket(socket.AF_UNIX)
        with _temporarily_own_directory(directory) as (user, group):
            temporary.unlink(missing_ok=True)
            listener.bind(str(temporary))
            os.chmod(temporary, 0o600)
            if user != os.geteuid():
                os.chown(temporary, user, group)
            listener.listen(64)
            os.rename(temporary, path)
    except OSError as error:
        raise StartError(f"cannot listen on {path}: {error}") from error
    with listener:
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


@contextmanager
def _temporarily_own_directory(directory: Path) -> Iterator[tuple[int, int]]:
    before = directory.stat()
    foreign = before.st_uid != os.geteuid()
    if foreign:
        os.chown(directory, os.geteuid(), -1)
    try:
        os.chmod(directory, 0o700)
        yield before.st_uid, before.st_gid
    finally:
        if foreign:
            os.chown(directory, before.st_uid, before.st_gid)


def _check_socket_unused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, PermissionError):
            return
    raise StartError(f"another runner listens on {path}: choose a different name for this runner")


class RunnerService:
    """One sandbox and the gateways that use it."""

    def __init__(self, sandbox: CallSandbox, hello: Mapping[str, object]) -> None:
        self.sandbox = sandbox
        self.hello = hello
        self.gateways: set[ConnectionFromGateway] = set()
        self.changed = asyncio.Event()
        self.stopping = False

    def new_connection(self) -> ConnectionFromGateway:
        return ConnectionFromGateway(self)

    async def wait_until_unused(self, seconds: float | None) -> None:
        """Wait until no gateway has been connected for ``seconds``, or forever if ``seconds`` is None."""
        while True:
            self.changed.clear()
            timeout = seconds if not self.gateways else None
            try:
                await asyncio.wait_for(self.changed.wait(), timeout)
            except TimeoutError:
                return

    async def drain(self) -> None:
        """Announce the shutdown to all gateways, and wait until each has received its last answer and disconnected.

        Requests in transit are also answered. A gateway that does not disconnect is disconnected.
        """
        self.stopping = True
        for gateway in self.gateways:
            gateway.send({"op": "stopping"})
        while self.gateways:
            tasks = [task for gateway in self.gateways for task in gateway.tasks.values()]
            self.changed.clear()
            waiting = [*tasks, asyncio.ensure_future(self.changed.wait())]
            done, _ = await asyncio.wait(
                waiting, timeout=None if tasks else _DISCONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            waiting[-1].cancel()
            if not done:
                break
        for gateway in list(self.gateways):
            gateway.close()


class ConnectionFromGateway(asyncio.Protocol):
    """A connection to one gateway: its running requests and its sessions."""

    def __init__(self, service: RunnerService) -> None:
        self._service = service
        self._frames = FrameBuffer[links.RunnerRequest](links.MAX_FRAME)
        self._sessions: set[str] = set()
        self._transport: asyncio.Transport | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._service.gateways.add(self)
        self._service.changed.set()
        self.send(self._service.hello)
        if self._service.stopping:
            self.send({"op": "stopping"})

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel this gateway's requests and close its sessions."""
        for task in self.tasks.values():
            task.cancel()
        self._service.gateways.discard(self)
        self._service.changed.set()
        for session in self._sessions:
            ending = asyncio.get_running_loop().create_task(self._close_session(session))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._frames.feed(data)
        except FrameError as error:
            _log.error("a gateway violated the protocol: %s", error)
            self.close()
            return
        for header, blobs in frames:
            identifier = header["id"]
            if header["op"] == "cancel":
                if identifier in self.tasks:
                    self.tasks[identifier].cancel()
                continue
            task = asyncio.get_running_loop().create_task(self._execute_and_answer(identifier, header, blobs))
            self.tasks[identifier] = task
            task.add_done_callback(self._removal_callback(identifier))

    def send(self, header: Mapping[str, object], *blobs: bytes) -> None:
        """Write one frame, unless the gateway has disconnected."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack_frame(header, *blobs))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _removal_callback(self, identifier: int) -> Callable[[asyncio.Task[None]], None]:
        def forget(task: asyncio.Task[None]) -> None:
            del self.tasks[identifier]
            if task.cancelled():  # before its first step
                self.send(_refusal(identifier, "cancelled", "cancelled"))
            elif (bug := task.exception()) is not None:  # without an answer, the gateway would disconnect this runner
                _log.error("cannot answer a request", exc_info=bug)
                self.send(_refusal(identifier, "failed", f"{type(bug).__name__}: {bug}"))

        return forget

    async def _execute_and_answer(self, identifier: int, header: links.RunnerRequest, blobs: list[bytes]) -> None:
        """Execute one request and send exactly one answer."""
        try:
            answer, out = await self._execute_request(identifier, header, blobs)
        except asyncio.CancelledError:
            answer, out = _refusal(identifier, "cancelled", "cancelled"), []
        except (SandboxError, ValueError) as error:
            kind = "bad_call" if isinstance(error, ValueError) else "failed"
            kinds = [name for name, refusal in links.REFUSALS.items() if isinstance(error, refusal)]
            answer, out = _refusal(identifier, [*kinds, kind][0], str(error)), []
        if sum(map(len, out)) > links.MAX_ANSWER:
            answer, out = _refusal(identifier, "failed", "the output and files are too large to send"), []
        self.send(answer, *out)

    async def _execute_request(
        self, identifier: int, header: links.RunnerRequest, blobs: list[bytes]
    ) -> Frame[Mapping[str, object]]:
        sandbox, operation = self._service.sandbox, header["op"]
        if operation == "execute":
            return build_execution_frame("execution", identifier, await sandbox.run(Call.from_frame(header, blobs)))
        if operation == "open_session":
            session = await sandbox.open_session()
            self._sessions.add(session)
        elif operation == "fork_session":
            session = await sandbox.fork_session(header["session"] or "")
            self._sessions.add(session)
        else:
            session = header["session"] or ""
            self._sessions.discard(session)
            await sandbox.close_session(session)
        return {"op": "session", "id": identifier, "session": session}, []

    async def _close_session(self, session: str) -> None:
        with contextlib.suppress(SandboxError):  # the session or the sandbox has ended
            await self._service.sandbox.close_session(session)


def _refusal(identifier: int, kind: str, why: str) -> dict[str, object]:
    return {"op": "refused", "id": identifier, "kind": kind, "why": why[:4096]}
