"""Attacks by hostile programs, one property per test, in every environment. Afterwards the sandbox still works.

Tests of what a root file system and a PID namespace of one's own give are of the world with namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
import signal
import socket
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox.programs import LEAVE
from sandbox.session_support import WAIT_FOR_SIGCONT, pids_waiting_for_sigcont, until

from agentrl_sandbox.client import Outcome

_BELOW_TMP = any(path.startswith("/tmp/") for path in (sys.prefix, sys.base_prefix, __file__))
TMP = "/scratch" if _BELOW_TMP else "/tmp"  # an interpreter below /tmp is shown there, and /tmp is read-only

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
with_namespaces = pytest.mark.parametrize("everywhere", ["namespaces"], indirect=True)


@pytest.fixture(scope="module")
def run(everywhere):
    return everywhere.execute


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def still_answers(run):
    yield
    done = await run("print('alive')")
    assert (done.outcome, done.stdout) == (Outcome.OK, "alive\n")


def running(mark: str) -> list[str]:
    """Return the processes of this machine whose command line or environment contains a mark."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            try:
                text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if mark.encode() in text:
                found.append(process.name)
    return found


# Bounded processes


async def test_a_fork_bomb_is_bounded(run, settings):
    program = (
        "import os, time\nmade = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(60)\n"
        f"        made += 1\nexcept OSError:\n    time.sleep(60 if made >= {settings.max_processes} else 0)\n"
        "    print(made)"
    )
    done = await run(program)
    if done.outcome is not Outcome.KILLED:  # by the watch, where the kernel counts more than this program
        assert done.outcome is Outcome.OK
        assert int(done.stdout) < settings.max_processes


@pytest.mark.parametrize("leave", ["pass", "os.setpgid(0, 0)", "os.setsid()"], ids=["one group", "groups", "sessions"])
async def test_an_exponential_fork_bomb_ends_at_its_deadline(run, leave):
    program = (
        "import os\nwhile True:\n    try:\n        if os.fork() == 0:\n"
        f"            {leave}\n    except OSError:\n        pass"
    )
    assert (await run(program, timeout=0.5)).outcome in (Outcome.TIMEOUT, Outcome.KILLED)


async def test_a_thread_bomb_is_bounded(run, settings):
    program = (
        "import threading, time, os\nmade = 0\ntry:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n        made += 1\n"
        f"except RuntimeError:\n    time.sleep(60 if made >= {settings.max_processes} else 0)\n    print(made)"
    )
    done = await run(program)
    if done.outcome is not Outcome.KILLED:
        assert int(done.stdout) < settings.max_processes


async def test_a_daemonised_grandchild_is_gone_with_its_program(run):
    mark = f"mark{secrets.token_hex(8)}"
    program = (
        f"import os, subprocess, sys, time\n{LEAVE}"
        "if os.fork() == 0:\n    leave()\n    if os.fork() == 0:\n"
        "        os.execv('/bin/sh', ['sh', '-c', 'trap \"echo > seen\" CONT; '\n"
        f"            'while true; do sleep 0.02; done # {mark}'])\n    os._exit(0)\n"
        "while not os.path.exists('seen'):\n    time.sleep(0.01)\nprint('left it behind')"
    )
    call = asyncio.ensure_future(run(program))
    seen: list[str] = []
    while not call.done():
        for process in running(mark):
            seen.append(process)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGCONT)  # it tells the program that it was seen
        await asyncio.sleep(0.01)
    assert (await call).stdout == "left it behind\n"
    assert seen, "the grandchild never ran: the test shows nothing"
    assert running(mark) == []


# Bounded memory


@pytest.mark.parametrize(
    "program",
    [
        "data = bytearray(10**10)",
        "data = []\nwhile True:\n    data.append('x' * 10**6)",
        "data = [0]\nwhile True:\n    data += data",
        "import numpy\nnumpy.ones(10**10)",
        "import numpy\ndata = [numpy.ones(10**6) for _ in range(10**4)]",
    ],
)
async def test_a_memory_bomb_meets_the_limit(run, program):
    done = await run(program)
    assert done.outcome is Outcome.MEMORY_LIMIT
    assert "MemoryError" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("flags", [0x21, 0x22])  # shared and private, anonymous
