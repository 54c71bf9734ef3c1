"""Daytona as a sandbox for agentrl: ``sandbox.url=daytona://`` or ``daytona://SNAPSHOT``.

Each program runs in a Daytona sandbox, which has no network and is deleted afterwards. The key and the address of the
API are read from the variables of Daytona's SDK (``DAYTONA_API_KEY``, ``DAYTONA_API_URL``).
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
import time
from collections.abc import Mapping, Sequence

from daytona import AsyncDaytona, CreateSandboxFromSnapshotParams, DaytonaError

from agentrl_sandbox.client import (
    PROPERTIES,
    ClosedError,
    Execution,
    Isolation,
    Outcome,
    RefusedError,
    SandboxSettings,
    UnknownSessionError,
)

_SPARE_SECONDS = 10  # for starting the interpreter
# Runs in the Daytona sandbox. The argument is a call as base64-encoded JSON. The output is the result as JSON.
_RUNNER = """
import base64, json, os, signal, subprocess, sys, tempfile
call = json.loads(base64.b64decode(sys.argv[1]))
with tempfile.TemporaryDirectory() as here:
    for name, data in {**call["files"], "main.py": call["program"]}.items():
        path = os.path.join(here, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
    # Files instead of pipes: processes that the program leaves behind would keep pipes open.
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(base64.b64decode(call["stdin"]))
        stdin.seek(0)
        run = subprocess.Popen([sys.executable, "main.py"], cwd=here, stdin=stdin, stdout=stdout, stderr=stderr,
                               start_new_session=True)
        try:
            code = run.wait(call["timeout"])
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        run.wait()
        stdout.seek(0)
        stderr.seek(0)
        out, err = stdout.read(call["most"]), stderr.read(call["most"])
    paths = [(name, os.path.join(here, name)) for name in call["fetch"]]
    fetched = {name: base64.b64encode(open(path, "rb").read()).decode() for name, path in paths if os.path.isfile(path)}
print(json.dumps({"code": code, "out": out.decode(errors="replace"), "err": err.decode(errors="replace"),
                  "files": fetched}))
"""


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


class DaytonaSandbox:
    """Implements `agentrl_sandbox.client.Sandbox`, without sessions."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._snapshot = settings.url.removeprefix("daytona://") or None
        self._client = AsyncDaytona()
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._calls: dict[str, asyncio.Task[Execution]] = {}
        self._running: set[asyncio.Task[Execution]] = set()
        self._closed = False

    @property
    def isolation(self) -> Isolation:
        """Isolation properties according to Daytona. They are not probed."""
        return Isolation(layers=dict.fromkeys(PROPERTIES, "daytona"), mode="none")

    async def execute(
        self,
        program: str,
        *,
        timeout: float | None = None,
        stdin: str = "",
        session: str | None = None,
        request_id: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
    ) -> Execution:
        """Run a program. Equal calls with the same ``request_id`` share one run."""
        if self._closed:
            raise ClosedError("the sandbox was closed")
        if session is not None:
            raise UnknownSessionError(f"no session {session!r}: daytona:// has no sessions")
        limit = timeout or self._settings.timeout
        call = {
            "program": _encoded(program.encode()),
            "stdin": _encoded(stdin.encode()),
            "timeout": limit,
            "most": 4 * self._settings.output_limit + 1,  # bytes; a character has up to four
            "files": {name: _encoded(data) for name, data in (files or {}).items()},
            "fetch": list(fetch_files),
        }
        task = self._calls.get(request_id or "")
        if task is None:
            task = asyncio.create_task(self._run(call, limit))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            if request_id is not None:
                self._calls[request_id] = task
                task.add_done_callback(lambda _: self._calls.pop(request_id, None))
        return await asyncio.shield(task)

    async def _run(self, call: Mapping[str, object], limit: float) -> Execution:
        began = time.monotonic()
        argument = _encoded(json.dumps(call).encode())
        try:
            async with self._slots:
                sandbox = await self._client.create(
                    # ephemeral: if this process is killed, Daytona stops the sandbox after some time and deletes it
                    CreateSandboxFromSnapshotParams(snapshot=self._snapshot, network_block_all=True, ephemeral=True)
                )
                try:
                    began = time.monotonic()
                    command = f"python3 -c {shlex.quote(_RUNNER)} {argument}"
                    answer = await sandbox.process.exec(command, timeout=int(limit) + _SPARE_SECONDS)
                finally:
                    await sandbox.delete()
            result = json.loads(answer.result)
        except (DaytonaError, OSError, ValueError) as error:
            return _execution(Outcome.INFRASTRUCTURE_FAILURE, began, stderr=f"Daytona: {error}")
        most, code = self._settings.output_limit, result["code"]
        outcome = Outcome.TIMEOUT if code is None else Outcome.KILLED if code < 0 else Outcome.ERROR
        return Execution(
            outcome=Outcome.OK if code == 0 else outcome,
            stdout=result["out"][:most],
            stderr=result["err"][:most],
            exit_code=code,
            seconds=time.monotonic() - began,
            truncated=max(len(result["out"]), len(result["err"])) > most,
            files={name: base64.b64decode(data) for name, data in result["files"].items()},
        )

    async def open_session(self) -> str:
        """Raise RefusedError, because programs share no state."""
        raise RefusedError("daytona:// has no sessions: set environment.interpreter=fresh")

    async def fork_session(self, session: str) -> str:
        """Raise UnknownSessionError, because no session can be open."""
        raise UnknownSessionError(f"no session {session!r}: daytona:// has no sessions")

    async def close_session(self, session: str) -> None:
        """Raise UnknownSessionError, because no session can be open."""
        raise UnknownSessionError(f"no session {session!r}: daytona:// has no sessions")

    async def close(self) -> None:
        """Wait for running programs, whose time is limited, and close the client. May be called more than once."""
        if not self._closed:
            self._closed = True
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._client.close()


def _execution(outcome: Outcome, began: float, *, stderr: str) -> Execution:
    seconds = time.monotonic() - began
    return Execution(outcome=outcome, stdout="", stderr=stderr, exit_code=None, seconds=seconds, truncated=False)


async def open_daytona(settings: SandboxSettings) -> DaytonaSandbox:
    """Open the sandbox for ``settings.url``. The entry point ``daytona`` refers to this function."""
    return DaytonaSandbox(settings)
