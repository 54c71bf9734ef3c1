"""Isolation without root: the sandbox creates a user namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl_sandbox

pytestmark = pytest.mark.slow

PROGRAMS = {
    "capabilities": "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('Cap')])",
    "processes": (
        "import os, time\nmade = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(60)\n"
        "        made += 1\nexcept OSError:\n    print(made)"
    ),
    "mount": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nprint(libc.mount(b'x', b'/scratch', b'tmpfs', 0, None),"
        " libc.umount2(b'/proc', 2), [p for p in os.listdir('/proc') if p.isdigit()])"
    ),
    "write": (
        "import os\nfor d in ('/', '/usr', os.path.dirname(os.__file__)):\n"
        "    try:\n        open(d + '/planted', 'w')\n"
        "    except OSError as error:\n        print(error.strerror)"
    ),
    "timeout": "import os\nos.fork()\nwhile True: pass",
    "science": "import sympy, os; print(sympy.factorint(60), os.getpid(), os.listdir())",
    "become": "import os; os.setuid(1)",
}

SCRIPT = """
import asyncio, json, os, sys
from agentrl_sandbox.client import SandboxSettings, open_sandbox
from agentrl_sandbox.runner import kernel

def reach(needed):
    # Directories that only root may enter hide an interpreter below them: show it through empty ones.
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    descriptors = {path: os.open(path, os.O_PATH) for path in needed}
    closed = {str(p) for path in needed for p in [path, *parents(path)] if not os.stat(p).st_mode & 1}
    for directory in sorted(closed):
        if not any(directory.startswith(other + "/") for other in closed):
            kernel.mount("none", directory, "tmpfs", 0, "mode=755")
    for path, descriptor in descriptors.items():
        if not os.path.exists(path):
            os.makedirs(path)
            kernel.mount(f"/proc/self/fd/{descriptor}", path, None, kernel.MS_BIND | kernel.MS_REC)

def parents(path):
    while path != "/":
        path = os.path.dirname(path)
        yield path

async def main(programs):
    sandbox = await open_sandbox(SandboxSettings(max_processes=8, workers=4))
    seen = {"isolation": sandbox.isolation.describe()}
    for name, program in programs.items():
        done = await sandbox.execute(program, timeout=0.5 if name == "timeout" else 20)
        seen[name] = [done.outcome.value, done.stdout, done.stderr]
    seen["branches"] = await branches(sandbox)
    await sandbox.close()
    print(json.dumps(seen))

async def branches(sandbox):
    origin = await sandbox.open_session()
    await sandbox.execute("x = 'both'; open('f', 'w').write('both')", session=origin)
    fork = await sandbox.fork_session(origin)
    await sandbox.execute("x = open('f', 'w').write('fork')", session=fork)
    look = "print(x, open('f').read(), [l.split()[1] for l in open('/proc/self/status') if l.startswith('CapEff')])"
    told = [(await sandbox.execute(look, session=name)).stdout for name in (origin, fork)]
    await sandbox.close_session(origin)
    done = await sandbox.execute("while True: pass", session=fork, timeout=0.5)
    return [*told, done.outcome.value]

if os.geteuid() == 0:
    reach(json.loads(sys.argv[2]))
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
asyncio.run(main(json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the results of PROGRAMS in a sandbox that an unprivileged user opened."""
    package = Path(agentrl_sandbox.__file__).parent
    needed = sorted({sys.prefix, sys.base_prefix, str(package.parent)})
    command = [sys.executable, "-W", "error", "-c", SCRIPT, json.dumps(PROGRAMS), json.dumps(needed)]
    environment = {**os.environ, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd="/", check=False)
    if "UnisolatedError" in ran.stderr and "unshare" in ran.stderr:
        pytest.skip(f"this machine gives unprivileged users no user namespaces: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_every_property_holds(seen):
    assert "MISSING" not in seen["isolation"]
    assert seen["isolation"].endswith("(user namespaces)")


def test_programs_have_no_capability(seen):
    assert seen["capabilities"][1] == f"{['0000000000000000'] * 5}\n"


def test_processes_are_bounded(seen):
    assert 0 < int(seen["processes"][1]) < 8


def test_mounting_and_foreign_processes_are_refused(seen):
    assert seen["mount"][1] == "-1 -1 ['1']\n"


def test_the_root_is_read_only(seen):
    assert seen["write"][1] == "Read-only file system\n" * 3


def test_a_timeout_kills(seen):
    assert seen["timeout"][0] == "timeout"


def test_science_is_warm_and_scratch_empty(seen):
    assert seen["science"][1] == "{2: 2, 3: 1, 5: 1} 1 []\n"


def test_sessions_branch_and_their_limits_hold(seen):
    none = ["0000000000000000"]
    assert seen["branches"] == [f"both both {none}\n", f"4 fork {none}\n", "timeout"]


def test_a_program_cannot_become_another_user(seen):
    assert seen["become"][0] == "error"
