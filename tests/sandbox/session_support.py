"""Helpers for tests of sessions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_sandbox.client import Execution, Sandbox, UnknownSessionError

# Prints the number of live processes after killed processes have ended. A process may end during the count.
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
    """Return the reason why a session has ended."""
    with pytest.raises(UnknownSessionError) as caught:
        await sandbox.execute("1", session=session)
    return str(caught.value)


def processes_below(pid: int) -> list[int]:
    below = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            below += [int(child) for child in (task / "children").read_text().split()]
    return below + [deeper for child in below for deeper in processes_below(child)]


# Ends a program that must run until the test has checked it. ``pids_waiting_for_sigcont`` finds it by SIGUSR2, which it
# also blocks, because the kernel does not report a signal that a process waits for as blocked.
WAIT_FOR_SIGCONT = (
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT, signal.SIGUSR2})\n"
    "signal.sigwait({signal.SIGCONT})\n"
)


def pids_waiting_for_sigcont() -> list[int]:
    """Return the PIDs of this test's programs that wait for SIGCONT."""
    return [pid for pid in processes_below(os.getpid()) if blocked(pid) >> (signal.SIGUSR2 - 1) & 1]


def blocked(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("SigBlk:")), 16)
    return 0


async def start(sandbox: Sandbox, session: str) -> asyncio.Future[Execution]:
    """Start a program that waits for SIGCONT in a session. Returns once it runs."""
    before = pids_waiting_for_sigcont()
    call = asyncio.ensure_future(sandbox.execute(WAIT_FOR_SIGCONT, session=session))
    assert await until(lambda: not set(pids_waiting_for_sigcont()) <= set(before))
    return call


def server_of(sandbox: Sandbox) -> int:
    return sandbox._server._process.pid  # type: ignore[attr-defined]


async def until(reached: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait until a condition is true. Returns False after ``seconds``, which allow for a slow machine."""
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True
