"""Limits of a program's memory and files, in every environment."""

from __future__ import annotations

import zlib

import pytest

from agentrl_sandbox.check.resources import RESOURCES
from agentrl_sandbox.client import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
FULL = (Outcome.ERROR, Outcome.OUTPUT_LIMIT)  # refused by a mount of its own, or ended by the watch


async def test_a_program_cannot_write_to_the_memory_file_behind_its_stdin(everywhere):
    program = (
        "import os\ndone = []\n"
        "for act in (lambda: os.ftruncate(0, 1 << 20), lambda: os.pwrite(0, b'x', 0),"
        " lambda: os.pwrite(0, b'x', 1 << 20),"
        " lambda: os.open('/proc/self/fd/0', os.O_RDWR | os.O_TRUNC), lambda: os.posix_fallocate(0, 0, 1 << 20)):\n"
        "    try:\n        act()\n        done.append(os.fstat(0).st_size)\n    except OSError:\n        pass\n"
        "print(done, input())"
    )
    assert (await everywhere.execute(program, stdin="the line")).stdout == "[] the line\n"
    session = await everywhere.open_session()
    assert (await everywhere.execute(program, stdin="the line", session=session)).stdout == "[] the line\n"
    await everywhere.close_session(session)


SHARED = (
    "import os, time\nkept = bytearray(b'x' * ({megabytes} << 20))\nchildren = []\n"
    "for _ in range(6):\n    child = os.fork()\n    if child == 0:\n        time.sleep(1.5)\n        os._exit(0)\n"
    "    children.append(child)\nfor child in children:\n    os.waitpid(child, 0)\nprint('whole')"
)


@pytest.mark.parametrize("science", ["", "import numpy\n"])
async def test_memory_that_forks_share_counts_once(everywhere, settings, science):
    program = science + SHARED.format(megabytes=settings.memory_mb // 2 - 2)  # made from as much again
    done = await everywhere.execute(program)
    assert (done.outcome, done.stdout) == (Outcome.OK, "whole\n")
    session = await everywhere.open_session()
    done = await everywhere.execute(program, session=session)
    assert (done.outcome, done.stdout) == (Outcome.OK, "whole\n")
    await everywhere.close_session(session)


async def test_memory_that_a_fork_copies_counts_again(everywhere, settings):
    program = (
        f"import os, time\nkept = bytearray(b'x' * ({settings.memory_mb * 2 // 3} << 20))\n"
        "os.fork()\nfor _ in range(600):\n    kept[::4096] = b'y' * len(kept[::4096])\n    time.sleep(0.1)"
    )
    assert (await everywhere.execute(program)).outcome is Outcome.MEMORY_LIMIT


async def test_a_bomb_of_zeros_ends_for_its_memory(everywhere, settings):
    compressor = zlib.compressobj(1)
    zeros = bytes(1 << 20)
    bomb = b"".join(compressor.compress(zeros) for _ in range(2 * settings.memory_mb)) + compressor.flush()
    program = "import zlib\nprint(len(zlib.decompress(open('bomb', 'rb').read())))"
    assert (await everywhere.execute(program, files={"bomb": bomb})).outcome is Outcome.MEMORY_LIMIT


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [
        ("os._exit(3)", 3),
        ("os.write(200, b'M')\nos._exit(3)", 3),
        ("if os.fork() == 0:\n    bytearray(10**11)\nos.wait()\nsys.exit(3)", 3),
        ("if os.fork() == 0:\n    bytearray(10**11)\nos.wait()\nsys.exit(1)", 1),
        (
            "for n in range(3, 256):\n    try: os.write(n, b'M M M')\n    except OSError: pass\nos._exit(1)",
            1,
        ),
        ("sys.excepthook = lambda *seen: os._exit(3)\nbytearray(10**11)", 3),
    ],
)
async def test_an_exit_status_that_the_program_chose_is_an_error(everywhere, ending, exit_code):
    done = await everywhere.execute(f"import os, sys\n{ending}")
    assert (done.outcome, done.exit_code) == (Outcome.ERROR, exit_code)


KERNEL_MEMORY = {case.name: case for case in RESOURCES if case.name in ("full sockets", "page tables", "file locks")}


@pytest.mark.parametrize("in_session", [False, True], ids=["alone", "session"])
@pytest.mark.parametrize("what", KERNEL_MEMORY)
async def test_memory_that_the_kernel_holds_counts(everywhere, what, in_session):
    session = await everywhere.open_session() if in_session else None
    done = await everywhere.execute(KERNEL_MEMORY[what].program, session=session)
    assert (done.outcome, done.stdout) == (Outcome.MEMORY_LIMIT, ""), done
    if session is not None:
        await everywhere.close_session(session)


async def test_buffers_of_an_ordinary_size_are_allowed(everywhere):
    program = (
        "import socket, select, os, time\nkept = [socket.socketpair() for _ in range(40)]\n"
        "pipes = [os.pipe() for _ in range(40)]\np = select.epoll()\n"
        "for a, b in kept:\n    a.send(bytes(1 << 16))\n    p.register(b, 1)\n"
        "time.sleep(0.5)\nprint(len(p.poll()))"
    )
    done = await everywhere.execute(program)
    assert (done.outcome, done.stdout) == (Outcome.OK, "40\n"), done


SCRATCH_BOMBS = {
    "many files of a megabyte": "for n in range(2048):\n    with open(str(n), 'wb') as f: f.write(bytes(1 << 20))",
    "files below closed directories": (
        "for n in range(2048):\n    if n % 4 == 0:\n        os.mkdir(f'd{n}')\n        os.chdir(f'd{n}')\n"
        "    with open(str(n), 'wb') as f:\n        f.write(bytes(1 << 20))\n    os.chmod('.', 0o300)"
    ),
    "files without a name": (
        "kept = []\nfor n in range(200):\n    kept.append(open('x', 'w+b', buffering=0))\n    os.unlink('x')\n"
        "    kept[-1].write(bytes(1 << 20)) or 1 / 0"
    ),
    "inodes": "for n in range(200_000):\n    open(str(n), 'w').close()",
    "names of one file": "open('a', 'w').close()\nfor n in range(200_000):\n    os.link('a', str(n))",
}


@pytest.mark.parametrize("in_session", [False, True], ids=["alone", "session"])
@pytest.mark.parametrize("what", SCRATCH_BOMBS)
async def test_the_scratch_directory_holds_no_more_than_its_share(everywhere, what, in_session):
    program = f"import os, time\n{SCRATCH_BOMBS[what]}\ntime.sleep(200)\nprint('all of it')"
    session = await everywhere.open_session() if in_session else None
    done = await everywhere.execute(program, session=session, timeout=300)
    assert done.outcome in FULL, done
    assert "all of it" not in done.stdout
    if session is not None:
        await everywhere.close_session(session)


async def test_a_program_may_use_its_whole_scratch_quota(everywhere, settings):
    program = (
        "import time\n"
        f"for n in range(8):\n    with open(str(n), 'wb') as f:\n        f.write(bytes({settings.scratch_mb} << 16))\n"
        f"with open('sparse', 'wb') as f:\n    f.truncate({settings.scratch_mb} << 19)\n"
        "for n in range(8, 4000):\n    open(str(n), 'w').close()\ntime.sleep(1)\nprint('kept')"
    )
    done = await everywhere.execute(program)
    assert (done.outcome, done.stdout) == (Outcome.OK, "kept\n")
