"""Denied system calls, each tried by a real program, and libraries that must work without them."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import platform

import pytest

from agentrl_sandbox.client import Outcome
from agentrl_sandbox.runner.seccomp import (
    DENIED,
    DENIED_WITHOUT_SEPARATE_USER,
    LAST_KNOWN,
    MACHINES,
    NOT_IMPLEMENTED,
    system_call_number,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
MACHINE = platform.machine()
NEEDS_MACHINE = pytest.mark.skipif(MACHINE not in MACHINES, reason=f"no system call numbers for {MACHINE}")


@pytest.fixture(scope="module")
def run(everywhere):
    return everywhere.execute


def calls(requests: dict[str, tuple[int, ...]]) -> str:
    """Return a program that makes system calls by number and prints their errno values (0 for success)."""
    return (
        "import ctypes, json\nlibc = ctypes.CDLL(None, use_errno=True)\nseen = {}\n"
        f"for name, arguments in {requests!r}.items():\n"
        "    ctypes.set_errno(0)\n"
        "    failed = libc.syscall(*map(ctypes.c_long, arguments)) < 0\n"
        "    seen[name] = ctypes.get_errno() if failed else 0\n"
        "print(json.dumps(seen))"
    )


async def errors(run, requests: dict[str, tuple[int, ...]]) -> dict[str, int]:
    done = await run(calls(requests))
    assert done.outcome is Outcome.OK, done.stderr
    return json.loads(done.stdout)


def known(names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {name: (found,) + (0,) * 6 for name in names if (found := system_call_number(name, MACHINE)) is not None}


@NEEDS_MACHINE
@pytest.mark.parametrize("group", DENIED)
async def test_denied_calls_are_not_permitted(run, group):
    requests = known(DENIED[group])
    assert requests
    assert await errors(run, requests) == dict.fromkeys(requests, errno.EPERM)


@NEEDS_MACHINE
async def test_calls_that_libraries_do_without_are_unknown(run):
    requests = known(NOT_IMPLEMENTED)
    assert await errors(run, requests) == dict.fromkeys(requests, errno.ENOSYS)


@NEEDS_MACHINE
async def test_calls_that_are_newer_than_the_filter_are_unknown(run):
    requests = {str(call): (call, 0, 0) for call in range(LAST_KNOWN + 1, LAST_KNOWN + 8)}
    assert await errors(run, requests) == dict.fromkeys(requests, errno.ENOSYS)


@NEEDS_MACHINE
@pytest.mark.parametrize("everywhere", ["unprivileged"], indirect=True)
async def test_without_an_own_user_rights_and_times_of_files_stay(run):
    requests = known((*DENIED_WITHOUT_SEPARATE_USER["rights"], *DENIED_WITHOUT_SEPARATE_USER["times"]))
    assert await errors(run, requests) == dict.fromkeys(requests, errno.EPERM)


CLONE_FLAGS = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "parent": 0x00008000,
}


@NEEDS_MACHINE
async def test_no_clone_makes_a_namespace_or_a_sibling(run):
    clone = system_call_number("clone", MACHINE)
    requests = {name: (clone, flag | 17, 0, 0, 0, 0) for name, flag in CLONE_FLAGS.items()}
    assert await errors(run, requests) == dict.fromkeys(requests, errno.EPERM)


@NEEDS_MACHINE
async def test_arguments_that_reach_others_are_not_permitted(run):
    def at(name: str, *arguments: int) -> tuple[int, ...]:
        return (system_call_number(name, MACHINE), *arguments, *(0,) * (6 - len(arguments)))

    parent = os.getpid()
    requests = {
        "type into a terminal": at("ioctl", 0, 0x5412, 0),
        "outlive the parent": at("prctl", 1, 0),
        "leave orphans to the zygote": at("prctl", 36, 0),
        "hide from the watch": at("prctl", 4, 0),
        "a hash of futexes": at("prctl", 78, 1, 1 << 22),
        "a large send buffer": at("setsockopt", 0, 1, 7),
        "a large receive buffer": at("setsockopt", 0, 1, 8),
        "a large pipe": at("fcntl", 1, 1031, 1 << 20),
        "a lease": at("fcntl", 0, 1024, 0),
        "a lock of an open file": at("fcntl", 0, 37, 0),
        "memory without a file": at("mmap", 0, 4096, 3, 0x21, -1),
        "reserved huge pages": at("mmap", 0, 4096, 3, 0x40022, -1),
        "another's limits": at("prlimit64", parent, 0),
        "another's priority": at("setpriority", 0, parent, 19),
        "all of a user's priorities": at("setpriority", 2, 0, 19),
        "another's processors": at("sched_setaffinity", parent, 0, 0),
        "a change of personality": at("personality", 0x0040000),
        "a pair of datagram sockets": at("socketpair", 1, 2, 0, 0),
        "a pair of internet sockets": at("socketpair", 2, 1, 0, 0),
        "a device": at("mknodat", -100, 0, 0o020666, 0),
    }
    assert await errors(run, requests) == dict.fromkeys(requests, errno.EPERM)


async def test_a_message_by_its_address_is_not_sent(run):
    program = (
        "import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))\n"
        "try:\n    a.sendto(b'x', '/x')\nexcept PermissionError as error:\n    print('refused')"
    )
    assert (await run(program)).stdout == "b'x'\nrefused\n"


FAMILIES = {"unix": 1, "ipv4": 2, "ipv6": 10, "netlink": 16, "packet": 17, "alg": 38, "vsock": 40}


@pytest.mark.parametrize("family", FAMILIES)
async def test_sockets_of_every_family_are_refused(run, family):
    done = await run(f"import socket\nsocket.socket({FAMILIES[family]}, 1)")
    assert done.outcome is Outcome.ERROR
    assert "PermissionError" in done.stderr


# Machine code of `int 0x80` with the number of write(2) on i386, and of `syscall` with the number of x32's getpid.
I386 = bytes.fromhex("b814000000cd80c3")
X32 = bytes.fromhex("b8270000400f05c3")


@pytest.mark.skipif(MACHINE != "x86_64", reason="other system call tables are those of x86-64")
@pytest.mark.parametrize("code", [I386, X32], ids=["i386", "x32"])
async def test_other_system_call_tables_end_the_program(run, code):
    program = (
        "import ctypes, mmap\nroom = mmap.mmap(-1, 4096, prot=7)\n"
        f"room.write({code!r})\nat = ctypes.addressof(ctypes.c_char.from_buffer(room))\n"
        "print('calls', flush=True)\nctypes.CFUNCTYPE(ctypes.c_int)(at)()\nprint('called')"
    )
    done = await run(program)
    assert (done.outcome, done.stdout, done.exit_code) == (Outcome.KILLED, "calls\n", -31)  # SIGSYS


async def test_clocks_are_not_set(run):
    program = (
        "import time\ntry:\n    time.clock_settime(time.CLOCK_REALTIME, 0)\nexcept PermissionError:\n    print('no')"
    )
    assert (await run(program)).stdout == "no\n"


# Libraries

LIBRARIES = {
    "numpy": (
        "import numpy as np\na = np.random.default_rng(0).normal(size=(50, 50))\nprint((a @ a).shape)",
        "(50, 50)",
    ),
    "numpy files": (
        "import numpy as np\nnp.save('a', np.ones(3))\nprint(np.load('a.npy', mmap_mode='r').sum())",
        "3.0",
    ),
    "scipy": ("import scipy.optimize as o\nprint(round(o.brentq(lambda x: x * x - 2, 0, 2), 6))", "1.414214"),
    "sympy": ("import sympy\nx = sympy.Symbol('x')\nprint(sympy.integrate(x, x))", "x**2/2"),
    "mpmath": ("import mpmath\nprint(mpmath.nstr(mpmath.zeta(3), 8))", "1.2020569"),
    "networkx": ("import networkx as nx\nprint(nx.shortest_path_length(nx.cycle_graph(9), 0, 4))", "4"),
    "pandas": (
        "import pandas as pd\npd.DataFrame({'a': [1, 2]}).to_csv('t.csv')\nprint(pd.read_csv('t.csv')['a'].sum())",
        "3",
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
async def test_libraries_work(run, library):
    if importlib.util.find_spec(library.split()[0]) is None:
        pytest.skip(f"{library} is not installed")
    program, printed = LIBRARIES[library]
    done = await run(program)
    assert (done.stdout, done.stderr) == (f"{printed}\n", "")


STANDARD = {
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool:\n    print(sum(pool.map(abs, range(-9, 0))))",
        "45",
    ),
    "subprocess": (
        "import subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout.strip())",
        "42",
    ),
    "shell": ("import subprocess\nprint(subprocess.getoutput('echo a | tr a b'))", "b"),
    "forked process": (
        "import multiprocessing as m\na, b = m.Pipe()\n"
        "p = m.get_context('fork').Process(target=lambda: b.send('sent'))\np.start()\nprint(a.recv())\np.join()",
        "sent",
    ),
    "asyncio": ("import asyncio\nprint(asyncio.run(asyncio.sleep(0.01, 'slept')))", "slept"),
    "asyncio subprocess": (
        "import asyncio\nasync def main():\n"
        "    p = await asyncio.create_subprocess_exec('/bin/echo', 'x', stdout=-1)\n"
        "    print((await p.communicate())[0].decode().strip())\nasyncio.run(main())",
        "x",
    ),
    "pipes with names": (
        "import os\nos.mkfifo('p')\nif os.fork() == 0:\n    open('p', 'w').write('through')\n    os._exit(0)\n"
        "print(open('p').read())",
        "through",
    ),
    "temporary files": (
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n    os.makedirs(d + '/a/b')\n"
        "    os.rename(d + '/a/b', d + '/c')\n    os.symlink('c', d + '/l')\n    print(sorted(os.listdir(d)))",
        "['a', 'c', 'l']",
    ),
    "asyncio streams": (
        "import asyncio, socket\nasync def main():\n    a, b = socket.socketpair()\n"
        "    r, w = await asyncio.open_connection(sock=a)\n    s, t = await asyncio.open_connection(sock=b)\n"
        "    w.writelines([bytes(1 << 20)] * 2)\n    print(len(await s.readexactly(2 << 20)))\nasyncio.run(main())",
        "2097152",
    ),
    "memory maps": (
        "import mmap, os\nm = mmap.mmap(-1, 1 << 20)\nif os.fork() == 0:\n    m[:3] = b'abc'\n    os._exit(0)\n"
        "os.wait()\nm.resize(2 << 20)\nprint(m[:3], len(m), mmap.mmap(-1, 1, access=mmap.ACCESS_COPY)[:])",
        "b'abc' 2097152 b'\\x00'",
    ),
    "locks of a program's own": (
        "import fcntl\nwith open('l', 'w') as f:\n    fcntl.lockf(f, fcntl.LOCK_EX)\n    print('locked')\n",
        "locked",
    ),
    "a database": (
        "import sqlite3\nwith sqlite3.connect('d') as d:\n    d.execute('create table t (a)')\n"
        "    d.execute('insert into t values (7)')\nprint(sqlite3.connect('d').execute('select a from t').fetchone())",
        "(7,)",
    ),
    "own limits": (
        "import resource as r\nr.setrlimit(r.RLIMIT_CPU, (1, 1))\nprint(r.getrlimit(r.RLIMIT_CPU))",
        "(1, 1)",
    ),
    "time zones": ("import time\ntime.tzset()\nprint(len(time.tzname))", "2"),
    "own process": ("print(open('/proc/self/comm').read() != '')", "True"),
    "null device": ("open('/dev/null', 'w').write('x')\nprint(open('/dev/null').read() == '')", "True"),
}


@pytest.mark.parametrize("part", STANDARD)
async def test_the_standard_library_works(run, part):
    program, printed = STANDARD[part]
    done = await run(program)
    assert (done.stdout, done.stderr) == (f"{printed}\n", "")


@pytest.mark.parametrize("everywhere", ["namespaces", "container"], indirect=True)
async def test_a_pool_of_processes_works_where_programs_have_shared_memory(run):
    done = await run(
        "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p:\n    print(p.map(abs, [-1, 2]))"
    )
    assert (done.stdout, done.stderr) == ("[1, 2]\n", "")
