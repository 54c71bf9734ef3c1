"""The results of programs, the isolation of a sandbox, the ``Sandbox`` protocol and the errors of a sandbox.

>>> done = Execution(outcome=Outcome.OK, stdout="2\\n", stderr="", exit_code=0, seconds=0.01, truncated=False)
>>> done.outcome == "ok"
True

A program that fails is not an error: its outcome is reported.

SandboxError
├── UnisolatedError     an isolation property does not hold on this machine
├── StartError          the server did not start
├── ClosedError         the sandbox was closed
├── SessionLimitError   max_sessions sessions are open
├── SessionForkError    a live session could not be forked; it continues
├── UnknownSessionError the session never existed, or has ended
├── BusyError           a service has no capacity now; the same call may succeed later
│   ├── QueueFullError  its queue is full
│   └── AbsentError     it did not answer, or the connection broke
├── RefusedError        a service rejected a call; retrying does not help
└── settings.ServiceSettingsError  a command was given invalid settings
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Outcome(StrEnum):
    """How a program ended, according to the kernel and the limits, never to the program's output."""

    OK = "ok"  # exit status 0
    ERROR = "error"  # an uncaught exception, a SyntaxError, or another exit status
    TIMEOUT = "timeout"  # killed at its deadline, of wall clock or of CPU
    MEMORY_LIMIT = "memory_limit"  # killed for its memory, or ended by an uncaught MemoryError
    OUTPUT_LIMIT = "output_limit"  # killed for flooding its output or its scratch directory
    KILLED = "killed"  # ended by a signal that the sandbox did not send
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"  # the sandbox failed; the run says nothing about the program


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """The result of a program.

    ``exit_code`` is the exit status, minus the signal's number when a signal ended the program, and None for
    infrastructure failures. ``seconds`` is wall time. ``truncated``: a stream was longer than
    ``output_limit``, and only its head and tail were kept. ``files`` are those ``fetch_files`` that exist.
    ``session_ended`` is true if the session ended together with this program.
    """

    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int | None
    seconds: float
    truncated: bool
    files: Mapping[str, bytes] = field(default_factory=dict)
    session_ended: bool = False


def failed_execution(why: str, started: float) -> Execution:
    """Return the result of a run that the sandbox failed to complete. ``started`` is a time of ``time.monotonic``."""
    return Execution(
        outcome=Outcome.INFRASTRUCTURE_FAILURE,
        stdout="",
        stderr=why,
        exit_code=None,
        seconds=time.monotonic() - started,
        truncated=False,
    )


PROPERTIES: Mapping[str, str] = {
    "no_network": "a program cannot reach any network",
    "scratch_only_writes": "a program can write only to its scratch directory",
    "no_foreign_reads": "a program can read only the interpreter, the system's libraries and its scratch directory",
    "bounded_memory": "a program's memory is bounded",
    "bounded_processes": "a program's number of processes is bounded",
    "bounded_time": "a program's time is bounded",
    "bounded_output": "a program's output is bounded",
    "no_foreign_signals": "a program cannot signal other processes",
    "no_tracing": "a program cannot trace other processes or read their memory",
}
"""The properties that are probed when a sandbox opens, with their meanings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """The layer that provides each of ``PROPERTIES``, or None if a probe showed that it is missing.

    >>> Isolation(layers={"no_network": "namespaces", "bounded_time": "server"}, mode="root").describe()
    'no_network, bounded_time (root namespaces)'
    """

    layers: Mapping[str, str | None]
    mode: str  # "root" or "user" namespaces, or "none"

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name, layer in self.layers.items() if layer is None)

    def describe(self) -> str:
        held = ", ".join(name for name, layer in self.layers.items() if layer is not None)
        line = f"{held} ({'no' if self.mode == 'none' else self.mode} namespaces)"
        return line if not self.missing else f"{line}; MISSING: {', '.join(self.missing)}"


class Sandbox(Protocol):
    """Interface of sandboxes. A sandbox belongs to the event loop that opened it and is unusable after ``close``."""

    @property
    def isolation(self) -> Isolation:
        """The result of the probes when the sandbox opened."""
        ...

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
        echo: bool = False,
    ) -> Execution:
        """Run a program. ``timeout`` in seconds (None: the setting's). Equal calls with one ``request_id``
        share one run.

        ``files`` are written to the scratch directory before the run, ``fetch_files`` are read from it afterwards.
        ``echo`` prints the value of a last expression. A ``session`` keeps variables and files of earlier programs.
        Raises ValueError for a bad argument and UnknownSessionError.
        """
        ...

    async def open_session(self) -> str:
        """Start an interpreter that keeps its state between programs. Raises SessionLimitError."""
        ...

    async def fork_session(self, session: str) -> str:
        """Branch a session. Raises UnknownSessionError, SessionLimitError and SessionForkError."""
        ...

    async def close_session(self, session: str) -> None:
        """End a session and its program; no effect if it has ended. Raises UnknownSessionError."""
        ...

    async def close(self) -> None:
        """Kill running programs and release all resources. May be called more than once."""
        ...


class SandboxError(Exception):
    """Base of this package's errors."""


class UnisolatedError(SandboxError):
    """The sandbox cannot isolate programs here; ``missing`` names the properties, ``why`` the reason and the fix."""

    def __init__(self, where: str, missing: tuple[str, ...], why: str) -> None:
        meanings = "; ".join(f"{name} ({PROPERTIES[name]})" for name in missing)
        super().__init__(f"{where}: missing {meanings}. {why}")
        self.missing = missing


class StartError(SandboxError):
    """The sandbox's server did not start."""


class ClosedError(SandboxError):
    """The sandbox was closed."""


class SessionLimitError(SandboxError):
    """As many sessions are open as ``max_sessions`` allows."""


class SessionForkError(SandboxError):
    """A session could not be forked. It continues."""


class UnknownSessionError(SandboxError):
    """The session does not exist: it was never opened, was closed, or ended with its interpreter."""


class BusyError(SandboxError):
    """No capacity for a call now. Retry it after ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(BusyError):
    """The queue is full."""


class AbsentError(BusyError):
    """A service did not answer. ``begun``: it may have begun the call."""

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message, retry_after=0)
        self.begun = begun


class RefusedError(SandboxError):
    """A service rejected a call, for example because of its token or size. Retrying does not help."""
