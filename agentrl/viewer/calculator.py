"""Process for computations that need torch and a run's plug-ins, which the viewer itself does not import.

The process is started for the first request about a run and replaced for another run, because plug-ins of two runs may
use the same names. It ends when the viewer ends. Ctrl-C does not reach it.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
from pathlib import Path

from agentrl.errors import SettingsError, WorldError

_DEADLINE = 120.0  # seconds until a response; the first one includes the import of torch


class Calculator:
    """Client of ``agentrl.inspection.answers``. Sends one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._run: Path | None = None

    def ask(self, run: Path, question: dict[str, object]) -> object:
        """Return the result of a request. Raises SettingsError if it is impossible, WorldError if the process fails."""
        with self._lock:
            process = self._for(run.resolve())
            try:
                answer = json.loads(_answer(process, json.dumps(question).encode() + b"\n"))
            except (OSError, ValueError) as error:
                self._end()
                raise WorldError(f"the process that computes for {run} has ended: {error or 'no response'}") from error
        if "error" in answer:
            raise SettingsError(str(answer["error"]))
        return answer["answer"]

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _for(self, run: Path) -> subprocess.Popen[bytes]:
        if self._process is None or self._run != run or self._process.poll() is not None:
            self._end()
            command = [sys.executable, "-m", "agentrl.inspection.answers", str(run)]
            # A separate session, so that Ctrl-C reaches only the viewer, which then ends the process.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            self._run = run
        return self._process

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()
        self._process = None


def _answer(process: subprocess.Popen[bytes], question: bytes) -> bytes:
    """Send a request and read one line. Raises OSError if the process ends or is too slow."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question)
    process.stdin.flush()
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        if not waiting.select(_DEADLINE):
            raise TimeoutError(f"no response within {_DEADLINE:g} s")
    return process.stdout.readline()
