"""Sessions keep an interpreter's state between programs; forks branch it; neither gains a program anything."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl_sandbox.client import (
    ClosedError,
    Outcome,
    Sandbox,
    SandboxSettings,
    SessionForkError,
    SessionLimitError,
    UnknownSessionError,
    open_sandbox,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL = {"timeout": 20.0, "memory_mb": 128, "max_processes": 16, "scratch_mb": 4, "workers": 4}


@pytest_asyncio.fixture(loop_scope="module")
async def session(sandbox: Sandbox) -> AsyncIterator[str]:
    opened = await sandbox.open_session()
    yield opened
    await sandbox.close_session(opened)


async def ended(sandbox: Sandbox, session: str) -> str:
    """Why a session has ended."""
    with pytest.raises(UnknownSessionError) as caught:
        await sandbox.execute("1", session=session)
    return str(caught.value)


def processes_below(pid: int) -> list[int]:
    below = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        below += [int(child) for child in (task / "children").read_text().split()]
    return below + [deeper for child in below for deeper in processes_below(child)]


def server_of(sandbox: Sandbox) -> int:
    return sandbox._servers._server._process.pid  # type: ignore[attr-defined]


async def until(reached: Callable[[], bool]) -> bool:
    """Whether it comes to be within some seconds."""
    for _ in range(500):
        if reached():
            return True
        await asyncio.sleep(0.02)
    return False


# State


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
    assert (await sandbox.execute("x", session=session, echo=True)).stdout == "2\n"


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
    look = "import glob\nprint(sum(open(p).read().split()[2] != 'Z' for p in glob.glob('/proc/[0-9]*/stat')))"
    assert (await sandbox.execute(look, session=session)).stdout == "2\n"


async def test_a_fork_bomb_ends_with_its_program(sandbox, session):
    program = (
        "import os, signal\nif os.fork() == 0:\n    while True:\n        try:\n            os.fork()\n"
        "        except OSError:\n            pass\nprint('done')"
    )
    assert (await sandbox.execute(program, session=session)).stdout == "done\n"
    look = "import glob\nprint(sum(open(p).read().split()[2] != 'Z' for p in glob.glob('/proc/[0-9]*/stat')))"
    assert (await sandbox.execute(look, session=session)).stdout == "2\n"


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
    assert done.stderr.startswith("the files cannot be written")
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


# Ends


@pytest.mark.parametrize(
    ("program", "outcome", "why"),
    [
        ("while True: pass", Outcome.TIMEOUT, "timeout"),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", Outcome.OUTPUT_LIMIT, "output_limit"),
        (
            "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = b'x' * (60 << 20)\n"
            "        time.sleep(60)\ntime.sleep(60)",
            Outcome.MEMORY_LIMIT,
            "memory_limit",
        ),
        ("import os; os._exit(0)", Outcome.OK, "exit status 0"),
        ("import os; os._exit(7)", Outcome.ERROR, "exit status 7"),
        ("import os; os.abort()", Outcome.KILLED, "signal 6"),
        ("import ctypes; ctypes.string_at(0)", Outcome.KILLED, "signal 11"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Outcome.KILLED, "signal 9"),
        ("import os; os.closerange(3, 256)", Outcome.ERROR, "exit status 70"),
    ],
)
async def test_what_kills_a_program_ends_its_session(sandbox, program, outcome, why):
    session = await sandbox.open_session()
    done = await sandbox.execute(program, session=session, timeout=3.0)
    assert done.outcome is outcome
    assert why in await ended(sandbox, session)
    await sandbox.close_session(session)  # has ended: nothing to do
    assert (await sandbox.execute("print(1)")).outcome is Outcome.OK


async def test_memory_that_orphans_hold_is_their_programs(sandbox):
    session = await sandbox.open_session()
    program = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        if os.fork() == 0:\n"
        "            x = b'x' * (60 << 20)\n            time.sleep(60)\n        os._exit(0)\ntime.sleep(60)"
    )
    assert (await sandbox.execute(program, session=session)).outcome is Outcome.MEMORY_LIMIT


async def test_a_closed_session_is_unknown(sandbox):
    session = await sandbox.open_session()
    await sandbox.close_session(session)
    assert "closed" in await ended(sandbox, session)
    with pytest.raises(UnknownSessionError):
        await sandbox.fork_session(session)
    await sandbox.close_session(session)


async def test_a_session_that_never_was_is_unknown(sandbox):
    for call in (sandbox.execute("1", session="x"), sandbox.fork_session("x"), sandbox.close_session("x")):
        with pytest.raises(UnknownSessionError, match="never opened"):
            await call


async def test_closing_ends_what_runs_and_what_waits(sandbox):
    session = await sandbox.open_session()
    running = asyncio.ensure_future(sandbox.execute("import time; time.sleep(60)", session=session))
    waiting = asyncio.ensure_future(sandbox.execute("1", session=session))
    await asyncio.sleep(0.2)
    await sandbox.close_session(session)
    assert (await running).outcome is Outcome.KILLED
    with pytest.raises(UnknownSessionError, match="closed"):
        await waiting


async def test_cancelling_a_call_ends_its_session(sandbox):
    session = await sandbox.open_session()
    call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(60)", session=session))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert "killed" in await ended(sandbox, session)


async def test_a_cancelled_waiter_leaves_the_session_alone(sandbox, session):
    running = asyncio.ensure_future(sandbox.execute("import time; time.sleep(0.3); x = 1", session=session))
    waiting = asyncio.ensure_future(sandbox.execute("x = 2", session=session))
    await asyncio.sleep(0.1)
    waiting.cancel()
    assert (await running).outcome is Outcome.OK
    assert (await sandbox.execute("print(x)", session=session)).stdout == "1\n"


async def test_an_idle_session_expires_and_a_used_one_does_not():
    sandbox = await open_sandbox(SandboxSettings(**SMALL, session_idle_timeout=1.0))
    idle, used = await sandbox.open_session(), await sandbox.open_session()
    for _ in range(8):
        assert (await sandbox.execute("import time; time.sleep(0.3)", session=used)).outcome is Outcome.OK
    assert "idle for 1 s" in await ended(sandbox, idle)
    await sandbox.close()


async def test_more_than_max_sessions_are_refused_and_room_comes_back():
    sandbox = await open_sandbox(SandboxSettings(**SMALL, max_sessions=2))
    first, _ = await sandbox.open_session(), await sandbox.open_session()
    for call in (sandbox.open_session(), sandbox.fork_session(first)):
        with pytest.raises(SessionLimitError, match="max_sessions=2"):
            await call
    await sandbox.close_session(first)
    assert (await sandbox.execute("print(1)", session=await sandbox.open_session())).stdout == "1\n"
    await sandbox.close()


async def test_idle_sessions_take_no_workers():
    sandbox = await open_sandbox(SandboxSettings(**{**SMALL, "workers": 1}))
    sessions = [await sandbox.open_session() for _ in range(3)]
    assert (await sandbox.execute("print(1)")).stdout == "1\n"
    done = await asyncio.gather(*(sandbox.execute("print(2)", session=session) for session in sessions))
    assert [d.stdout for d in done] == ["2\n"] * 3
    await sandbox.close()


async def test_a_killed_server_ends_its_sessions_and_the_next_one_opens_new_ones():
    sandbox = await open_sandbox(SandboxSettings(**SMALL))
    session = await sandbox.open_session()
    fork = await sandbox.fork_session(session)
    call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(60)", session=session))
    await asyncio.sleep(0.3)
    processes = processes_below(server_of(sandbox))
    assert len(processes) >= 5  # two interpreters, a keeper, a session and its fork
    os.kill(server_of(sandbox), signal.SIGKILL)
    assert (await call).outcome is Outcome.INFRASTRUCTURE_FAILURE
    for name in (session, fork):
        assert "server ended" in await ended(sandbox, name)
    assert await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    again = await sandbox.open_session()
    assert (await sandbox.execute("print(1)", session=again)).stdout == "1\n"
    await sandbox.close()
    with pytest.raises(ClosedError):
        await sandbox.open_session()


async def test_a_killed_interpreter_ends_its_sessions():
    sandbox = await open_sandbox(SandboxSettings(**SMALL))
    session = await sandbox.open_session()
    call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(60)", session=session))
    await asyncio.sleep(0.3)
    children = Path(f"/proc/{server_of(sandbox)}/task/{server_of(sandbox)}/children").read_text().split()
    (owner,) = (int(pid) for pid in children if b"science" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(owner, signal.SIGKILL)
    assert (await call).outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert "science interpreter ended" in await ended(sandbox, session)
    again = await sandbox.open_session()
    assert (await sandbox.execute("print(1)", session=again)).stdout == "1\n"
    await sandbox.close()


# Forks


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
        assert (await sandbox.execute(program, session=fork, timeout=2.0)).outcome is outcome
        await ended(sandbox, fork)
    fork = await sandbox.fork_session(session)
    assert (await sandbox.execute("x = bytearray(10**10)", session=fork)).outcome is Outcome.MEMORY_LIMIT
    await sandbox.close_session(fork)
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


# Hostile programs

FRAME = "import os, struct\nframe = struct.pack('!QB?i', {serial}, 0, False, 0)\n"
SPEAK = "for fd in range(3, 256):\n    try:\n        os.write(fd, {data})\n    except OSError:\n        pass\n"
SERIAL = (
    "import sys\nframe = sys._getframe()\nwhile 'message' not in frame.f_locals:\n    frame = frame.f_back\n"
    "serial = frame.f_locals['message']['serial']\n"
)


@pytest.mark.parametrize("data", ["b'x'", "b'x' * 60_000", "frame", "frame[:-1]", 'b\'{"op": "rested"}\''])
async def test_forged_words_end_the_session_that_says_them(sandbox, data):
    session = await sandbox.open_session()
    program = FRAME.format(serial=1) + SPEAK.format(data=data) + "import time; time.sleep(60)"
    done = await sandbox.execute(program, session=session)
    assert (done.outcome, done.exit_code) == (Outcome.KILLED, -9)
    assert "not asked for" in await ended(sandbox, session)


async def test_a_forged_done_stops_the_program_that_says_it(sandbox):
    """It knows the serial number: it is then done, and stopped. The next program waits for it in vain."""
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
    await asyncio.sleep(0.5)
    assert cpu_time(stopped) == before
    done = await sandbox.execute("print('never runs')", session=session, timeout=0.5)
    assert (done.outcome, done.stdout) == (Outcome.TIMEOUT, "")
    await ended(sandbox, session)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def pid_inside(pid: int) -> int:
    """The number that a process has in its own PID namespace."""
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
    assert "not asked for" in await ended(sandbox, session)


async def test_descriptors_sent_to_the_server_are_not_taken(sandbox):
    server = server_of(sandbox)
    before = len(list(Path(f"/proc/{server}/fd").iterdir()))
    session = await sandbox.open_session()
    program = (
        "import os, socket, time\nfor fd in range(3, 256):\n    try:\n        s = socket.socket(fileno=os.dup(fd))\n"
        "        socket.send_fds(s, [b'x'], [0] * 100)\n    except OSError:\n        pass\ntime.sleep(60)"
    )
    assert (await sandbox.execute(program, session=session)).outcome is Outcome.KILLED
    assert "not asked for" in await ended(sandbox, session)
    assert await until(lambda: len(list(Path(f"/proc/{server}/fd").iterdir())) <= before)


async def test_the_keeper_cannot_be_killed_stopped_or_read(sandbox, session):
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
    """A program that broke ``os.fork`` breaks the fork, and tells no one else's end."""
    broken = await sandbox.open_session()
    await sandbox.execute("import os\nos.fork = lambda: os._exit(9)", session=broken)
    with pytest.raises(UnknownSessionError, match="exit status 9"):
        await sandbox.fork_session(broken)
    assert (await sandbox.execute("print(1)", session=session)).stdout == "1\n"


async def test_a_fork_that_dies_at_birth_is_an_error(sandbox, session):
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
    before = counts()
    for _ in range(6):
        await asyncio.gather(*(use() for _ in range(5)))
    assert await until(lambda: counts() == before), (counts(), before)


async def test_a_killed_keeper_is_a_failure_of_the_sandbox(sandbox):
    session = await sandbox.open_session()
    fork = await sandbox.fork_session(session)
    call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(60)", session=session))
    await asyncio.sleep(0.3)
    (keeper,) = (pid for pid in processes_below(server_of(sandbox)) if pid_inside(pid) == 1)
    os.kill(keeper, signal.SIGKILL)
    assert (await call).outcome is Outcome.INFRASTRUCTURE_FAILURE
    for name in (session, fork):
        assert "keeper ended" in await ended(sandbox, name)
    assert (await sandbox.execute("print(1)")).outcome is Outcome.OK
