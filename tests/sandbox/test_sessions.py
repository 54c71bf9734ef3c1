"""Sessions keep an interpreter's state between programs."""

from __future__ import annotations

import asyncio

import pytest
from sandbox.session_support import LIVING

from agentrl_sandbox.client import (
    Outcome,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_variables_imports_functions_and_files_stay(sandbox, session):
    for program in ("import math as m\nx = 41", "def f():\n    return x + 1", "open('f', 'w').write('kept')"):
        assert (await sandbox.execute(program, session=session)).outcome is Outcome.OK
    done = await sandbox.execute("print(f(), m.pi > 3, open('f').read(), __name__)", session=session)
    assert done.stdout == "42 True kept __main__\n"


async def test_random_state_goes_on(sandbox, session):
    drawn = [
        await sandbox.execute(p, session=session) for p in ("import random; random.seed(1)", "print(random.random())")
    ]
    alone = await sandbox.execute("import random; random.seed(1)\nprint(random.random())")
    again = await sandbox.execute("print(random.random())", session=session)
    assert drawn[1].stdout == alone.stdout != again.stdout


async def test_sessions_know_nothing_of_each_other(sandbox, session):
    other = await sandbox.open_session()
    await sandbox.execute("x = 1; open('f', 'w').write('mine')", session=session)
    look = "import os\nprint('x' in globals(), os.listdir(), [p for p in os.listdir('/proc') if p.isdigit()])"
    assert (await sandbox.execute(look, session=other)).stdout == "False [] ['1', '2']\n"
    draw = "import random; print(random.random())"
    drawn = [(await sandbox.execute(draw, session=name)).stdout for name in (session, other)]
    assert drawn[0] != drawn[1]
    await sandbox.close_session(other)


async def test_every_program_has_its_own_streams(sandbox, session):
    first = await sandbox.execute("print(input()); import sys; sys.stdout.close()", session=session, stdin="a\nb\n")
    assert first.stdout == "a\n"
    second = await sandbox.execute(
        "import os; print(input(), flush=True); print('late'); os.close(1)", session=session, stdin="c\n"
    )
    assert (second.outcome, second.stdout) == (Outcome.ERROR, "c\n")
    third = await sandbox.execute("sys.stderr.write('e'); sys.stdout = None", session=session)
    assert (third.stdout, third.stderr) == ("", "e")
    assert (await sandbox.execute("print('still here')", session=session)).stdout == "still here\n"


async def test_an_exception_ends_the_program_and_not_the_session(sandbox, session):
    await sandbox.execute("x = 1\ndef fail():\n    raise ValueError('no')", session=session)
    done = await sandbox.execute("x = 2\nfail()", session=session)
    assert (done.outcome, done.exit_code) == (Outcome.ERROR, 1)
    assert done.stderr == (
        "Traceback (most recent call last):\n"
        '  File "<program 2>", line 2, in <module>\n'
        "    fail()\n"
        '  File "<program 1>", line 3, in fail\n'
        "    raise ValueError('no')\n"
        "ValueError: no\n"
    )
    assert (await sandbox.execute("print(x)", session=session)).stdout == "2\n"


@pytest.mark.parametrize("leave", ["import sys; sys.exit(3)", "exit(3)", "raise SystemExit(3)"])
async def test_exit_ends_the_program_and_not_the_session(sandbox, session, leave):
    done = await sandbox.execute(f"x = 5\n{leave}", session=session)
    assert (done.outcome, done.exit_code) == (Outcome.ERROR, 3)
    assert (await sandbox.execute("print(x, input())", session=session, stdin="in")).stdout == "5 in\n"


async def test_a_memory_error_ends_the_program_and_the_next_meets_the_limit_too(sandbox, session):
    for _ in range(2):
        done = await sandbox.execute("x = bytearray(10**10)", session=session)
        assert (done.outcome, done.exit_code) == (Outcome.MEMORY_LIMIT, 1)
    assert (await sandbox.execute("print('goes on')", session=session)).stdout == "goes on\n"


async def test_threads_are_waited_for_and_daemons_pause(sandbox, session):
    done = await sandbox.execute(
        "import threading, time\nn = 0\ndef count():\n    global n\n    while True:\n"
        "        n += 1; time.sleep(0.001)\n"
        "threading.Thread(target=count, daemon=True).start()\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')",
        session=session,
    )
    assert done.stdout == "main\nthread\n"
    first = await sandbox.execute("print(n)", session=session)
    await asyncio.sleep(0.5)
    second = await sandbox.execute("print(n)", session=session)
    assert int(second.stdout) - int(first.stdout) < 100, "the thread ran while the session was idle"
    third = await sandbox.execute("time.sleep(0.3); print(n)", session=session)
    assert int(third.stdout) > int(second.stdout), "the thread did not go on"


async def test_child_processes_end_with_their_program(sandbox, session):
    program = (
        "import os, subprocess, time\nsubprocess.Popen(['/bin/sleep', '60'])\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\n"
        "os.wait()\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]))"
    )
    assert (await sandbox.execute(program, session=session)).stdout == "4\n"
    seen = await sandbox.execute(LIVING, session=session)
    assert seen.stdout == "2\n", seen


async def test_a_fork_bomb_ends_with_its_program(sandbox, session):
    program = (
        "import os, signal\nif os.fork() == 0:\n    while True:\n        try:\n            os.fork()\n"
        "        except OSError:\n            pass\nprint('done')"
    )
    assert (await sandbox.execute(program, session=session)).stdout == "done\n"
    seen = await sandbox.execute(LIVING, session=session)
    assert seen.stdout == "2\n", seen


async def test_a_child_that_returns_is_not_the_session(sandbox, session):
    done = await sandbox.execute("import os\npid = os.getpid()\nif os.fork(): os.wait()", session=session)
    assert done.outcome is Outcome.OK
    assert (await sandbox.execute("print(os.getpid() == pid)", session=session)).stdout == "True\n"


async def test_files_and_fetching_work_in_a_session(sandbox, session):
    done = await sandbox.execute("print(open('d/a').read())", session=session, files={"d/a": b"1"}, fetch_files=["d/a"])
    assert (done.stdout, dict(done.files)) == ("1\n", {"d/a": b"1"})
    done = await sandbox.execute("print(open('d/a').read())", session=session, files={"d/a": b"2"})
    assert done.stdout == "2\n"


@pytest.mark.parametrize(
    "plant",
    ["os.symlink('/tmp', 'd')", "os.mkdir('d'); os.symlink('../other', 'd/a')", "os.mkdir('d'); os.mkfifo('d/a')"],
)
async def test_files_do_not_follow_what_programs_planted(sandbox, session, plant):
    await sandbox.execute(f"import os\nopen('other', 'w').write('other')\n{plant}", session=session)
    done = await sandbox.execute("print('ran')", session=session, files={"d/a": b"new"})
    assert (done.outcome, done.stdout) == (Outcome.ERROR, "")
    assert done.stderr.startswith("cannot write the files")
    assert (await sandbox.execute("print(open('other').read())", session=session)).stdout == "other\n"


async def test_programs_of_one_session_run_one_after_the_other(sandbox, session):
    await sandbox.execute("import time\nbusy = False\nseen = []", session=session)
    program = "assert not busy\nbusy = True; time.sleep(0.01); seen.append({}); busy = False"
    done = await asyncio.gather(*(sandbox.execute(program.format(i), session=session) for i in range(8)))
    assert {d.outcome for d in done} == {Outcome.OK}
    assert (await sandbox.execute("print(seen)", session=session)).stdout == f"{list(range(8))}\n"


async def test_one_request_id_runs_once_in_a_session(sandbox, session):
    await sandbox.execute("n = 0", session=session)
    for _ in range(2):
        done = await sandbox.execute("n += 1; print(n)", session=session, request_id="s1")
        assert done.stdout == "1\n"