async def test_a_bomb_of_memory_maps_meets_the_limit(run, flags):
    program = (
        "import mmap\nkept = []\nwhile True:\n"
        f"    kept.append(mmap.mmap(-1, 1 << 24, flags={flags}))\n    kept[-1][::4096] = b'x' * 4096"
    )
    done = await run(program)
    full = ("Cannot allocate memory", "File too large", "No space left")  # shared memory lies in scratch
    assert done.outcome is Outcome.MEMORY_LIMIT or any(error in done.stderr for error in full)


async def test_memory_spread_over_processes_is_summed(run, settings):
    each = settings.memory_mb // 4
    program = (
        f"import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        f"        data = b'x' * ({each} << 20)\n        time.sleep(60)\ntime.sleep(60)"
    )
    assert (await run(program)).outcome is Outcome.MEMORY_LIMIT


async def test_memory_of_processes_whose_first_thread_ended_is_counted(run, settings):
    each, call = settings.memory_mb // 4, 60 if platform.machine() == "x86_64" else 93  # exit, of a single thread
    program = (
        "import ctypes, os, threading, time\nlibc = ctypes.CDLL(None)\ndef work():\n"
        f"    data = b'x' * ({each} << 20)\n    time.sleep(60)\n"
        "for _ in range(6):\n    if os.fork() == 0:\n"
        f"        threading.Timer(0.2, work).start()\n        libc.syscall({call}, 0)\ntime.sleep(60)"
    )
    assert (await run(program)).outcome is Outcome.MEMORY_LIMIT


@with_namespaces
async def test_the_scratch_directory_is_bounded(run, settings):
    program = (
        "written = 0\ntry:\n    with open('big', 'wb', buffering=0) as f:\n        while True:\n"
        "            written += f.write(b'x' * 65536)\nexcept OSError:\n    pass\n"
        "import os\ntry:\n    with open('second', 'wb', buffering=0) as f:\n        while True:\n"
        "            written += f.write(b'x' * 65536)\nexcept OSError:\n    print(written)"
    )
    done = await run(program)
    assert 0 < int(done.stdout) <= settings.scratch_mb << 20


@with_namespaces
async def test_a_million_files_are_refused(run):
    program = (
        "made = 0\ntry:\n    while made < 1_000_000:\n        open(str(made), 'w').close()\n        made += 1\n"
        "except OSError:\n    print(made)"
    )
    assert int((await run(program)).stdout) < 20_000


# Bounded time


async def test_a_sleep_past_the_deadline_is_a_timeout(run):
    assert (await run("import time; time.sleep(60)", timeout=0.2)).outcome is Outcome.TIMEOUT


async def test_a_spin_that_ignores_every_signal_is_a_timeout(run):
    program = (
        "import signal\nfor n in set(range(1, 65)) - {9, 19, 32, 33}:\n    signal.signal(n, signal.SIG_IGN)\n"
        "while True:\n    pass"
    )
    assert (await run(program, timeout=0.3)).outcome is Outcome.TIMEOUT


async def test_a_spin_in_c_is_a_timeout(run):
    assert (await run("x = 10 ** 10 ** 9", timeout=0.3)).outcome in (Outcome.TIMEOUT, Outcome.MEMORY_LIMIT)
    backtracking = "import re; re.match('(a+)+$', 'a' * 40 + 'b')"
    assert (await run(backtracking, timeout=0.3)).outcome is Outcome.TIMEOUT


async def test_a_thread_that_never_ends_is_a_timeout(run):
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nprint('main ends')"
    assert (await run(program, timeout=0.3)).outcome is Outcome.TIMEOUT


# Bounded output


@pytest.mark.parametrize("stream", [1, 2])
async def test_a_flood_is_an_output_limit(run, stream):
    done = await run(f"import os\nfor _ in range(1600):\n    os.write({stream}, b'\\xff' * 65536)")
    assert (done.outcome, done.truncated) == (Outcome.OUTPUT_LIMIT, True)


async def test_output_of_descendants_counts(run):
    done = await run("import os\nos.fork(); os.fork()\nwhile True:\n    print('x' * 10_000)")
    assert done.outcome is Outcome.OUTPUT_LIMIT


