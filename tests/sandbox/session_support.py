"""What tests of sessions look at beside the answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_sandbox.client import Sandbox, UnknownSessionError

# Prints how many processes live, once those that are being killed are gone; one may vanish while it is looked at.
LIVING = """
import glob, time
def living():
    count = 0
    for path in glob.glob('/proc/[0-9]*/stat'):
        try:
            count += open(path).read().split()[2] not in 'ZX'
        except (FileNotFoundError, ProcessLookupError):
            pass
    return count
for _ in range(100):
    if living() == 2:
        break
    time.sleep(0.05)
print(living())
"""
SMALL = {"timeout": 60.0, "memory_mb": 128, "max_processes": 16, "scratch_mb": 4, "workers": 4}


async def ended(sandbox: Sandbox, session: str) -> str:
    """Why a session has ended."""
    with pytest.raises(UnknownSessionError) as caught:
        await sandbox.execute("1", session=session)
    return str(caught.value)


def processes_below(pid: int) -> list[int]:
    below = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            below += [int(child) for child in (task / "children").read_text().split()]
    return below + [deeper for child in below for deeper in processes_below(child)]


def server_of(sandbox: Sandbox) -> int:
    return sandbox.servers._server._process.pid  # type: ignore[attr-defined]


async def until(reached: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether it comes to be; the machine may be slow, so the wait is long where all is not well."""
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True
