"""``local://``: programs run in children of a fork server on this machine."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  (asyncio imports it late, which fails once no descriptor is left)
import contextlib
import functools
import importlib.util
import itertools
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import agentrl_sandbox
from agentrl_sandbox.bookkeeping import SessionRegistry, SharedRuns
from agentrl_sandbox.call import (
    Call,
    CallSandbox,
    Frame,
    FrameBuffer,
    check_file_names,
    check_files,
    execution_from_frame,
    fail_futures,
    pack_frame,
    validate_timeout,
)
from agentrl_sandbox.probes import probe_isolation
from agentrl_sandbox.runner.config import ENVIRONMENT, RunnerConfig, ServerReply, python_command
from agentrl_sandbox.settings import LIMITS, SandboxSettings
from agentrl_sandbox.types import (
    ClosedError,
    Execution,
    Isolation,
    SandboxError,
    SessionForkError,
    SessionLimitError,
    StartError,
    UnisolatedError,
    infrastructure_failure,
)

_GRACE_SECONDS = 30.0  # seconds after a program's deadline until the server counts as hung
_SESSION_SECONDS = 60.0  # seconds for opening, forking and closing sessions, in addition to the server's deadlines
_START_SECONDS = 60.0  # seconds for a server to start; it may import SymPy from a cold disk
_END_SECONDS = 15.0  # seconds for a server to exit; without namespaces, it first removes the files of programs


class ServerExitedError(ConnectionError):
    """The server exited while programs waited for it."""


class ServerRefusedError(Exception):
    """The server refused a request. ``kind`` is limit, unknown, fork or start."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why


class ForkServerProcess(asyncio.Protocol):
    """A server process. Create it with ``start``."""

    def __init__(self, process: subprocess.Popen[bytes], messages: IO[bytes]) -> None:
        loop = asyncio.get_running_loop()
        self.exited = False
        self.layers: dict[str, int] = {}  # see ``child.detect_available_layers``
        self.hello: asyncio.Future[str] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.on_session_ended: Callable[[int, str], None] = lambda session, why: None
        self.on_exit: Callable[[], None] = lambda: None
        self._closed: asyncio.Future[None] = loop.create_future()
        self._process = process
        self._messages = messages
        self._frames = FrameBuffer[ServerReply]()
        self._waiting: dict[int, asyncio.Future[Frame[ServerReply]]] = {}
        self._identifiers = itertools.count(1)
        self._cold_interpreters = {"bare", "science"}
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def start(cls, config: RunnerConfig) -> ForkServerProcess:
        """Start a server with a clean environment. Raises StartError with the reason if it does not start."""
        try:
            process, messages, ours = _start_process(config)
        except OSError as error:
            raise StartError(f"the sandbox's server did not start: {error}") from error
        server = cls(process, messages)
        try:
            await asyncio.get_running_loop().create_connection(lambda: server, sock=ours)
            why = await asyncio.wait_for(asyncio.shield(server.hello), _START_SECONDS)
        except (ServerExitedError, TimeoutError) as error:
            raise StartError(await server.close_and_explain(str(error))) from error
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

    async def wait_until_warm(self) -> None:
        """Wait until both interpreters are warm. Raises StartError if the server exits or takes too long."""
        try:
            await asyncio.wait_for(asyncio.shield(self.ready), _START_SECONDS)
        except (ServerExitedError, TimeoutError) as error:
            raise StartError(await self.close_and_explain(str(error))) from error

    async def close_and_explain(self, what: str) -> str:
        """Close the server. Returns an error message with the server's last line of output."""
        self._messages.seek(0)
        last = self._messages.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        await self.close()
        return f"the sandbox's server did not start: {' '.join([what or 'no answer', *last])}"

    async def run(self, call: Call, session: int | None) -> Execution:
        """Run one program and wait for its end.

        Raises ServerRefusedError if the session has ended, and ServerExitedError or TimeoutError if the server does not
        respond.
        """
        header, blobs = call.frame()
        return execution_from_frame(
            *await self._send_and_wait({**header, "op": "run", "number": session}, blobs, call.timeout or 0.0)
        )

    async def request_session_operation(self, operation: str, session: int, **more: int) -> None:
        """Open, fork or close a session.

        Raises ServerRefusedError if the server refuses, and ServerExitedError or TimeoutError if it does not respond.
        """
        await self._send_and_wait({"op": operation, "number": session, **more}, [], _SESSION_SECONDS)

    def close_session(self, session: int) -> None:
        """End an abandoned session without waiting."""
        if self._transport is not None and not self.exited:
            self._transport.write(pack_frame({"op": "close", "id": 0, "number": session}))

    async def _send_and_wait(
        self, header: Mapping[str, object], blobs: list[bytes], timeout: float
    ) -> Frame[ServerReply]:
        """Send one message and wait for the answer.

        The grace period is a separate wait. After a long pause of the event loop, answers that are already in the
        socket are therefore read before the server counts as hung.
        """
        if self._transport is None or self.exited:
            raise ServerExitedError("the sandbox's server has exited")
        identifier = next(self._identifiers)
        future: asyncio.Future[Frame[ServerReply]] = asyncio.get_running_loop().create_future()
        self._waiting[identifier] = future
        self._transport.write(pack_frame({**header, "id": identifier}, *blobs))
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
            if self._waiting.pop(identifier, None) is not None and not self.exited:
                self._transport.write(pack_frame({"op": "cancel", "id": identifier}))

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        await self._closed
        if self._process.poll() is None:
            await asyncio.to_thread(self._terminate)
        self._messages.close()

    def _terminate(self) -> None:
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
        self.exited = True
        fail_futures(
            (self.hello, self.ready, *self._waiting.values()), ServerExitedError("the sandbox's server exited")
        )
        if not self._closed.done():
            self._closed.set_result(None)
        self.on_exit()

    def _on_frame(self, frame: Frame[ServerReply]) -> None:
        header, _ = frame
        if header["op"] == "hello":
            self.layers = header["layers"]
            self.hello.set_result(header["why"])
        elif header["op"] == "ready":
            self._cold_interpreters.discard(header["kind"])
            if not self._cold_interpreters and not self.ready.done():
                self.ready.set_result(None)
        elif header["op"] == "ended":
            self.on_session_ended(header["number"], header["why"])
        else:
            future = self._waiting.pop(header["id"], None)
            if future is not None and not future.done():
                future.set_result(frame)


