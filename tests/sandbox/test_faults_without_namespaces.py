"""Without namespaces: no process or file of a program remains, whichever part of a sandbox is killed."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

import pytest
from sandbox.programs import LEAVE
from sandbox.session_support import until

from agentrl_sandbox.client import Outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("everywhere", ["container", "unprivileged"], indirect=True, scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a world without namespaces"),
]
DAEMON = (
    f"import os, time\n{LEAVE}"
    "if os.fork() == 0:\n    leave()\n    if os.fork() == 0:\n"
    "        os.execv('/bin/sh', ['sh', '-c', 'trap \"\" TERM HUP; sleep 60 & sleep 60 # {mark}; true'])\n"
    "    os._exit(0)\n"
)


def holding(mark: str) -> list[str]:
    """Return the live processes whose command line contains a mark."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize("which", ["reaper", "server", "interpreter"])
async def test_no_process_or_file_remains_after_a_kill(everywhere, which):
    mark = secrets.token_hex(8)
    program = "open('left', 'w')\n" + DAEMON.format(mark=mark) + "import time; time.sleep(30)"
    call = asyncio.ensure_future(everywhere.execute(program))
    while not holding(mark):
        assert not call.done(), call.result()
        await asyncio.sleep(0.01)
    (reaper,) = [pid for pid in children(everywhere.process.pid) if b"server" in cmdline(pid)]
    (server,) = children(reaper)
    interpreter = next(pid for pid in children(server) if b"bare" in cmdline(pid))
    scratch = Path(os.readlink(f"/proc/{holding(mark)[0]}/cwd")).parent
    os.kill({"reaper": reaper, "server": server, "interpreter": interpreter}[which], signal.SIGKILL)
    assert (await call).outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert (await everywhere.execute("print('back')")).stdout == "back\n"
    assert await until(lambda: not holding(mark)), holding(mark)
    assert which == "interpreter" or await until(lambda: not scratch.exists())


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
