"""Gateways and runners in the test's event loop, with a sandbox that the test controls."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from agentrl_sandbox.call import Call, CallSandbox
from agentrl_sandbox.client import Execution, Isolation, Outcome, SandboxSettings, UnknownSessionError
from agentrl_sandbox.service import links
from agentrl_sandbox.service.gateway import DrainingServer, GatewayState, build_app, server_config
from agentrl_sandbox.service.guard import RequestGuard
from agentrl_sandbox.service.pool import RunnerPool
from agentrl_sandbox.service.runner import RunnerService, listen_on_unix_socket
from agentrl_sandbox.types import PROPERTIES

TOKEN = "the-token"
HELD = Isolation(layers=dict.fromkeys(PROPERTIES, "a layer"), mode="root")


class ControlledSandbox(CallSandbox):
    """Programs are commands: ``wait`` until released, ``impossible``, ``bug``, ``broken``, or text to echo."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.release = asyncio.Event()
        self.sessions: dict[str, list[str]] = {}
        self._numbers = itertools.count(1)

    @property
    def isolation(self) -> Isolation:
        return HELD

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        program, session = call.program, call.session
        self.started.append(program)
        if program.startswith("wait"):
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.append(program)
                raise
        if program == "impossible":
            raise ValueError("an impossible name")
        if program == "bug":
            raise RuntimeError("nobody thought of this")
        if session is not None:
            self._history(session).append(program)
            program = "|".join(self._history(session))
        found = {name: call.files[name] for name in call.fetch_files if name in call.files}
        broken = program == "broken"
        return Execution(
            outcome=Outcome.INFRASTRUCTURE_FAILURE if broken else Outcome.OK,
            stdout=f"{program}{call.stdin}",
            stderr="",
            exit_code=None if broken else 0,
            seconds=0.5,
            truncated=False,
            files=found,
        )

    async def open_session(self) -> str:
        session = f"s{next(self._numbers)}"
        self.sessions[session] = []
        return session

    async def fork_session(self, session: str) -> str:
        fork = await self.open_session()
        self.sessions[fork] = list(self._history(session))
        return fork

    async def close_session(self, session: str) -> None:
        self._history(session)
        del self.sessions[session]

    async def close(self) -> None:
        self.release.set()

    def _history(self, session: str) -> list[str]:
        if session not in self.sessions:
            raise UnknownSessionError(f"no session {session}")
        return self.sessions[session]


class RunningRunner:
    """A real runner service with a controlled sandbox."""

    def __init__(self, directory: Path, name: str, workers: int) -> None:
        self.sandbox = ControlledSandbox()
        self.hello = links.hello_header(SandboxSettings(workers=workers), HELD)
        self.service = RunnerService(self.sandbox, self.hello)
        self._directory, self._name = directory, name
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        listener = self._stack.enter_context(listen_on_unix_socket(self._directory, self._name))
        server = await asyncio.get_running_loop().create_unix_server(self.service.new_connection, sock=listener)
        self._stack.callback(server.close)

    async def kill(self) -> None:
        """Abort all connections, even during requests."""
        for gateway in list(self.service.gateways):
            assert gateway._transport is not None
            gateway._transport.abort()
        await self._stack.aclose()


StartRunner = Callable[..., Any]


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    return directory


@pytest_asyncio.fixture
async def start_runner(sockets: Path) -> AsyncIterator[StartRunner]:
    async with AsyncExitStack() as stack:

        async def start(name: str = "one", workers: int = 2) -> RunningRunner:
            runner = RunningRunner(sockets, name, workers)
            await runner.start()
            stack.push_async_callback(runner.kill)
            return runner

        yield start


class RunningGateway:
    """A gateway that listens on a real socket."""

    def __init__(self, gateway: GatewayState, server: DrainingServer, port: int, client: httpx.AsyncClient) -> None:
        self.gateway, self.server, self.port, self.client = gateway, server, port, client
        self.pool = gateway.pool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def run(self, program: str, **fields: object) -> httpx.Response:
        return await self.client.post("/v1/execute", json={"program": program, **fields})


@asynccontextmanager
async def running_gateway(
    sockets: Path, *, queue_limit: int = 64, runners: int = 1, receive_seconds: float = 60.0
) -> AsyncIterator[RunningGateway]:
    pool = RunnerPool(sockets, queue_limit=queue_limit, queue_seconds=60.0)
    gateway = GatewayState(pool)
    hosts = frozenset({"127.0.0.1", "localhost"})
    app = RequestGuard(build_app(gateway), token=TOKEN, hosts=hosts, max_body=100_000)
    config = server_config(app, receive_seconds=receive_seconds, max_body=100_000)
    server = DrainingServer(config, gateway, drain_seconds=30.0)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        port = listener.getsockname()[1]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            if runners:
                assert await pool.registry.wait_for_runner(120)
            yield RunningGateway(gateway, server, port, client)
    finally:
        server.should_exit = True
        await serving


@pytest_asyncio.fixture
async def runner(start_runner: StartRunner) -> RunningRunner:
    started: RunningRunner = await start_runner()
    return started


@pytest_asyncio.fixture
async def gateway(sockets: Path, runner: RunningRunner) -> AsyncIterator[RunningGateway]:
    async with running_gateway(sockets) as started:
        yield started


async def until(true: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until


@pytest.fixture(name="running_gateway")
def _running_gateway() -> Callable[..., Any]:
    return running_gateway
