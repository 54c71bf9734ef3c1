"""``local://``: programs run in children of a fork server on this machine."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import agentrl_sandbox
from agentrl_sandbox.errors import (
    ClosedError,
    SandboxError,
    SessionForkError,
    SessionLimitError,
    StartError,
    UnisolatedError,
)
from agentrl_sandbox.file_names import check_files, check_names
from agentrl_sandbox.local.fork_server import ForkServerProcess, ServerGoneError, ServerRefusedError
from agentrl_sandbox.local.probes import probe
from agentrl_sandbox.local.session_book import SessionBook
from agentrl_sandbox.local.standby import ForkServers, first_user
from agentrl_sandbox.once import Once, digest
from agentrl_sandbox.runner.config import RunnerConfig
from agentrl_sandbox.runner.program.order import Order
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import PROPERTIES, Execution, Isolation, Outcome

_LIBRARIES = ("numpy", "sympy", "mpmath", "scipy", "networkx", "pandas")
_FIX = (
    "run as root, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, and where AppArmor "
    "restricts them kernel.apparmor_restrict_unprivileged_userns=0), or use a kernel with seccomp and Landlock (Linux "
    "6.12 or newer has all of it), or set allow_unisolated=true to run the programs without it"
)


class LocalSandbox:
    """A fork server and what is needed to bring it back. Made by ``open_local``."""

    def __init__(self, settings: SandboxSettings, config: RunnerConfig, server: ForkServerProcess) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._config = config
        self._isolation = Isolation(layers={}, mode=config.isolate)
        self._identifiers = itertools.count(1)
        self._room = asyncio.Semaphore(settings.concurrency)
        self._once = Once()
        self._sessions = SessionBook()
        self._servers = ForkServers(settings, config, server, self._follow)
        self._closed = False

    @property
    def isolation(self) -> Isolation:
        """What the probes found when the sandbox opened."""
        return self._isolation

    async def execute(
        self,
        program: str,
        *,
        timeout: float | None = None,
        stdin: str = "",
        session: str | None = None,
        request_id: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        echo: bool = False,
    ) -> Execution:
        """Run a program and give its end; see ``Sandbox.execute``. Cancelling kills it, and the session it runs in.

        Raises ClosedError, UnknownSessionError, ValueError for an impossible timeout or file name, and RuntimeError in
        another event loop.
        """
        self._check_open()
        seconds = self._settings.timeout if timeout is None else timeout
        if not 0 < seconds <= 3600:
            raise ValueError(f"timeout must be above 0 and at most 3600 seconds, not {seconds}")
        check_files(files or {}, self._settings.scratch_mb << 20)
        check_names(fetch_files)
        order = Order(
            identifier=next(self._identifiers),
            timeout=seconds,
            source=program.encode("utf-8", "surrogatepass"),
            stdin=stdin.encode("utf-8", "surrogatepass"),
            echo=echo,
            files=tuple((files or {}).items()),
            fetch=tuple(dict.fromkeys(fetch_files)),
        )
        if request_id is None:
            return await self._run(order, session)
        header, blobs = replace(order, identifier=0).to_frame()
        return await self._once.run((request_id, digest((header, session), *blobs)), lambda: self._run(order, session))

    async def open_session(self) -> str:
        """Start an interpreter that keeps its state; see ``Sandbox.open_session``."""
        self._check_open()
        try:
            server = await self._servers.living()
            number = next(self._identifiers)
            await self._ask_for_session(server, number, {"op": "open", "session": number})
        except (ServerRefusedError, ServerGoneError, TimeoutError) as error:
            raise SandboxError(f"no session could be opened: {error}") from error
        return self._sessions.add(number, server)

    async def fork_session(self, session: str) -> str:
        """Branch a session; see ``Sandbox.fork_session``. Waits for what runs in it."""
        self._check_open()
        origin = self._sessions.find(session)
        async with origin.turn:
            self._sessions.find(session)  # it may have ended meanwhile
            number = next(self._identifiers)
            try:
                header = {"op": "fork", "session": origin.number, "fork": number}
                await self._ask_for_session(origin.server, number, header)
            except ServerRefusedError as refused:
                if refused.kind == "fork":
                    raise SessionForkError(f"session {session!r} could not be forked: {refused.why}") from refused
                raise self._sessions.gone(session, refused.why) from refused
            except (ServerGoneError, TimeoutError) as error:
                raise SandboxError(f"session {session!r} could not be forked: {error}") from error
            return self._sessions.add(number, origin.server)

    async def close_session(self, session: str) -> None:
        """End a session and what runs in it; see ``Sandbox.close_session``."""
        self._check_open()
        if self._sessions.has_ended(session):
            return
        live = self._sessions.find(session)
        self._sessions.end(session, "it was closed")
        try:
            await live.server.ask({"op": "close", "id": next(self._identifiers), "session": live.number})
        except ServerGoneError:
            return  # and the session with it
        except TimeoutError as error:
            raise SandboxError(f"session {session!r} does not end: {error}") from error

    async def close(self) -> None:
        """Kill what runs and end the server."""
        if self._closed:
            return
        self._closed = True
        await self._servers.close()
        await self._once.settle()

    async def check(self, reasons: Sequence[str] = ()) -> None:
        """Probe every property. Raises UnisolatedError for one that is missing, unless the settings allow it.

        ``reasons`` say why stronger ways of isolation could not be had.
        """
        mode, layers = self._config.isolate, self._servers.layers
        self._isolation = await probe(self, mode=mode, layers=layers, settings=self._settings)
        if self._isolation.missing and not self._settings.allow_unisolated:
            raise unisolated(self._isolation.missing, why="; ".join(("a probe program got through", *reasons)))

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the sandbox was closed")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a sandbox belongs to the event loop it was opened in; open another in this one")

    async def _run(self, order: Order, session: str | None) -> Execution:
        if session is None:
            async with self._room:
                return await self._run_on(None, order)
        live = self._sessions.find(session)
        async with live.turn:
            self._sessions.find(session)  # it may have ended meanwhile
            async with self._room:
                try:
                    return await self._run_on(live.server, replace(order, session=live.number))
                except ServerRefusedError as refused:
                    raise self._sessions.gone(session, refused.why) from refused

    async def _run_on(self, server: ForkServerProcess | None, order: Order) -> Execution:
        """Run on the session's server, or on any."""
        started = time.monotonic()
        try:
            server = server or await self._servers.living()
            return await server.run(order)
        except (ServerGoneError, StartError) as error:
            return _failure(str(error), started)
        except TimeoutError:
            assert server is not None
            await server.close()
            return _failure("the sandbox's server was silent long past the program's deadline", started)

    def keep_standby(self) -> None:
        """Start a second server in the background, where the settings ask for one."""
        self._servers.keep_standby()

    async def _ask_for_session(self, server: ForkServerProcess, number: int, header: dict[str, object]) -> None:
        try:
            await server.ask({**header, "id": next(self._identifiers)})
        except ServerRefusedError as refused:
            if refused.kind == "limit":
                raise SessionLimitError(f"no further session: {refused.why}") from refused
            raise
        except asyncio.CancelledError:
            server.close_session(number)
            raise

    def _follow(self, server: ForkServerProcess) -> None:
        """Hear of sessions that end."""
        server.on_session_ended = functools.partial(self._sessions.end_number, server)
        server.on_gone = functools.partial(self._sessions.end_all, server, "the sandbox's server ended")


