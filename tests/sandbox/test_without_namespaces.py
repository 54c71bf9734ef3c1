"""Isolation without namespaces, as root of a container that may change users, and as an unprivileged user."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox.programs import LEAVE
from sandbox.session_support import until

from agentrl_sandbox.client import PROPERTIES, Outcome

WORLDS = ["container", "unprivileged"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("everywhere", WORLDS, indirect=True, scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a world without namespaces"),
]


@pytest.fixture(scope="module")
def run(everywhere):
    return everywhere.execute


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_is_left(run, everywhere):
    before = set(below(everywhere.process.pid))
    yield
    done = await run("import os; print(os.listdir())")
    assert (done.outcome, done.stdout) == (Outcome.OK, "[]\n")
    for _ in range(6000):  # helpers that remove files end later
        if set(below(everywhere.process.pid)) <= before:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"processes are left: {set(below(everywhere.process.pid)) - before}")


@pytest.fixture
def public():
    """Return a directory that all users may enter and change."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


def below(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *below(int(child))]
    return found


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


async def test_every_property_holds(everywhere):
    assert everywhere.isolation.missing == ()
    assert set(everywhere.isolation.layers) == set(PROPERTIES)


async def test_layers_are_those_of_the_world(everywhere, request):
    layers = everywhere.isolation.layers
    assert not any("namespace" in layer for layer in layers.values())
    assert ("a user for each slot" in layers["no_foreign_signals"]) == ("container" in request.node.name)


# Reading

OPEN = "try:\n    print(open({!r}, 'rb').read()[:99])\nexcept OSError:\n    print('refused')"


async def test_a_file_that_everyone_may_read_is_not_read(run, public):
    (public / "secret").write_text("42")
    assert (await run(OPEN.format(str(public / "secret")))).stdout == "refused\n"


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/shadow", "/proc/1/cmdline", "/proc/1/environ", "/proc/1/mounts"])
async def test_the_systems_own_files_are_not_read(run, path):
    assert (await run(OPEN.format(path))).stdout == "refused\n"


@pytest.mark.parametrize("path", ["/", "/etc", "/home", "/root", "/tmp", "/proc", "/dev", "/dev/shm", "..", "/sys"])
async def test_directories_are_not_listed(run, path):
    program = f"import os\ntry:\n    print(os.listdir({path!r}))\nexcept OSError:\n    print('refused')"
    assert (await run(program)).stdout == "refused\n"


async def test_nothing_of_server_and_client_is_read(run, everywhere):
    processes = [everywhere.process.pid, *below(everywhere.process.pid)]
    program = (
        f"import os\nfor pid in {processes}:\n"
        "    for name in ('environ', 'cmdline', 'mem', 'maps', 'fd/0', 'fd/3', 'cwd/x', 'status'):\n"
        "        try:\n            open(f'/proc/{pid}/{name}', 'rb').read(1)\n            print('read', pid, name)\n"
        "        except OSError:\n            pass\n"
        "    try:\n        print(os.listdir(f'/proc/{pid}/fd'))\n    except OSError:\n        pass"
    )
    assert (await run(program)).stdout == ""


async def test_a_link_to_a_file_outside_reads_nothing(run, public):
    (public / "secret").write_text("42")
    program = (
        "import os\nseen = []\n"
        f"os.symlink({str(public / 'secret')!r}, 'soft')\n"
        f"for path in ('soft', '/proc/self/cwd/soft', '/proc/self/root{public / 'secret'}'):\n"
        "    try:\n        seen.append(open(path).read())\n    except OSError:\n        pass\n"
        f"for make in (lambda: os.link({str(public / 'secret')!r}, 'hard'),"
        f" lambda: os.rename({str(public / 'secret')!r}, 'moved')):\n"
        "    try:\n        make()\n        seen.append('made')\n    except OSError:\n        pass\nprint(seen)"
    )
    assert (await run(program)).stdout == "[]\n"
    assert (public / "secret").read_text() == "42"