def _start_process(config: RunnerConfig) -> tuple[subprocess.Popen[bytes], IO[bytes], socket.socket]:
    """Start a server. Returns its process, the file with its error output, and the client's socket."""
    with contextlib.ExitStack() as opened:
        ours, theirs = socket.socketpair()
        opened.enter_context(ours)
        with theirs:
            messages = opened.enter_context(tempfile.TemporaryFile())
            arguments = (config.to_json(), str(theirs.fileno()))
            process = subprocess.Popen(
                python_command(sys.executable, "agentrl_sandbox.runner.server", config.package_path, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                pass_fds=(theirs.fileno(),),
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        opened.pop_all()  # the socket and the file stay open for the lifetime of the server
    return process, messages, ours


_LIBRARIES = ("numpy", "sympy", "mpmath", "scipy", "networkx", "pandas")
# User ids that are most likely unused. A limit on processes counts all processes of a user on the host, including those
# in other containers, so two runners must not share users.
_USER_IDS = range(1_879_048_192, 2_147_483_648)  # unused in systemd's table of users and groups
_CONTAINER_USER_IDS = range(20_000, 60_000)  # for containers with only 65,536 user ids
_MAX_SLOTS = 2048  # maximum number of workers and sessions of a runner
_FIX = (
    "run as root, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, and where AppArmor "
    "restricts them kernel.apparmor_restrict_unprivileged_userns=0), or use a kernel with seccomp and Landlock (Linux "
    "6.12 or newer has all layers), or set allow_unisolated=true to run programs without these properties"
)


class LocalSandbox(CallSandbox):
    """A fork server that is restarted if it exits. Created by ``open_local``."""

    def __init__(self, settings: SandboxSettings, config: RunnerConfig, server: ForkServerProcess) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._config = config
        self._isolation = Isolation(layers={}, mode=config.isolate)
        self._numbers = itertools.count(1)  # session numbers
        self._worker_slots = asyncio.Semaphore(settings.concurrency)
        self._shared_runs = SharedRuns()
        self._sessions = SessionRegistry[ForkServerProcess, int]()
        self._server = server
        self._restart_lock = asyncio.Lock()
        self._closed = False
        self._record_session_ends(server)

    @property
    def isolation(self) -> Isolation:
        return self._isolation

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """Run a program; see ``Sandbox.execute``. Cancelling the call kills the program and its session.

        Raises ClosedError after ``close``, UnknownSessionError for an unknown session, ValueError for an invalid
        timeout or invalid files, and RuntimeError in another event loop.
        """
        self._check_open()
        seconds = validate_timeout(self._settings.timeout if call.timeout is None else call.timeout)
        check_files(call.files, self._settings.scratch_mb << 20)
        check_file_names(call.fetch_files)
        call = replace(call, timeout=seconds, fetch_files=tuple(dict.fromkeys(call.fetch_files)))
        if request_id is None:
            return await self._run(call)
        return await self._shared_runs.run_or_join((request_id, call.digest()), lambda: self._run(call))

    async def open_session(self) -> str:
        self._check_open()
        try:
            server = await self._running_server()
            number = next(self._numbers)
            await self._request_session(server, number, "open", number)
        except (ServerRefusedError, ServerExitedError, TimeoutError) as error:
            raise SandboxError(f"cannot open a session: {error}") from error
        return self._sessions.add(server, number)

    async def fork_session(self, session: str) -> str:
        """Fork a session after its program has ended; see ``Sandbox.fork_session``."""
        self._check_open()
        async with self._sessions.exclusive_use(session) as origin:
            number = next(self._numbers)
            try:
                await self._request_session(origin.owner, number, "fork", origin.identifier, fork=number)
            except ServerRefusedError as refused:
                if refused.kind == "fork":
                    raise SessionForkError(f"session {session!r} could not be forked: {refused.why}") from refused
                raise self._sessions.end_with_error(session, refused.why) from refused
            except (ServerExitedError, TimeoutError) as error:
                raise SandboxError(f"session {session!r} could not be forked: {error}") from error
            return self._sessions.add(origin.owner, number)

    async def close_session(self, session: str) -> None:
        self._check_open()
        if self._sessions.has_ended(session):
            return
        live = self._sessions.find(session)
        self._sessions.record_end(session, "it was closed")
        try:
            await live.owner.request_session_operation("close", live.identifier)
        except ServerExitedError:
            return  # the session ended with its server
        except TimeoutError as error:
            raise SandboxError(f"session {session!r} did not end: {error}") from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        async with self._restart_lock:
            await self._server.close()
        await self._shared_runs.wait_until_finished()

    async def check_isolation(self, reasons: Sequence[str] = ()) -> None:
        """Probe all properties. Raises UnisolatedError if a property is missing, unless the settings allow it.

        ``reasons`` explain why stronger isolation modes are unavailable.
        """
        mode, layers = self._config.isolate, self._server.layers
        self._isolation = await probe_isolation(self, mode=mode, layers=layers, settings=self._settings)
        if self._isolation.missing and not self._settings.allow_unisolated:
            why = f"{'; '.join(('the attack of a probe succeeded', *reasons))}. Fix: {_FIX}"
            raise UnisolatedError("the sandbox cannot isolate programs on this machine", self._isolation.missing, why)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the sandbox was closed")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a sandbox belongs to the event loop that opened it: open another sandbox in this loop")

    async def _run(self, call: Call) -> Execution:
        if call.session is None:
            async with self._worker_slots:
                return await self._run_on_server(None, None, call)
        async with self._sessions.exclusive_use(call.session) as live, self._worker_slots:
            try:
                return await self._run_on_server(live.owner, live.identifier, call)
            except ServerRefusedError as refused:
                raise self._sessions.end_with_error(call.session, refused.why) from refused

    async def _run_on_server(self, server: ForkServerProcess | None, session: int | None, call: Call) -> Execution:
        started = time.monotonic()
        try:
            server = server or await self._running_server()
            return await server.run(call, session)
        except (ServerExitedError, StartError) as error:
            return infrastructure_failure(str(error), started)
        except TimeoutError:
            assert server is not None
            await server.close()
            return infrastructure_failure("the sandbox's server did not respond after the program's deadline", started)

    async def _request_session(
        self, server: ForkServerProcess, new_session: int, op: str, session: int, **more: int
    ) -> None:
        """Open or fork the session ``new_session`` on a server. Closes the session if the caller is cancelled."""
        try:
            await server.request_session_operation(op, session, **more)
        except ServerRefusedError as refused:
            if refused.kind == "limit":
                raise SessionLimitError(f"cannot open another session: {refused.why}") from refused
            raise
        except asyncio.CancelledError:
            server.close_session(new_session)
            raise

    async def _running_server(self) -> ForkServerProcess:
        """Return the server, restarted if it exited.

        Raises StartError if a restart fails, and ServerExitedError after ``close``.
        """
        async with self._restart_lock:
            if self._closed:
                raise ServerExitedError("the sandbox was closed")
            if self._server.exited:
                await self._server.close()  # first end this server's programs: the next server may use the same users
                config = replace(self._config, first_user=choose_first_user_id(self._settings))
                self._server = await ForkServerProcess.start(config)
                self._record_session_ends(self._server)
                await self._server.wait_until_warm()
            return self._server

    def _record_session_ends(self, server: ForkServerProcess) -> None:
        server.on_session_ended = lambda number, why: self._sessions.record_end_at_owner(server, why, number)
        server.on_exit = functools.partial(self._sessions.record_end_at_owner, server, "the sandbox's server exited")


async def open_local(settings: SandboxSettings, *, modes: tuple[str, ...] | None = None) -> LocalSandbox:
    """Start a server with the strongest isolation that this machine allows, and probe the isolation.

    ``modes`` lists the kinds of namespaces to try, in order: ``root`` and ``user``. None selects the kinds that this
    process may use. If all fail, the server runs without namespaces. Raises StartError if no server starts, and
    UnisolatedError if a property is missing (unless ``allow_unisolated``).
    """
    if modes is None:
        modes = ("root", "user") if os.geteuid() == 0 else ("user",)
    reasons: list[str] = []
    for mode in (*modes, "none"):
        config = runner_config(settings, mode)
        try:
            server = await ForkServerProcess.start(config)
        except StartError as error:
            if mode == "none":
                raise
            reasons.append(f"{mode} namespaces: {error}")
            continue
        break
    sandbox = LocalSandbox(settings, config, server)
    try:
        await asyncio.gather(server.wait_until_warm(), sandbox.check_isolation(reasons))
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


def runner_config(settings: SandboxSettings, mode: str) -> RunnerConfig:
    libraries: list[str] = []
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            libraries.append(str(Path(next(iter(spec.submodule_search_locations))).parent))
    package = Path(agentrl_sandbox.__file__).resolve().parent
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.path.realpath(sys.executable)).parent))
    return RunnerConfig(
        isolate=mode,
        **{name: getattr(settings, name) for name in LIMITS},
        workers=settings.concurrency,
        library_paths=tuple(dict.fromkeys(libraries)),
        package_path=str(package.parent),
        readable=(*dict.fromkeys(libraries), *prefixes, str(package)),
        client_pid=os.getpid(),
        first_user=choose_first_user_id(settings),
    )


def choose_first_user_id(settings: SandboxSettings) -> int:
    """Return the first user id of a server's programs: the configured id, or a random id.

    Raises StartError if the user ids of this machine cannot be read.
    """
    if settings.first_user is not None:
        return settings.first_user
    try:
        # The first of _MAX_SLOTS user ids that are most likely unused on this host.
        numbers = _USER_IDS if _is_user_mapped(_USER_IDS.stop - 1) else _CONTAINER_USER_IDS
        return random.SystemRandom().randrange(numbers.start, numbers.stop - _MAX_SLOTS, _MAX_SLOTS)
    except OSError as error:
        raise StartError(f"cannot choose user ids for the sandbox's server: {error}") from error


def _is_user_mapped(user: int) -> bool:
    """Return True if this process's user namespace maps a user id. In practice, group ids are mapped the same way."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        spans = [tuple(map(int, line.split())) for line in file]
    return any(first <= user < first + length for first, _, length in spans)
