"""Secrets that a program's memory must not contain, and processes that it must not change, in every environment."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import secrets
from pathlib import Path

import pytest
from sandbox.session_support import processes_below, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("everywhere", ["namespaces", "user", "container", "unprivileged"], indirect=True),
]
SCIENCE = "import sympy\n"

# The secret is assembled from parts, so that the program's text does not contain it.
SCAN = """
import os, re
needle = re.compile(bytes.fromhex({start!r}).hex().encode() + rb"-[a-z]+-[0-9a-f]{{16}}")
own, found, size = input(), set(), 0
memory = os.open("/proc/self/mem", os.O_RDONLY)
for line in open("/proc/self/maps").read().splitlines():
    span, mode = line.split()[:2]
    begin, end = (int(edge, 16) for edge in span.split("-"))
    while mode[0] == "r" and begin < end:
        try:
            data = os.pread(memory, min(end - begin, 1 << 20), begin)
        except (OSError, OverflowError):  # the kernel's own pages
            break
        size += len(data)
        found |= set(needle.findall(data))
        begin += max(len(data) - 64, 1) if begin + len(data) < end else len(data)
print(size, sorted(found))
"""
PLANT = """
import os, sys, time
print({text!r}, input(), open('f').read(), flush=True)
open('g', 'w').write({scratch!r})
open({name!r}, 'w').close()
time.sleep({seconds})
"""


@pytest.fixture
def root_of(everywhere) -> int:
    """Return the PID of the process below which the sandbox runs."""
    return everywhere.process.pid if hasattr(everywhere, "process") else os.getpid()


def server_processes(root: int) -> dict[int, bytes]:
    """Return the command lines of the sandbox's processes, including programs."""
    found = {}
    for pid in processes_below(root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"agentrl_sandbox.runner" in command:
            found[pid] = command
    return found


async def test_no_program_finds_another_ones_text_input_files_or_output_in_its_memory(everywhere):
    start = secrets.token_hex(8)
    planted = 0

    def secret(name: str) -> str:
        nonlocal planted
        planted += 1
        return f"{start}-{name}-{secrets.token_hex(8)}"

    async def plant(prefix: str, seconds: float, session: str | None = None) -> None:
        names = {"scratch": secret("scratch"), "name": secret("name")}
        program = prefix + PLANT.format(text=secret("text"), seconds=seconds, **names)
        files = {"f": secret("file").encode()}
        done = await everywhere.execute(
            program, stdin=secret("stdin"), files=files, fetch_files=["g"], session=session, timeout=120
        )
        assert done.stdout.count(start) == 3

    sessions = [await everywhere.open_session() for _ in range(2)]
    for prefix in ("", SCIENCE):  # earlier calls, of both interpreters
        await plant(prefix, 0)
    await plant("", 0, sessions[0])
    running = [asyncio.ensure_future(plant(prefix, 4)) for prefix in ("", SCIENCE)]
    for prefix, session in (("", None), (SCIENCE, None), ("", sessions[1])):
        own = f"{start}-own-{secrets.token_hex(8)}"
        scan = await everywhere.execute(prefix + SCAN.format(start=start), stdin=own, session=session, timeout=120)
        size, found = scan.stdout.split(" ", 1)
        assert int(size) > 10 << 20
        assert found == f"[{own.encode()!r}]\n", scan.stderr  # what it was given itself is found
    await asyncio.gather(*running)
    for session in sessions:
        await everywhere.close_session(session)
    assert planted == 25


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads other processes' memory")
async def test_a_warm_interpreter_holds_nothing_of_the_programs_it_forked(everywhere, root_of):
    assert await until(lambda: len(interpreters(root_of)) == 2)
    mark, warm = secrets.token_hex(16), interpreters(root_of)
    for prefix in ("", SCIENCE):
        text, files = f"{prefix}x = {mark!r}; print(x, input())", {f"{mark}.txt": mark.encode()}
        session = await everywhere.open_session()
        for where in (None, session):
            done = await everywhere.execute(text, stdin=mark, files=files, fetch_files=[f"{mark}.txt"], session=where)
            assert done.stdout == f"{mark} {mark}\n"
        await everywhere.close_session(session)
    assert not any(holds(pid, mark.encode()) for pid in warm)
    assert all(holds(pid, b"runner.zygote") for pid in warm)


def interpreters(root: int) -> list[int]:
    """Return the warm interpreters, but not their forks, which have the same command line."""
    forks = [pid for pid, command in server_processes(root).items() if b"runner.zygote" in command]
    return [pid for pid in forks if parent(pid) not in (None, *forks)]


def parent(pid: int) -> int | None:
    """Return the parent of a process, or None if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def holds(pid: int, mark: bytes) -> bool:
    """Return True if a process has these bytes in its memory."""
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(begin)
                if mark in memory.read(end - begin):
                    return True
    return False


CHANGE = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
for pid in {pids} + [os.getppid() or 999_999]:
    for change in (
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (32, 32)),
        lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 17),
        lambda: os.setpriority(os.PRIO_PGRP, pid, 17),
        lambda: os.sched_setaffinity(pid, {{min(os.sched_getaffinity(0))}}),
        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        lambda: libc.syscall({ioprio_set}, 1, pid, (3 << 13)),
        lambda: libc.syscall({ioprio_set}, 2, pid, (3 << 13)),
        lambda: write(f"/proc/{{pid}}/oom_score_adj", "1000"),
        lambda: write(f"/proc/{{pid}}/autogroup", "19"),
    ):
        try:
            change()
        except OSError:
            pass
for change in (
    lambda: os.setpriority(os.PRIO_PGRP, 0, 17),
    lambda: os.setpriority(os.PRIO_USER, 0, 17),
    lambda: os.setpriority(os.PRIO_USER, os.getuid(), 17),
    lambda: libc.syscall({ioprio_set}, 2, 0, (3 << 13)),
    lambda: libc.syscall({ioprio_set}, 3, os.getuid(), (3 << 13)),
    lambda: write("/proc/self/autogroup", "19"),
):
    try:
        change()
    except OSError:
        pass
print("tried")
"""
IOPRIO = {"x86_64": (251, 252), "aarch64": (30, 31)}


def states(pids: list[int]) -> dict[int, dict[str, object]]:
    """Return the states of the existing processes."""
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = state(pid)
    return found


def state(pid: int) -> dict[str, object]:
    """Return the attributes of a process that other processes might change."""
    own = Path(f"/proc/{pid}")
    fields = (own / "stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None)
    return {
        "limits": (own / "limits").read_text(),
        "priority": (fields[15], fields[16], fields[38]),  # of the kernel, niceness, policy
        "processors": os.sched_getaffinity(pid),
        "disk": libc.syscall(IOPRIO[platform.machine()][1], 1, pid),
        "memory": (own / "oom_score_adj").read_text(),
        "group": (own / "autogroup").read_text() if (own / "autogroup").exists() else "",
    }


@pytest.mark.parametrize("in_session", [False, True], ids=["program", "session"])
async def test_limits_priority_and_processors_of_others_stay(everywhere, root_of, in_session):
    session = await everywhere.open_session() if in_session else None
    pids = sorted({root_of, os.getpid(), *server_processes(root_of)})
    before = states(pids)
    neighbour = asyncio.ensure_future(everywhere.execute("import time; time.sleep(1); print('unharmed')"))
    program = CHANGE.format(pids=pids, ioprio_set=IOPRIO[platform.machine()][0])
    assert (await everywhere.execute(program, session=session)).stdout == "tried\n"
    after = states(pids)
    assert len(after) >= 4  # this process, the server and its interpreters
    assert after == {pid: before[pid] for pid in after}
    assert (await neighbour).stdout == "unharmed\n"
    if session is not None:
        await everywhere.close_session(session)