# Robust interpreter


async def test_endless_recursion_is_an_error(run):
    done = await run("def f(n):\n    return f(n + 1)\nf(0)")
    assert done.outcome is Outcome.ERROR
    assert "RecursionError" in done.stderr


async def test_deep_nesting_that_breaks_the_parser_is_the_programs_own_end(run):
    for text in ("(" * 100_000, "-" * 100_000 + "1", "x" + ".y" * 100_000, "[" * 5000 + "]" * 5000):
        assert (await run(text)).outcome in (Outcome.ERROR, Outcome.KILLED, Outcome.MEMORY_LIMIT)


async def test_recursion_through_c_is_the_programs_own_end(run):
    program = "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(s): return repr(s)\nrepr(A())"
    assert (await run(program)).outcome in (Outcome.ERROR, Outcome.KILLED, Outcome.MEMORY_LIMIT)


async def test_a_program_cannot_fake_a_failure_of_the_sandbox(run):
    program = (
        "import os\nfor fd in range(3, 256):\n    try:\n        os.write(fd, b'M no data'); os.close(fd)\n"
        "    except OSError:\n        pass\nos._exit(70)"
    )
    assert (await run(program)).outcome in (Outcome.ERROR, Outcome.MEMORY_LIMIT)


async def test_messages_of_the_runner_printed_by_a_program_are_text(run):
    text = '{"op": "done", "id": 1, "outcome": "ok"}'
    done = await run(f"import os\nos.write(1, b'\\x00\\x00\\x00\\x30\\x00\\x00\\x00\\x30')\nprint('{text}')")
    assert done.outcome is Outcome.OK
    assert text in done.stdout


# No network


async def test_tcp_udp_and_names_reach_nothing(run):
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        udp.bind(("127.0.0.1", 0))
        program = (
            "import socket\nerrors = 0\n"
            f"for kind, host, port in [(1, '127.0.0.1', {tcp.getsockname()[1]}), (1, '1.1.1.1', 53),"
            " (2, '8.8.8.8', 53),"
            " (1, '169.254.169.254', 80)]:\n"
            "    try:\n        socket.socket(socket.AF_INET, kind).connect((host, port))\n"
            "    except OSError:\n        errors += 1\n"
            f"try:\n    socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))\n"
            "except OSError:\n    errors += 1\n"
            "try:\n    socket.getaddrinfo('example.com', 80)\nexcept OSError:\n    errors += 1\nprint(errors)"
        )
        assert (await run(program)).stdout == "6\n"
        tcp.setblocking(False)
        udp.setblocking(False)
        with pytest.raises(BlockingIOError):
            tcp.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(1)


async def test_raw_sockets_are_refused(run):
    program = "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"
    assert "PermissionError" in (await run(program)).stderr


async def test_unix_sockets_of_others_are_not_reached(run, tmp_path):
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        path = str(tmp_path / "s")
        name = f"agentrl-{secrets.token_hex(8)}"
        named.bind(path)
        named.listen()
        abstract.bind("\0" + name)
        abstract.listen()
        program = (
            f"import socket\nfor address in ({path!r}, '\\0' + {name!r}):\n    try:\n"
            "        socket.socket(socket.AF_UNIX).connect(address)\n        print('reached')\n"
            "    except OSError:\n        print('refused')"
        )
        assert (await run(program)).stdout == "refused\nrefused\n"


# Writes and reads


async def test_writes_outside_scratch_fail(run, tmp_path):
    tmp_path.chmod(0o777)
    program = (
        "import os, sys\nrefused = 0\n"
        f"places = ['/', '/usr', '/etc', '/var/tmp', '/root', sys.prefix, sys.base_prefix, {str(tmp_path)!r},"
        " os.path.dirname(os.__file__)]\n"
        "for place in places:\n    try:\n        open(place + '/planted', 'w').close()\n"
        "    except OSError:\n        refused += 1\nprint(refused == len(places))"
    )
    assert (await run(program)).stdout == "True\n"
    assert list(tmp_path.iterdir()) == []