NEIGHBOUR = (
    "import os, time\nos.umask(0)\nopen('secret', 'w').write('42')\nprint(os.getcwd(), flush=True)\ntime.sleep(1)"
)


async def test_a_neighbours_scratch_is_closed(run):
    neighbour = asyncio.ensure_future(run(NEIGHBOUR))
    look = (
        "import os, time\nseen = []\nend = time.monotonic() + 0.6\nhere = os.getcwd()\n"
        "while time.monotonic() < end:\n"
        "    for slot in set(range(64)) - {int(os.path.basename(here))}:\n"
        "        path = os.path.join(os.path.dirname(here), str(slot), 'secret')\n"
        "        for act in (lambda: open(path).read(), lambda: open(path, 'w'), lambda: os.unlink(path)):\n"
        "            try:\n                seen.append(act())\n"
        "            except OSError:\n                pass\nprint(seen)"
    )
    assert (await run(look)).stdout == "[]\n"
    assert (await neighbour).outcome is Outcome.OK


# Writing


async def test_files_outside_are_neither_made_nor_changed(run, public):
    file = public / "file"
    file.write_text("as it was")
    file.chmod(0o666)
    program = (
        f"import os\npath = {str(file)!r}\ndone = []\n"
        "for act in (lambda: open(path, 'w'), lambda: open(path, 'a'), lambda: os.truncate(path, 0),"
        " lambda: os.open(path, os.O_RDONLY | os.O_TRUNC), lambda: os.unlink(path),"
        " lambda: os.rename(path, path + 'x'),"
        " lambda: os.link(path, path + 'y'), lambda: os.symlink('a', path + 'z'), lambda: os.mkdir(path + 'd'),"
        " lambda: os.mkfifo(path + 'p'), lambda: os.chmod(path, 0o600), lambda: os.setxattr(path, 'user.a', b'1'),"
        " lambda: open('/tmp/made', 'w'), lambda: open('/var/tmp/made', 'w')):\n"
        "    try:\n        act()\n        done.append(act)\n    except OSError:\n        pass\nprint(done)"
    )
    assert (await run(program)).stdout == "[]\n"
    assert (file.read_text(), file.stat().st_mode & 0o777, os.listdir(public)) == ("as it was", 0o666, ["file"])


async def test_each_file_is_bounded(run, settings):
    program = (
        "written = 0\ntry:\n    with open('big', 'wb', buffering=0) as f:\n        while True:\n"
        "            written += f.write(b'x' * 65536)\nexcept OSError as error:\n    print(written, error.strerror)"
    )
    assert (await run(program)).stdout == f"{settings.scratch_mb << 20} File too large\n"


# What is left behind

LEAVERS = {
    "a deep tree": "for _ in range(10_000):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'w')",
    "many files": "for i in range(5_000):\n    open(str(i), 'w')",
    "names that are not text": "for name in (b'\\n', b'\\xff\\xfe', b'-rf', b'a' * 255):\n    os.mkdir(name)",
    "closed directories": (
        "os.makedirs('a/b/c')\nopen('a/b/f', 'w')\nos.umask(0o777)\nos.mkdir('a/x', 0)\nos.mkdir('y', 0)"
    ),
    "links that lead out": (
        "os.symlink('/usr', 'usr')\nos.symlink('.', 'loop')\nos.mkdir('d')\nos.symlink('/', 'd/root')"
    ),
    "pipes": "os.mkdir('d')\nos.mkfifo('d/p')",
}


@pytest.mark.parametrize("what", LEAVERS)
async def test_files_are_not_left_for_the_next_program(run, what):
    done = await run("import os\n" + LEAVERS[what], timeout=300)
    assert (done.outcome, done.stderr) == (Outcome.OK, "")
    for _ in range(8):  # whichever slot comes next
        assert (await run("import os; print(os.listdir())")).stdout == "[]\n"
    assert os.path.isdir("/usr/bin")


