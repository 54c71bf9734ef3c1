"""Attacks by hostile programs in sessions."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from sandbox.session_support import ended, processes_below, server_of, start, until

from agentrl_sandbox.client import (
    Outcome,
    SessionForkError,
    UnknownSessionError,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


FRAME = "import os, struct\nframe = struct.pack('!QB?i', {serial}, 0, False, 0)\n"
SPEAK = "for fd in range(3, 256):\n    try:\n        os.write(fd, {data})\n    except OSError:\n        pass\n"
SERIAL = (
    "import sys\nframe = sys._getframe()\nwhile 'message' not in frame.f_locals:\n    frame = frame.f_back\n"
    "serial = frame.f_locals['message']['serial']\n"
)


@pytest.mark.parametrize("data", ["b'x'", "b'x' * 60_000", "frame", "frame[:-1]", 'b\'{"op": "stopped"}\''])
async def test_forged_messages_end_the_session_that_sends_them(sandbox, data):
    session = await sandbox.open_session()
    program = FRAME.format(serial=1) + SPEAK.format(data=data) + "import time; time.sleep(60)"
    done = await sandbox.execute(program, session=session)
    assert (done.outcome, done.exit_code) == (Outcome.KILLED, -9)
    assert "an unexpected message" in await ended(sandbox, session)


async def test_a_forged_done_message_stops_its_program(sandbox):
    """The program sends the correct serial number, so it counts as done and is stopped."""
    session = await sandbox.open_session()
    forge = SERIAL + FRAME.format(serial="serial") + SPEAK.format(data="frame")
    go_on = "while True:\n    try:\n        os.write(1, b'x' * 100)\n    except OSError:\n        pass\n"
    done = await sandbox.execute(forge + go_on, session=session)
    assert (done.outcome, done.exit_code) == (Outcome.OK, 0)
    assert len(done.stdout) < 1 << 20
    (stopped,) = [
        pid for pid in processes_below(server_of(sandbox)) if not processes_below(pid) and pid_inside(pid) == 2
    ]
    assert await until(lambda: state(stopped) == "T")
    before = cpu_time(stopped)
    assert (await sandbox.execute("sum(range(20_000_000))")).outcome is Outcome.OK  # another one has its time
    assert cpu_time(stopped) == before
    done = await sandbox.execute("print('never runs')", session=session, timeout=0.5)
    assert (done.outcome, done.stdout) == (Outcome.TIMEOUT, "")
    await ended(sandbox, session)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def pid_inside(pid: int) -> int:
    """Return the PID of a process in its PID namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[-1] for line in lines if line.startswith("NSpid:")))


def cpu_time(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]


async def test_a_second_done_ends_the_session(sandbox):
    session = await sandbox.open_session()
    forge = SERIAL + FRAME.format(serial="serial") + SPEAK.format(data="frame")
    assert (await sandbox.execute(forge, session=session)).outcome is Outcome.OK
    for _ in range(100):
        try:
            await sandbox.execute("import time; time.sleep(0.01)", session=session)
        except UnknownSessionError:
            break
    assert "an unexpected message" in await ended(sandbox, session)


async def test_descriptors_sent_to_the_server_are_not_taken(sandbox):
    server = server_of(sandbox)
    before = len(list(Path(f"/proc/{server}/fd").iterdir()))
    session = await sandbox.open_session()
    program = (
        "import os, socket, time\nfor fd in range(3, 256):\n    try:\n        s = socket.socket(fileno=os.dup(fd))\n"
        "        socket.send_fds(s, [b'x'], [0] * 100)\n    except OSError:\n        pass\ntime.sleep(60)"
    )
    assert (await sandbox.execute(program, session=session)).outcome is Outcome.KILLED
    assert "an unexpected message" in await ended(sandbox, session)
    assert await until(lambda: len(list(Path(f"/proc/{server}/fd").iterdir())) <= before)


async def test_the_session_init_cannot_be_killed_stopped_or_read(sandbox, session):
    program = (
        "import os, signal\nfor number in (9, 19, 15, 11):\n    try:\n        os.kill(1, number)\n"
        "    except PermissionError:\n        pass\n"
        "for path in ('mem', 'environ', 'maps', 'fd'):\n    try:\n        path = '/proc/1/' + path\n"
        "        os.listdir(path) if path.endswith('fd') else open(path).read(1)\n        print('read', path)\n"
        "    except OSError:\n        print('refused')\n"
        "import ctypes\nprint(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    )
    done = await sandbox.execute(program, session=session)
    assert done.stdout == "refused\n" * 4 + "-1\n"
    assert (await sandbox.execute("print('lives')", session=session)).stdout == "lives\n"


async def test_a_fork_that_is_refused_in_time_ends_the_origin_alone(sandbox, session):
    """A program that replaced ``os.fork`` ends only its session."""
    broken = await sandbox.open_session()
    await sandbox.execute("import os\nos.fork = lambda: os._exit(9)", session=broken)
    with pytest.raises(UnknownSessionError, match="exit status 9"):
        await sandbox.fork_session(broken)
    assert (await sandbox.execute("print(1)", session=session)).stdout == "1\n"


async def test_a_fork_that_exits_immediately_is_an_error(sandbox, session):
    await sandbox.execute(
        "import os, shutil\nreal = os.scandir\nos.scandir = lambda *a: os.abort()\nos.listdir = None", session=session
    )
    with pytest.raises(SessionForkError):
        await sandbox.fork_session(session)
    await sandbox.execute("os.scandir = real", session=session)
    fork = await sandbox.fork_session(session)
    assert (await sandbox.execute("print(2)", session=fork)).stdout == "2\n"
    await sandbox.close_session(fork)


async def test_many_sessions_leave_nothing_behind(sandbox):
    server = server_of(sandbox)

    def counts() -> tuple[int, int, int]:
        descriptors = len(list(Path(f"/proc/{server}/fd").iterdir()))
        mine = len(list(Path("/proc/self/fd").iterdir()))
        return len(processes_below(server)), descriptors, mine

    async def use() -> None:
        session = await sandbox.open_session()
        await sandbox.execute("open('f', 'w').write('x' * 1000)", session=session, files={"a": b"1"}, fetch_files=["f"])
        fork = await sandbox.fork_session(session)
        await asyncio.gather(*(sandbox.execute("x = 1", session=name) for name in (session, fork)))
        await asyncio.gather(*(sandbox.close_session(name) for name in (session, fork)))

    await use()
    assert await until(lambda: counts()[0] == 2)  # the interpreters
    before = counts()  # at most: what the last test left may still close
    for _ in range(6):
        await asyncio.gather(*(use() for _ in range(5)))
    assert await until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True))), (counts(), before)


async def test_a_killed_session_init_is_a_failure_of_the_sandbox(sandbox):
    session = await sandbox.open_session()
    fork = await sandbox.fork_session(session)
    call = await start(sandbox, session)
    (session_init,) = (pid for pid in processes_below(server_of(sandbox)) if pid_inside(pid) == 1)
    os.kill(session_init, signal.SIGKILL)
    assert (await call).outcome is Outcome.INFRASTRUCTURE_FAILURE
    for name in (session, fork):
        assert "session init exited" in await ended(sandbox, name)
    assert (await sandbox.execute("print(1)")).outcome is Outcome.OK
