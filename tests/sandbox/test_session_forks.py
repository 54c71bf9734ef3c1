"""Forks of sessions are equal at the fork and independent afterwards."""

from __future__ import annotations

import asyncio

import pytest
from sandbox.session_support import ended

from agentrl_sandbox.client import (
    Outcome,
    SessionForkError,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_forks_diverge(sandbox, session):
    await sandbox.execute("x = [1]; open('f', 'w').write('origin'); import random", session=session)
    fork = await sandbox.fork_session(session)
    await sandbox.execute("x.append(2); open('f', 'w').write('fork'); open('g', 'w').close()", session=fork)
    await sandbox.execute("x.append(3)", session=session)
    look = "import os\nprint(x, open('f').read(), sorted(os.listdir()))"
    assert (await sandbox.execute(look, session=fork)).stdout == "[1, 2] fork ['f', 'g']\n"
    assert (await sandbox.execute(look, session=session)).stdout == "[1, 3] origin ['f']\n"
    await sandbox.close_session(fork)
    assert (await sandbox.execute("print(x)", session=session)).stdout == "[1, 3]\n"


async def test_forks_begin_with_equal_random_states(sandbox, session):
    draw = "import random, numpy\nprint(random.random(), numpy.random.rand())"
    await sandbox.execute(draw, session=session)
    fork = await sandbox.fork_session(session)
    drawn = [(await sandbox.execute(draw, session=name)).stdout for name in (session, fork)]
    assert drawn[0] == drawn[1]
    await sandbox.close_session(fork)


async def test_a_fork_keeps_its_place_and_its_files_of_every_kind(sandbox, session):
    await sandbox.execute(
        "import os\nos.makedirs('d/e'); open('d/f', 'w').write('x'); os.chmod('d/f', 0o640)\n"
        "os.symlink('d/f', 'l'); os.mkfifo('p'); os.chdir('d')",
        session=session,
    )
    fork = await sandbox.fork_session(session)
    done = await sandbox.execute(
        "print(os.path.basename(os.getcwd()), sorted(os.listdir()), sorted(os.listdir('..')), open('../l').read(),"
        " oct(os.stat('f').st_mode), os.environ['HOME'] == os.path.dirname(os.getcwd()))",
        session=fork,
    )
    assert done.stdout == "d ['e', 'f'] ['d', 'l'] x 0o100640 True\n"
    await sandbox.close_session(fork)


async def test_forks_of_forks_and_any_order_of_closing(sandbox):
    first = await sandbox.open_session()
    await sandbox.execute("path = ['first']", session=first)
    second = await sandbox.fork_session(first)
    await sandbox.execute("path.append('second')", session=second)
    third = await sandbox.fork_session(second)
    await sandbox.execute("path.append('third')", session=third)
    await sandbox.close_session(second)
    await sandbox.close_session(first)
    fourth = await sandbox.fork_session(third)
    await sandbox.close_session(third)
    assert (await sandbox.execute("print(path)", session=fourth)).stdout == "['first', 'second', 'third']\n"
    await sandbox.close_session(fourth)


async def test_forks_run_at_the_same_time(sandbox, session):
    forks = [await sandbox.fork_session(session) for _ in range(3)]
    programs = (sandbox.execute(f"import time; time.sleep(0.1); print({i})", session=f) for i, f in enumerate(forks))
    assert [done.stdout for done in await asyncio.gather(*programs)] == ["0\n", "1\n", "2\n"]
    for fork in forks:
        await sandbox.close_session(fork)


async def test_the_limits_hold_in_a_fork_and_its_end_is_its_own(sandbox, session):
    for program, outcome in (
        ("while True: pass", Outcome.TIMEOUT),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", Outcome.OUTPUT_LIMIT),
        ("import os; os._exit(7)", Outcome.ERROR),
        ("import os; os.abort()", Outcome.KILLED),
    ):
        fork = await sandbox.fork_session(session)
        timeout = 1.0 if outcome is Outcome.TIMEOUT else 60.0
        assert (await sandbox.execute(program, session=fork, timeout=timeout)).outcome is outcome
        await ended(sandbox, fork)
    for program in ("x = bytearray(10**10)", "x = []\nwhile True: x.append(bytes(range(256)) * 4096)"):
        fork, sibling = await sandbox.fork_session(session), await sandbox.fork_session(session)
        assert (await sandbox.execute(program, session=fork)).outcome is Outcome.MEMORY_LIMIT
        assert (await sandbox.execute("print(2)", session=sibling)).stdout == "2\n"
        await asyncio.gather(*map(sandbox.close_session, (fork, sibling)))
    assert (await sandbox.execute("print(1)", session=session)).stdout == "1\n"


async def test_a_session_that_cannot_fork_goes_on(sandbox, session):
    await sandbox.execute("open('big', 'wb').write(bytes(5 << 20))", session=session)  # of 8 MB for both copies
    with pytest.raises(SessionForkError, match="No space left"):
        await sandbox.fork_session(session)
    done = await sandbox.execute("import os; os.remove('big'); print('goes on')", session=session)
    assert done.stdout == "goes on\n"
    await sandbox.close_session(await sandbox.fork_session(session))


async def test_a_session_with_threads_can_be_forked_without_them(sandbox, session):
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    await sandbox.execute(program, session=session)
    fork = await sandbox.fork_session(session)
    for name, count in ((session, 2), (fork, 1)):
        assert (await sandbox.execute("print(threading.active_count())", session=name)).stdout == f"{count}\n"
    await sandbox.close_session(fork)
