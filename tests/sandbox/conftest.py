"""Sandboxes shared by the tests of a module. A test that breaks its sandbox opens a separate one.

A module that asks for ``everywhere`` runs its tests in three worlds: with namespaces; without them as the root of a
container that may only change users; and without them as a user like any other.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import agentrl_sandbox
from agentrl_sandbox import types
from agentrl_sandbox.client import (
    Execution,
    Isolation,
    Outcome,
    Sandbox,
    SandboxSettings,
    UnisolatedError,
    open_sandbox,
)

Run = Callable[..., Awaitable[Execution]]
WORLDS = ("namespaces", "container", "unprivileged")


class World:
    """A sandbox without namespaces, opened by another process."""

    def __init__(self, process: asyncio.subprocess.Process, isolation: Isolation) -> None:
        self.process = process
        self.isolation = isolation
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, name: str, settings: SandboxSettings) -> World:
        package = str(Path(agentrl_sandbox.__file__).parents[1])
        needed = sorted({sys.prefix, sys.base_prefix, package})
        script = str(Path(__file__).with_name("world.py"))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", f"import runpy; runpy.run_path({script!r}, run_name='__main__')"),
            *(name, settings.model_dump_json(), json.dumps(needed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
            cwd="/",
            env={**os.environ, "HOME": "/nonexistent", "PYTHONPATH": package, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert process.stdout is not None
        first = await process.stdout.readline()
        if not first:
            raise RuntimeError(f"the world {name} did not open: status {await process.wait()}")
        fields = json.loads(first)
        if "refused" in fields:
            await process.wait()
            raise UnisolatedError(name, tuple(fields["missing"]), fields["refused"])
        return cls(process, Isolation(**fields))

    async def execute(self, program: str, **options: Any) -> Execution:
        if "files" in options:
            options["files"] = {name: content.decode("latin-1") for name, content in options["files"].items()}
        told = await self._call("execute", program=program, **options)
        files = {name: text.encode("latin-1") for name, text in told["files"].items()}
        return Execution(**{**told, "outcome": Outcome(told["outcome"]), "files": files})

    async def open_session(self) -> str:
        return await self._call("open_session")

    async def fork_session(self, session: str) -> str:
        return await self._call("fork_session", session=session)

    async def close_session(self, session: str) -> None:
        await self._call("close_session", session=session)

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await self.process.wait() == 0
        await self._reading

    async def _call(self, call: str, **options: Any) -> Any:
        assert self.process.stdin is not None
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps({"number": number, "call": call, **options}).encode() + b"\n")
        return await future

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            told = json.loads(line)
            future = self._waiting.pop(told["number"])
            if "error" in told:
                future.set_exception(getattr(types, told["error"])(told["message"]))
            else:
                future.set_result(told["result"])


async def open_world(name: str, settings: SandboxSettings) -> Sandbox | World:
    """Open a sandbox in one of WORLDS, or in another environment that ``world.py`` creates."""
    if name == "namespaces":
        return await open_sandbox(settings)
    if os.geteuid() != 0:
        pytest.skip("only root can make a world without namespaces")
    return await World.open(name, settings)


@pytest.fixture(scope="module")
def settings() -> SandboxSettings:
    return SandboxSettings(timeout=60.0, memory_mb=256, max_processes=16, scratch_mb=8, output_limit=4096)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(settings: SandboxSettings) -> AsyncIterator[Sandbox]:
    opened = await open_sandbox(settings)
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def session(sandbox: Sandbox) -> AsyncIterator[str]:
    opened = await sandbox.open_session()
    yield opened
    await sandbox.close_session(opened)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WORLDS)
async def everywhere(request: pytest.FixtureRequest, settings: SandboxSettings) -> AsyncIterator[Sandbox | World]:
    opened = await open_world(request.param, settings)
    yield opened
    await opened.close()


@pytest.fixture
def world() -> Callable[[str, SandboxSettings], Awaitable[Sandbox | World]]:
    """Return a function that opens sandboxes in other environments."""
    return open_world


@pytest.fixture(scope="module")
def run(sandbox: Sandbox) -> Run:
    return sandbox.execute
