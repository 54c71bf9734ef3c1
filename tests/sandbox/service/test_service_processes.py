"""The command ``agentrl-sandbox serve`` with real processes and programs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from sandbox.session_support import until

from agentrl_sandbox.client import Outcome, SandboxSettings, open_sandbox

pytestmark = pytest.mark.slow

READY_SECONDS = 90


class Serving:
    """A running gateway with one local runner."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url

    def settings(self, **fields: object) -> SandboxSettings:
        return SandboxSettings(**{"url": self.url, "token": "tok", **fields})

    async def runner(self) -> int:
        """Return the PID of the runner, a child of the gateway."""
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            found = [int(pid) for pid in children if b"runner" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            if found:
                return found[0]
            await asyncio.sleep(0.05)
        raise AssertionError("the gateway has no runner")

    async def until_running(self, count: int) -> None:
        """Wait until ``count`` programs run."""
        async with asyncio.timeout(READY_SECONDS), httpx.AsyncClient(headers={"Authorization": "Bearer tok"}) as client:
            while f"sandbox_running {count}.0" not in (await client.get(f"{self.url}/metrics")).text:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[Serving]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentrl_sandbox", "serve", "--port", "0", *arguments),
        env={**os.environ, "SANDBOX_TOKEN": "tok"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), READY_SECONDS)
        yield Serving(process, line.decode().split()[-1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def gone(pid: int) -> bool:
    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    return await until(is_gone)


async def test_real_programs_through_the_whole_service():
    async with serving("timeout=20", "workers=4") as service:
        sandbox = await open_sandbox(service.settings(timeout=20))
        assert sandbox.isolation.missing == ()
        programs = {
            "print(6 * 7)": (Outcome.OK, "42\n"),
            "import sympy; print(sympy.factorint(360))": (Outcome.OK, "{2: 3, 3: 2, 5: 1}\n"),
            "1 / 0": (Outcome.ERROR, ""),
            "bytearray(1 << 32)": (Outcome.MEMORY_LIMIT, ""),
            "print(open('in').read(), input())": (Outcome.OK, "file line\n"),
        }
        done = await asyncio.gather(
            *(sandbox.execute(program, stdin="line\n", files={"in": b"file"}) for program in programs)
        )
        assert [(d.outcome, d.stdout) for d in done] == list(programs.values())
        assert (await sandbox.execute("while True: pass", timeout=0.3)).outcome is Outcome.TIMEOUT
        session = await sandbox.open_session()
        await sandbox.execute("x = 20", session=session)
        fork = await sandbox.fork_session(session)
        assert (await sandbox.execute("print(x + 1)", session=fork)).stdout == "21\n"
        await sandbox.close()


async def test_programs_see_neither_the_token_nor_the_socket():
    program = """
import os
print(os.environ.get("SANDBOX_TOKEN"))
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        text = open(f"/proc/{pid}/environ", "rb").read() + open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        continue
    print(b"SANDBOX_TOKEN" in text, b"--sockets" in text)
"""
    async with serving() as service:
        sandbox = await open_sandbox(service.settings())
        lines = set((await sandbox.execute(program)).stdout.split("\n"))
        assert lines <= {"None", "False False", ""}
        await sandbox.close()


async def test_a_killed_runner_is_replaced_and_nothing_is_lost_or_run_twice():
    async with serving("workers=2") as service:
        sandbox = await open_sandbox(service.settings(retry_deadline=120.0))
        before = await service.runner()
        sleeping = [asyncio.ensure_future(sandbox.execute("import time; time.sleep(9)")) for _ in range(2)]
        await service.until_running(2)
        queued = [asyncio.ensure_future(sandbox.execute(f"print({i})")) for i in range(20)]
        await asyncio.sleep(0.2)
        os.kill(before, signal.SIGKILL)
        assert [(await call).outcome for call in sleeping] == [Outcome.INFRASTRUCTURE_FAILURE] * 2
        assert [(await call).stdout for call in queued] == [f"{i}\n" for i in range(20)]
        assert (await service.runner()) != before
        await sandbox.close()


async def test_sigterm_finishes_what_runs_and_leaves_no_process():
    async with serving("workers=2") as service:
        sandbox = await open_sandbox(service.settings())
        runner = await service.runner()
        call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(4); print('done')"))
        await service.until_running(1)
        service.process.terminate()
        assert (await call).stdout == "done\n"
        assert await asyncio.wait_for(service.process.wait(), 60) == 0
        assert await gone(runner)
        await sandbox.close()


async def test_a_killed_gateway_takes_its_runner_along():
    async with serving() as service:
        runner = await service.runner()
        service.process.kill()
        await service.process.wait()
        assert await gone(runner)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory=3"], "memory=3"),
        (["--port", "99999"], "port"),
        (["memory_mb=1"], "memory_mb"),
        (["--sockets", "/nowhere", "memory_mb=64"], "memory_mb=64"),
        (["fetch_limit=40000000"], "fetch_limit=40000000 and output_limit=65536 allow answers of"),
    ],
)
async def test_wrong_arguments_end_with_one_message_and_exit_code_2(arguments, says):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentrl_sandbox", "serve", *arguments), stderr=asyncio.subprocess.PIPE
    )
    _, message = await asyncio.wait_for(process.communicate(), READY_SECONDS)
    assert process.returncode == 2
    assert says in message.decode()
    assert "Traceback" not in message.decode()


async def test_a_runner_that_cannot_start_ends_the_service_with_its_message(tmp_path):
    folder = tmp_path / ("x" * 100)  # the path of a Unix socket has at most 107 bytes
    folder.mkdir()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentrl_sandbox", "serve", "--port", "0"),
        env={**os.environ, "SANDBOX_TOKEN": "tok", "TMPDIR": str(folder)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, message = await asyncio.wait_for(process.communicate(), READY_SECONDS)
    assert process.returncode == 2
    assert "cannot listen on" in message.decode()
    assert message.decode().splitlines()[-1] == "error: the runner could not start (see its message above)"
    assert "Traceback" not in message.decode()


async def test_two_runners_of_one_name_do_not_share_a_socket(tmp_path):
    from agentrl_sandbox.client import StartError
    from agentrl_sandbox.service.runner import listen_on_unix_socket

    with listen_on_unix_socket(tmp_path / "s", "one"):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "s" / "one.sock").stat().st_mode & 0o777 == 0o600
        with pytest.raises(StartError, match="another runner"), listen_on_unix_socket(tmp_path / "s", "one"):
            pass
    assert list((tmp_path / "s").iterdir()) == []
