"""Starts and restarts runners on this machine, for a gateway without Docker."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl_sandbox.errors import StartError

_STOP_SECONDS = 10.0
_SOON_SECONDS = 5.0  # a runner that lived shorter is restarted after a pause
_PAUSE_SECONDS = 1.0
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")


def runner_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that a runner needs, without the token."""
    wanted = {name: text for name, text in environment.items() if name in _PASSED_ON or name.startswith("SANDBOX_")}
    wanted.pop("SANDBOX_TOKEN", None)
    return wanted


@asynccontextmanager
async def local_runners(count: int, arguments: Sequence[str]) -> AsyncIterator[tuple[Path, asyncio.Task[None]]]:
    """Keep ``count`` runners alive. Yields their directory and a task that raises StartError if one cannot start."""
    with tempfile.TemporaryDirectory(prefix="agentrl-sandbox-") as directory:
        commands = [
            [
                *(sys.executable, "-m", "agentrl_sandbox", "runner", "--sockets", directory),
                *("--name", f"local-{number}", "--parent", str(os.getpid()), *arguments),
            ]
            for number in range(count)
        ]
        keeping = asyncio.ensure_future(_keep_all(commands))
        try:
            yield Path(directory), keeping
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def _keep_all(commands: Sequence[Sequence[str]]) -> None:
    async with asyncio.TaskGroup() as group:
        for command in commands:
            group.create_task(_keep(command))


async def _keep(command: Sequence[str]) -> None:
    """Restart a runner whenever it ends. Raises StartError if its settings or the machine forbid it."""
    while True:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, env=runner_environment(os.environ), start_new_session=True
        )
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                await _stop(process)
        if status == 2:
            raise StartError("the runner could not start; its own message says why")
        if time.monotonic() - started < _SOON_SECONDS:
            await asyncio.sleep(_PAUSE_SECONDS)


async def _stop(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
