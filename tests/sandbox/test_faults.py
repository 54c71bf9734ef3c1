"""Failures of the sandbox: their outcomes, the recovery and the cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox.session_support import until

from agentrl_sandbox.client import ClosedError, Outcome, SandboxSettings, open_sandbox


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [deeper for child in below for deeper in descendants(child)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def all_gone(pids: list[int]) -> bool:
    return await until(lambda: not any(alive(pid) for pid in pids))


def servers() -> list[int]:
    return [pid for pid in children(os.getpid()) if b"agentrl_sandbox" in Path(f"/proc/{pid}/cmdline").read_bytes()]


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def until_started(count: int, server: int | None = None) -> None:
    """Wait until ``count`` programs of the server run."""
    server = server or servers()[0]
    wanted = len(ZYGOTES) + count
    assert await until(lambda: len(descendants(server)) >= wanted), "the programs never started"


ZYGOTES = ("bare", "science")


async def test_a_killed_server_is_an_infrastructure_failure_and_is_replaced(sandbox):
    calls = [asyncio.ensure_future(sandbox.execute("import time; time.sleep(30)")) for _ in range(3)]
    await until_started(3)
    (server,) = servers()
    processes = [server, *descendants(server)]
    os.kill(server, signal.SIGKILL)
    done = await asyncio.gather(*calls)
    assert [d.outcome for d in done] == [Outcome.INFRASTRUCTURE_FAILURE] * 3
    assert [d.exit_code for d in done] == [None] * 3
    assert (await sandbox.execute("print('back')")).stdout == "back\n"
    assert await all_gone(processes)


async def test_a_killed_interpreter_takes_only_its_own_programs_along(sandbox):
    (server,) = servers()
    bare = asyncio.ensure_future(sandbox.execute("import time; time.sleep(1); print('bare')"))
    science = asyncio.ensure_future(sandbox.execute("import numpy, time; time.sleep(30)"))
    await until_started(2)
    owner = next(pid for pid in children(server) if b"science" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(owner, signal.SIGKILL)
    assert (await science).outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert (await bare).stdout == "bare\n"
    assert (await sandbox.execute("import numpy; print(numpy.ones(2).sum())")).stdout == "2.0\n"


async def test_closing_kills_what_runs_and_leaves_no_process():
    others = servers()
    sandbox = await open_sandbox(SandboxSettings(workers=4))
    (server,) = set(servers()) - set(others)
    call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(30)"))
    await until_started(1, server)
    processes = [server, *descendants(server)]
    await sandbox.close()
    assert (await call).outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert await all_gone(processes)
    await sandbox.close()
    with pytest.raises(ClosedError):
        await sandbox.execute("1")


async def test_cancelling_a_call_kills_its_program(sandbox):
    call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(30)"))
    await until_started(1)
    (server,) = servers()
    programs = [pid for zygote in children(server) for pid in descendants(zygote)]
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await all_gone(programs)


async def test_cancelled_calls_give_their_places_back(sandbox):
    for _ in range(3):
        calls = [asyncio.ensure_future(sandbox.execute("import time; time.sleep(30)")) for _ in range(20)]
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert (await sandbox.execute("print(1)")).outcome is Outcome.OK


async def test_one_request_id_runs_once_while_in_flight_and_after(sandbox):
    program = "import random, time; time.sleep(0.1); print(random.random())"
    first, second = await asyncio.gather(*(sandbox.execute(program, request_id="a6") for _ in range(2)))
    third = await sandbox.execute(program, request_id="a6")
    other = await sandbox.execute(program, request_id="b6")
    assert first == second == third
    assert first.stdout != other.stdout


async def test_one_request_id_for_two_programs_mixes_nothing_up(sandbox):
    done = [await sandbox.execute(f"print({number})", request_id="c6") for number in range(2)]
    assert [execution.stdout for execution in done] == ["0\n", "1\n"]


async def test_a_cancelled_waiter_leaves_the_run_to_the_others(sandbox):
    program = "import time; time.sleep(0.2); print('done')"
    first, second = (asyncio.ensure_future(sandbox.execute(program, request_id="a7")) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    assert (await second).stdout == "done\n"


async def test_a_cancelled_request_can_be_asked_again(sandbox):
    call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(30)", request_id="a8"))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await sandbox.execute("print(1)", request_id="a8")).stdout == "1\n"


async def test_a_failed_request_may_be_retried(sandbox):
    call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(1); print(1)", request_id="a9"))
    await until_started(1)
    os.kill(servers()[0], signal.SIGKILL)
    assert (await call).outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert (await sandbox.execute("print(1)", request_id="a9")).outcome is Outcome.OK


async def test_a_server_that_cannot_be_started_is_an_infrastructure_failure():
    """Without a free descriptor no socket can be opened. Runs in a separate process, whose limit is lowered."""
    script = (
        "import asyncio, os, resource, signal\nfrom agentrl_sandbox.client import *\n"
        "async def main():\n    sandbox = await open_sandbox(SandboxSettings(workers=4))\n"
        "    (server,) = open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read().split()\n"
        "    os.kill(int(server), signal.SIGKILL)\n"
        "    while not sandbox._server.exited:\n        await asyncio.sleep(0.01)\n"
        "    before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))\n"
        "    failed = await sandbox.execute('print(1)')\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, before)\n"
        "    print(failed.outcome.value, (await sandbox.execute('print(1)')).outcome.value)\n"
        "    await sandbox.close()\nasyncio.run(main())"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("infrastructure_failure ok\n", "")


async def test_a_killed_client_leaves_no_process():
    script = (
        "import asyncio\nfrom agentrl_sandbox.client import *\n"
        "async def main():\n    sandbox = await open_sandbox(SandboxSettings(workers=4))\n"
        "    print('open', flush=True)\n"
        "    await sandbox.execute('import time; time.sleep(60)', timeout=60)\nasyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"open\n"
        assert await until(lambda: len(descendants(client.pid)) >= 4)  # server, two interpreters, the program
        processes = descendants(client.pid)
        client.kill()
        client.wait()
        assert await all_gone(processes)


async def test_a_sandbox_refuses_another_event_loop(sandbox):
    def elsewhere() -> None:
        asyncio.run(sandbox.execute("1"))

    with pytest.raises(RuntimeError, match="event loop"):
        await asyncio.to_thread(elsewhere)


async def test_unknown_urls_are_refused_by_the_settings():
    with pytest.raises(ValueError, match="valid: local://"):
        SandboxSettings(url="locl://")


async def test_a_paused_event_loop_loses_no_answer(sandbox):
    calls = [asyncio.ensure_future(sandbox.execute("print('x' * 60_000)", timeout=2.0)) for _ in range(4)]
    await asyncio.sleep(0.01)
    time.sleep(2.5)
    assert [done.outcome for done in await asyncio.gather(*calls)] == [Outcome.OK] * 4