async def test_shared_memory_is_refused_or_removed(run):
    name = f"left-{secrets.token_hex(4)}"
    await run(f"open('/dev/shm/{name}', 'w').write('x')\nprint('made')")
    assert await until(lambda: not os.path.exists(f"/dev/shm/{name}"))


DAEMON = (
    f"import os, time\n{LEAVE}"
    "if os.fork() == 0:\n    leave()\n    if os.fork() == 0:\n"
    "        os.execv('/bin/sh', ['sh', '-c', 'trap \"\" TERM HUP; sleep 60 & sleep 60 # {mark}; true'])\n"
    "    os._exit(0)\n"
)


async def test_daemons_end_with_their_program(run):
    mark = secrets.token_hex(8)
    call = asyncio.ensure_future(run(DAEMON.format(mark=mark) + "time.sleep(1.5)"))
    seen: list[str] = []
    while not call.done():
        seen += holding(mark)
        await asyncio.sleep(0.01)
    assert seen
    assert (await call).outcome is Outcome.OK
    assert holding(mark) == []


async def test_a_fork_bomb_that_outlives_its_program_ends_with_it(run):
    program = (
        f"import os\n{LEAVE}"
        "if os.fork() == 0:\n    leave()\n    while True:\n        try:\n"
        "            if os.fork() == 0:\n"
        "                leave()\n        except OSError:\n            pass"
    )
    assert (await run(program)).outcome in (Outcome.OK, Outcome.KILLED)
    assert (await run("import os\nos.waitpid(os.fork(), 0) if os.fork() else None\nprint('forks', flush=True)")).stdout


async def test_memory_of_orphans_is_counted(run, settings):
    each = settings.memory_mb // 3
    program = (
        f"import os, time\n{LEAVE}"
        "for _ in range(6):\n    if os.fork() == 0:\n        leave()\n        if os.fork() == 0:\n"
        f"            data = b'x' * ({each} << 20)\n            time.sleep(60)\n        os._exit(0)\ntime.sleep(60)"
    )
    assert (await run(program)).outcome is Outcome.MEMORY_LIMIT


async def test_memory_of_children_of_threads_is_counted(run, settings):
    each = settings.memory_mb // 3
    program = (
        "import os, threading, time\ndef work():\n    for _ in range(6):\n        if os.fork() == 0:\n"
        f"            data = b'x' * ({each} << 20)\n            time.sleep(60)\n    time.sleep(60)\n"
        "threading.Thread(target=work).start()"
    )
    assert (await run(program)).outcome is Outcome.MEMORY_LIMIT


# Signals and tracing


async def test_no_process_of_the_sandbox_is_signalled(run, everywhere):
    processes = [everywhere.process.pid, *below(everywhere.process.pid), os.getpid(), 1]
    program = (
        f"import os, signal\nfor pid in [os.getppid(), -os.getppid(), -1] + {processes}:\n"
        "    try:\n        os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass\nprint('tried')"
    )
    assert (await run(program)).outcome in (Outcome.OK, Outcome.KILLED)
    assert set(processes[:-1]) - {os.getpid()} <= {everywhere.process.pid, *below(everywhere.process.pid)}


async def test_a_program_may_signal_its_own_processes(run):
    program = (
        "import os, signal, time\npid = os.fork()\nif pid == 0:\n    time.sleep(60)\n"
        "os.kill(pid, signal.SIGTERM)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert (await run(program)).stdout == "-15\n"


async def test_a_program_does_not_undo_its_offer_to_the_oom_killer(run):
    program = (
        "print(open('/proc/self/oom_score_adj').read().strip())\n"
        "try:\n    open('/proc/self/oom_score_adj', 'w').write('0')\nexcept OSError:\n    print('refused')"
    )
    assert (await run(program)).stdout == "1000\nrefused\n"
