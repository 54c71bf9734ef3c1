"""One grading process as its parent sees it: started by exec, spoken to in JSON lines, killed at the deadline."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import IO

from agentrl_envs.episode import AgentRLEnvError
from agentrl_envs.grading.settings import GraderSettings
from agentrl_envs.types import Verdict

_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")  # no secrets, no HOME


class GraderError(AgentRLEnvError):
    """A grading process cannot be started; nothing is known of the answer."""


class WorkerDied(Exception):
    """The process ended in the middle of a comparison."""


class GradingProcess:
    """A running worker. Use `start`; one comparison at a time."""

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
                str(settings.deadline),
                str(settings.memory_mb),
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
            await asyncio.wait_for(worker._read(), settings.start_deadline)
        except (TimeoutError, WorkerDied) as error:
            reason = worker._last_error() or f"not ready within start_deadline={settings.start_deadline:g} s"
            await worker.kill()
            raise GraderError(f"a grading process did not start: {reason}") from error
        except asyncio.CancelledError:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def compare(self, answer: str | None, gold: str) -> Verdict:
        """One comparison; without an answer, a check of the gold answer.

        Raises `TimeoutError` at the deadline and `WorkerDied`; kill the process after either."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"answer": answer, "gold": gold}).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDied(str(error)) from error
        reply = await asyncio.wait_for(self._read(), self._settings.deadline)
        return Verdict(reply["verdict"])

    async def kill(self) -> None:
        """End the process, whatever it does, and reap it."""
        if self._process.returncode is None:
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        self._errors.close()

    async def _read(self) -> dict[str, str]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise WorkerDied(f"grading process {self.pid} ended")
        message: dict[str, str] = json.loads(line)
        return message

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker needs of the environment; one thread, and the same hashes in every run."""
    kept = {name: environment[name] for name in _KEPT if name in environment}
    return kept | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
