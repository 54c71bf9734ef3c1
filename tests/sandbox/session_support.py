"""What tests of sessions look at beside the answers."""

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


# Ends a program that shall last until the test has looked. SIGUSR2 marks it for ``awaiting_the_word``, since the kernel
# shows a signal that is waited for as not blocked.
AWAIT_THE_WORD = (
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT, signal.SIGUSR2})\n"
    "signal.sigwait({signal.SIGCONT})\n"
)


def awaiting_the_word() -> list[int]:
    """The programs of this test's sandboxes that wait for SIGCONT."""
    return [pid for pid in processes_below(os.getpid()) if blocked(pid) >> (signal.SIGUSR2 - 1) & 1]


def blocked(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("SigBlk:")), 16)
    return 0


async def start(sandbox: Sandbox, session: str) -> asyncio.Future[Execution]:
    """Begin a program in a session that waits for a word, and return once it runs."""
    before = awaiting_the_word()
    call = asyncio.ensure_future(sandbox.execute(AWAIT_THE_WORD, session=session))
    assert await until(lambda: not set(awaiting_the_word()) <= set(before))
    return call


def server_of(sandbox: Sandbox) -> int:
    return sandbox._server._process.pid  # type: ignore[attr-defined]


async def until(reached: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether it comes to be; the machine may be slow, so the wait is long where all is not well."""
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True
