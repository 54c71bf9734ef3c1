"""One sandbox for a module's attacks; a test that breaks a sandbox opens its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from agentrl_sandbox.client import Execution, Sandbox, SandboxSettings, open_sandbox

Run = Callable[..., Awaitable[Execution]]


@pytest.fixture(scope="module")
def settings() -> SandboxSettings:
    return SandboxSettings(timeout=20.0, memory_mb=256, max_processes=16, scratch_mb=8, output_limit=4096)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(settings: SandboxSettings) -> AsyncIterator[Sandbox]:
    opened = await open_sandbox(settings)
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
def run(sandbox: Sandbox) -> Run:
    return sandbox.execute