async def open_local(settings: SandboxSettings, *, modes: tuple[str, ...] | None = None) -> LocalSandbox:
    """Start the strongest isolation that this machine allows, and probe it.

    ``modes`` are the ways to try, in order: ``root`` and ``user`` namespaces (None: what this process may hope for).
    Raises UnisolatedError (unless ``allow_unisolated``) and StartError.
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
        await asyncio.gather(server.warm(), sandbox.check(reasons))
    except BaseException:
        await sandbox.close()
        raise
    sandbox.keep_standby()
    return sandbox


def unisolated(missing: tuple[str, ...], *, why: str) -> UnisolatedError:
    """The error that names what is missing, why, and the fix."""
    meanings = "; ".join(f"{name} ({PROPERTIES[name]})" for name in missing)
    return UnisolatedError(
        f"the sandbox cannot isolate programs here: missing {meanings}. {why}. Fix: {_FIX}", missing=missing
    )


def runner_config(settings: SandboxSettings, mode: str) -> RunnerConfig:
    """What the server needs to know."""
    libraries: list[str] = []
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            libraries.append(str(Path(next(iter(spec.submodule_search_locations))).parent))
    package = Path(agentrl_sandbox.__file__).resolve().parent
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.path.realpath(sys.executable)).parent))
    return RunnerConfig(
        isolate=mode,
        memory_mb=settings.memory_mb,
        max_processes=settings.max_processes,
        scratch_mb=settings.scratch_mb,
        output_limit=settings.output_limit,
        flood_limit=settings.flood_limit,
        fetch_limit=settings.fetch_limit,
        max_sessions=settings.max_sessions,
        session_idle_timeout=settings.session_idle_timeout,
        workers=settings.concurrency,
        library_paths=tuple(dict.fromkeys(libraries)),
        package_path=str(package.parent),
        readable=(*dict.fromkeys(libraries), *prefixes, str(package)),
        client_pid=os.getpid(),
        first_user=first_user(settings, 0),
    )


def _failure(why: str, started: float) -> Execution:
    return Execution(
        outcome=Outcome.INFRASTRUCTURE_FAILURE,
        stdout="",
        stderr=why,
        exit_code=None,
        seconds=time.monotonic() - started,
        truncated=False,
    )
