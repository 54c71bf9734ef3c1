"""What tests of sessions look at beside the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_sandbox.client import Sandbox, UnknownSessionError

SMALL = {"timeout": 20.0, "memory_mb": 128, "max_processes": 16, "scratch_mb": 4, "workers": 4}


async def ended(sandbox: Sandbox, session: str) -> str:
    """Why a session has ended."""
    with pytest.raises(UnknownSessionError) as caught:
        await sandbox.execute("1", session=session)
    return str(caught.value)


def processes_below(pid: int) -> list[int]:
    below = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        below += [int(child) for child in (task / "children").read_text().split()]
    return below + [deeper for child in below for deeper in processes_below(child)]


def server_of(sandbox: Sandbox) -> int:
    return sandbox._servers._server._process.pid  # type: ignore[attr-defined]


async def until(reached: Callable[[], bool]) -> bool:
    """Whether it comes to be within some seconds."""
    for _ in range(500):
        if reached():
            return True
        await asyncio.sleep(0.02)
    return False