@with_namespaces
async def test_files_of_the_host_are_not_in_view(run, tmp_path):
    (tmp_path / "gold").write_text("42")
    program = (
        "import os\n"
        f"print(os.path.exists({str(tmp_path / 'gold')!r}), os.path.exists('/etc/shadow'), "
        f"os.path.exists({os.path.abspath(__file__)!r}), os.listdir({TMP!r}))"
    )
    assert (await run(program)).stdout == "False False False []\n"


@with_namespaces
async def test_scratch_is_fresh_and_private(run):
    write = (
        f"import os\nopen('/scratch/secret', 'w').write('s'); open('{TMP}/t', 'w').close(); open('/dev/shm/u', 'w')\n"
    )
    waiting = asyncio.ensure_future(run(write + WAIT_FOR_SIGCONT + "print(sorted(os.listdir()))"))
    assert await until(lambda: bool(pids_waiting_for_sigcont()))
    look = "import os, glob\nprint(os.listdir('/scratch'), glob.glob('/proc/[0-9]*/root/scratch/*'))"
    assert (await run(look)).stdout == "[] []\n"
    os.kill(pids_waiting_for_sigcont()[0], signal.SIGCONT)
    assert (await waiting).stdout == "['secret', 't', 'u']\n"
    assert (await run(look)).stdout == "[] []\n"


async def test_the_environment_holds_nothing_of_the_trainers(run):
    done = await run("import os; print(sorted(os.environ))")
    assert "AGENTRL" not in done.stdout
    assert set(os.environ) - {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR"}
    assert "PYTEST_CURRENT_TEST" in os.environ
    assert "PYTEST_CURRENT_TEST" not in done.stdout


async def test_no_descriptor_but_the_standard_ones_leads_out(run):
    program = (
        "import os\nfor fd in os.listdir('/proc/self/fd'):\n    try:\n"
        "        print(fd, os.readlink('/proc/self/fd/' + fd).split(':')[0])\n    except OSError:\n        pass"
    )
    seen = dict(line.split(" ", 1) for line in (await run(program)).stdout.splitlines())
    assert seen.pop("0").startswith("/memfd")
    assert set(seen.values()) <= {"pipe"}  # stdout, stderr and the status pipe


async def test_mounts_and_namespaces_give_no_power_over_the_host(run):
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.mount(b'x', b'/usr', b'tmpfs', 0, None), libc.umount2(b'/scratch', 2), libc.umount2(b'/proc', 2),"
        " libc.chroot(b'/usr'), libc.sethostname(b'x', 1))"
    )
    assert (await run(program)).stdout == "-1 -1 -1 -1 -1\n"


# No foreign signals


async def test_kill_everything_reaches_only_its_own(run):
    victim = asyncio.ensure_future(run(WAIT_FOR_SIGCONT + "print('survived')"))
    assert await until(lambda: bool(pids_waiting_for_sigcont()))
    done = await run(
        "import os, signal\ntry:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError as e:\n    print('none')"
    )
    assert done.outcome in (Outcome.OK, Outcome.KILLED)
    os.kill(pids_waiting_for_sigcont()[0], signal.SIGCONT)
    assert (await victim).stdout == "survived\n"


@with_namespaces
async def test_other_processes_cannot_be_named(run):
    program = (
        "import os\nreached = []\n"
        f"for pid in [{os.getpid()}, {os.getppid()}, os.getppid()] + list(range(2, 5000)):\n    try:\n"
        "        if pid: os.kill(pid, 0); reached.append(pid)\n    except OSError:\n        pass\nprint(reached)"
    )
    assert (await run(program)).stdout == "[]\n"


@with_namespaces
async def test_the_kernels_command_line_and_the_hosts_groups_are_hidden(run):
    program = "print(repr(open('/proc/cmdline').read()), {line.split(':')[2] for line in open('/proc/self/cgroup')})"
    assert (await run(program)).stdout == "'' {'/\\n'}\n"


@with_namespaces
async def test_a_program_sees_only_its_own_processes(run):
    program = "import os; print([p for p in os.listdir('/proc') if p.isdigit()], os.getppid())"
    assert (await run(program)).stdout == "['1'] 0\n"


# Nothing is left for the next program


