"""Ends of sessions, and the limit on open sessions."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from sandbox.session_support import SMALL, ended, processes_below, server_of, start, until

from agentrl_sandbox.client import (
    ClosedError,
    Outcome,
    SandboxSettings,
    SessionLimitError,
    UnknownSessionError,
    open_sandbox,
)
from agentrl_sandbox.local import LocalSandbox

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


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
    done = await sandbox.execute(program, session=session, timeout=1.0 if outcome is Outcome.TIMEOUT else 60.0)
    assert (done.outcome, done.session_ended) == (outcome, True)
    assert why in await ended(sandbox, session)
    with pytest.raises(UnknownSessionError, match=why):
        await sandbox.fork_session(session)
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


async def test_closing_ends_running_and_waiting_calls(sandbox):
    session = await sandbox.open_session()
    running = await start(sandbox, session)
    waiting = asyncio.ensure_future(sandbox.execute("1", session=session))
    await asyncio.sleep(0)  # it waits for its turn
    await sandbox.close_session(session)
    assert (await running).outcome is Outcome.KILLED
    with pytest.raises(UnknownSessionError, match="closed"):
        await waiting


async def test_cancelling_a_call_ends_its_session(sandbox):
    session = await sandbox.open_session()
    call = await start(sandbox, session)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert "killed" in await ended(sandbox, session)


async def test_a_cancelled_waiter_leaves_the_session_alone(sandbox, session):
    running = asyncio.ensure_future(sandbox.execute("x = 1", session=session))
    waiting = asyncio.ensure_future(sandbox.execute("x = 2", session=session))
    await asyncio.sleep(0)  # the one is sent, the other waits for its turn
    assert not running.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await running).outcome is Outcome.OK
    assert (await sandbox.execute("print(x)", session=session)).stdout == "1\n"


async def test_an_idle_session_expires_and_a_used_one_does_not():
    sandbox = await open_sandbox(SandboxSettings(**SMALL, session_idle_timeout=3.0))
    assert isinstance(sandbox, LocalSandbox)
    idle, used = await sandbox.open_session(), await sandbox.open_session()
    while not sandbox._sessions.has_ended(idle):
        assert (await sandbox.execute("1", session=used)).outcome is Outcome.OK
    assert "idle for 3 s" in await ended(sandbox, idle)
    assert (await sandbox.execute("1", session=used)).outcome is Outcome.OK
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


async def test_trees_that_fork_at_the_same_time_share_max_sessions():
    sandbox = await open_sandbox(SandboxSettings(**{**SMALL, "memory_mb": 1024, "max_sessions": 12}))
    roots = [await sandbox.open_session() for _ in range(4)]
    for root in roots:
        await sandbox.execute("x = 1", session=root)
    forks = await asyncio.gather(*(sandbox.fork_session(root) for root in roots * 4), return_exceptions=True)
    opened = [fork for fork in forks if isinstance(fork, str)]
    assert len(opened) == 12 - 4
    assert {type(fork) for fork in forks} == {str, SessionLimitError}
    done = await asyncio.gather(*(sandbox.execute("print(x)", session=fork) for fork in opened))
    assert {one.stdout for one in done} == {"1\n"}
    await asyncio.gather(*map(sandbox.close_session, [*roots, *opened]))
    assert (await sandbox.execute("print(2)", session=await sandbox.open_session())).stdout == "2\n"
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
    call = await start(sandbox, session)
    processes = processes_below(server_of(sandbox))
    assert len(processes) >= 5  # two interpreters, a session_init, a session and its fork
    os.kill(server_of(sandbox), signal.SIGKILL)
    assert (await call).outcome is Outcome.INFRASTRUCTURE_FAILURE
    for name in (session, fork):
        assert "server exited" in await ended(sandbox, name)
    assert await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    again = await sandbox.open_session()
    assert (await sandbox.execute("print(1)", session=again)).stdout == "1\n"
    await sandbox.close()
    with pytest.raises(ClosedError):
        await sandbox.open_session()


async def test_a_killed_interpreter_ends_its_sessions():
    sandbox = await open_sandbox(SandboxSettings(**SMALL))
    session = await sandbox.open_session()
    call = await start(sandbox, session)
    children = Path(f"/proc/{server_of(sandbox)}/task/{server_of(sandbox)}/children").read_text().split()
    (owner,) = (int(pid) for pid in children if b"science" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(owner, signal.SIGKILL)
    assert (await call).outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert "science interpreter exited" in await ended(sandbox, session)
    again = await sandbox.open_session()
    assert (await sandbox.execute("print(1)", session=again)).stdout == "1\n"
    await sandbox.close()
