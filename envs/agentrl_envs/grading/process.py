"""The parent's side of a grading process: starts it, exchanges JSON lines with it, ends it at its deadlines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import IO

from agentrl_envs.episode import AgentRLEnvError
from agentrl_envs.grading.settings import GraderSettings
from agentrl_envs.types import Verdict

_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")  # no secrets, no HOME


class GraderError(AgentRLEnvError):
    """A grading process cannot be started; nothing is known about the answer."""


class NoVerdictError(Exception):
    """No verdict; unless a subclass says otherwise, the wall-clock deadline passed. The process must be killed."""


class OutOfTimeError(NoVerdictError):
    """The comparison exceeded its CPU time."""


class WorkerDiedError(NoVerdictError):
    """The process ended during a comparison: out of memory, a crash in C code or a signal."""


class GradingProcess:
    """A running worker. Create it with `start`. Handles one comparison at a time."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes], settings: GraderSettings) -> None:
        self._process = process
        self._errors = errors
        self._settings = settings

    @classmethod
    async def start(cls, settings: GraderSettings) -> GradingProcess:
        """Start a process and wait until its libraries are imported. Raises `GraderError`."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        command = (sys.executable, "-P", "-m", "agentrl_envs.grading.worker")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *map(str, (settings.deadline, settings.start_deadline, settings.hang_deadline, settings.memory_mb)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=_environment(os.environ),
            )
        except OSError as error:
            errors.close()
            raise GraderError(f"cannot start a grading process: {error}") from error
        worker = cls(process, errors, settings)
        try:
            await worker._read(settings.start_deadline + settings.hang_deadline)
        except BaseException as error:
            reason = worker._last_error() or str(error)
            if isinstance(error, OutOfTimeError):
                reason = f"not ready within start_deadline={settings.start_deadline:g} s of processor time"
            await worker.kill()
            if isinstance(error, NoVerdictError):
                raise GraderError(f"a grading process did not start: {reason}") from error
            raise
        return worker

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def compare(self, answer: str | None, gold: str) -> Verdict:
        """Compare; if the answer is None, check the gold answer. Raises `NoVerdictError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"answer": answer, "gold": gold}).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDiedError(str(error)) from error
        return Verdict((await self._read(self._settings.hang_deadline))["verdict"])

    async def kill(self) -> None:
        """Kill the process and reap it."""
        if self._process.returncode is None:
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        self._errors.close()

    async def _read(self, seconds: float) -> dict[str, str]:
        """Read the next message within ``seconds`` of wall-clock time."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
                if not line and await self._process.wait() == -signal.SIGPROF:
                    raise OutOfTimeError(f"grading process {self.pid} was out of time")
        except TimeoutError as error:
            raise NoVerdictError(f"grading process {self.pid} said nothing for {seconds:g} s") from error
        if not line:
            raise WorkerDiedError(f"grading process {self.pid} ended with {self._process.returncode}")
        message: dict[str, str] = json.loads(line)
        return message

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a worker: a single thread, and the same hashes in every run."""
    kept = {name: environment[name] for name in _KEPT if name in environment}
    return kept | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