async def test_a_poisoned_interpreter_is_not_seen_by_the_next(run):
    poison = (
        "import builtins, sys, math, os, random, atexit\nbuiltins.print = None\nbuiltins.len = lambda x: 42\n"
        "sys.modules['math'].pi = 3\nsys.modules['json'] = None\nos.environ['X'] = '1'\n"
        "sys.path.clear(); sys.setrecursionlimit(50)\natexit.register(os.abort)\nos._exit(0)"
    )
    look = "import json, math, os, sys\nprint(len('ab'), math.pi > 3.1, 'X' in os.environ, sys.getrecursionlimit())"
    for suffix in ("", "\nimport numpy"):
        await run(poison + suffix)
        assert (await run(look + suffix)).stdout == "2 True False 1000\n"


async def test_poisoned_sympy_is_not_seen_by_the_next(run):
    await run("import sympy\nsympy.core.cache.clear_cache()\nsympy.solve = None\nsympy.S.Half.p = 9")
    assert (await run("import sympy\nx = sympy.Symbol('x')\nprint(sympy.solve(2*x - 1, x))")).stdout == "[1/2]\n"


DRAWS = {
    "random": "import random\nprint(random.random())",
    "a file": "import draws",
    "numpy": "import numpy as np\nprint(np.random.rand(), np.random.default_rng().random())",
    "sympy": "import sympy\nprint(sympy.randprime(10**30, 10**31))",
    "mpmath": "import mpmath\nprint(mpmath.rand())",
}
SEEDED = {
    "random": "import random\nrandom.seed(1)\nprint(random.random())",
    "numpy": "import numpy as np\nnp.random.seed(1)\nprint(np.random.rand(), np.random.default_rng(1).random())",
    "sympy": "import sympy.core.random as r\nr.seed(1)\nprint(r.rng.random(), r._assumptions_rng.random())",
}


@pytest.mark.parametrize("draw", DRAWS)
async def test_random_states_differ_between_programs(run, draw):
    files = {"draws.py": DRAWS["random"].encode()}
    assert len({(await run(DRAWS[draw], files=files)).stdout for _ in range(5)}) == 5


@pytest.mark.parametrize("seed", SEEDED)
async def test_a_seed_counts_and_does_not_leak(run, seed):
    seeded, again = [(await run(SEEDED[seed])).stdout for _ in range(2)]
    free = (await run("\n".join(line for line in SEEDED[seed].splitlines() if "seed(" not in line))).stdout
    assert seeded == again != free


async def test_no_generator_that_was_made_before_the_program_gives_two_programs_the_same(run, everywhere):
    draw = (
        "import gc, json, random, sympy, numpy.random as n\ngc.unfreeze()\nthings = gc.get_objects()\n"
        "drawn = [thing.random() for thing in things if isinstance(thing, random.Random)]\n"
        "drawn += [thing.random_sample() for thing in things if isinstance(thing, n.RandomState)]\n"
        "drawn += [n.Generator(thing).random() for thing in things if isinstance(thing, n.BitGenerator)]\n"
        "print(json.dumps(drawn))"
    )
    sessions = [await everywhere.open_session() for _ in range(2)]
    drawn = [json.loads((await run(draw, session=session)).stdout) for session in (None, None, *sessions)]
    for session in sessions:
        await everywhere.close_session(session)
    assert min(map(len, drawn)) >= 6  # random's, three of SymPy's, NumPy's twice
    assert len(set().union(*drawn)) == sum(map(len, drawn))


async def test_a_forked_process_draws_numbers_of_its_own(run):
    program = (
        "import os, random\nr, w = os.pipe()\nif os.fork() == 0:\n"
        "    os.write(w, repr(random.random()).encode())\n    os._exit(0)\n"
        "print(os.read(r, 99).decode() != repr(random.random()))"
    )
    assert (await run(program)).stdout == "True\n"


async def test_many_hostile_programs_at_once_leave_the_quick_ones_alone(run):
    hostile = [asyncio.ensure_future(run("while True: pass", timeout=1.0)) for _ in range(3)]
    assert (await run("print(1)")).outcome is Outcome.OK
    assert not any(task.done() for task in hostile)
    assert [done.outcome for done in await asyncio.gather(*hostile)] == [Outcome.TIMEOUT] * 3
