"""Results of programs, isolation properties, the ``Sandbox`` protocol and its errors.

>>> done = Execution(outcome=Outcome.OK, stdout="2\\n", stderr="", exit_code=0, seconds=0.01, truncated=False)
>>> done.outcome == "ok"
True

A failed program does not raise an error. Its outcome is reported.

SandboxError
├── UnisolatedError     an isolation property does not hold on this machine
├── StartError          the server did not start
├── ClosedError         the sandbox was closed
├── SessionLimitError   max_sessions sessions are open
├── SessionForkError    a live session could not be forked; it continues
├── UnknownSessionError the session never existed, or has ended
├── BusyError           a service has no capacity; the call may succeed later
│   ├── QueueFullError  the service's queue is full
│   └── UnreachableServiceError     the service did not respond, or the connection broke
├── RefusedError        a service rejected a call; a retry does not help
└── settings.ServiceSettingsError  a command's settings are invalid
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Outcome(StrEnum):
    """How a program ended, derived from the kernel and the limits, never from the program's output."""

    OK = "ok"  # exit status 0
    ERROR = "error"  # an uncaught exception, a SyntaxError, or another exit status
    TIMEOUT = "timeout"  # killed at its wall-clock or CPU deadline
    MEMORY_LIMIT = "memory_limit"  # killed for exceeding its memory limit, or ended by an uncaught MemoryError
    OUTPUT_LIMIT = "output_limit"  # killed for exceeding the limit of its output or scratch directory
    KILLED = "killed"  # ended by a signal that the sandbox did not send
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"  # the sandbox failed; the program has no result


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """The result of a program.

    ``exit_code`` is the exit status, minus the signal number if a signal ended the program, or None for infrastructure
    failures. ``seconds`` is wall-clock time. ``truncated`` is true if a stream exceeded ``output_limit``, so that only
    its head and tail were kept. ``files`` contains the existing ``fetch_files``. ``session_ended`` is true if the
    session ended with this program.
    """

    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int | None
    seconds: float
    truncated: bool
    files: Mapping[str, bytes] = field(default_factory=dict)
    session_ended: bool = False


def infrastructure_failure(why: str, started: float) -> Execution:
    """Return an infrastructure failure with the reason ``why``. ``started`` is a time from ``time.monotonic``."""
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
"""Isolation properties that are probed when a sandbox opens, and their descriptions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """Layer that provides each of ``PROPERTIES``, or None if a probe found the property missing.

    >>> Isolation(layers={"no_network": "namespaces", "bounded_time": "server"}, mode="root").describe()
    'no_network, bounded_time (root namespaces)'
    """

    layers: Mapping[str, str | None]
    mode: str  # "root" or "user" namespaces, or "none"

    @classmethod
    def combine(cls, isolations: Sequence[Isolation]) -> Isolation:
        """Combine the isolation of sandboxes. A property holds if there are sandboxes and all of them have it.

        >>> layers = {"no_network": "seccomp"}, {"no_network": None}, {"no_network": "Landlock"}
        >>> one, two, three = (Isolation(layers=found, mode="none") for found in layers)
        >>> Isolation.combine([one, two]).layers["no_network"], Isolation.combine([one, three]).layers["no_network"]
        (None, 'seccomp or Landlock')
        """
        layers: dict[str, str | None] = {}
        for name in dict.fromkeys([*PROPERTIES, *(name for isolation in isolations for name in isolation.layers)]):
            held = [isolation.layers.get(name) for isolation in isolations]
            known = dict.fromkeys(layer for layer in held if layer is not None)
            layers[name] = " or ".join(known) if held and None not in held else None
        return cls(layers=layers, mode=" or ".join(sorted({isolation.mode for isolation in isolations})) or "none")

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
        """Result of the probes when the sandbox was opened."""
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
    ) -> Execution:
        """Run a program, for at most ``timeout`` seconds (None: the configured timeout).

        Equal calls with the same ``request_id`` share one run. ``files`` are written to the scratch directory before
        the run, and ``fetch_files`` are read from it afterwards. A ``session`` keeps the variables and files of its
        earlier programs. Raises ValueError for an invalid argument and UnknownSessionError for an unknown session.
        """
        ...

    async def open_session(self) -> str:
        """Start an interpreter that keeps its state between programs. Returns the name of the session.

        Raises SessionLimitError if ``max_sessions`` sessions are open.
        """
        ...

    async def fork_session(self, session: str) -> str:
        """Fork a session. Returns the fork's name.

        Raises UnknownSessionError, SessionLimitError or SessionForkError.
        """
        ...

    async def close_session(self, session: str) -> None:
        """End a session and its program. No effect if the session has ended.

        Raises UnknownSessionError if the session was never opened.
        """
        ...

    async def close(self) -> None:
        """Kill running programs and release all resources. May be called more than once."""
        ...


class SandboxError(Exception):
    """Base class of this package's errors."""


class UnisolatedError(SandboxError):
    """The sandbox cannot isolate programs. ``missing`` lists the properties, ``why`` the reason and the fix."""

    def __init__(self, where: str, missing: tuple[str, ...], why: str) -> None:
        meanings = "; ".join(f"{name} ({PROPERTIES[name]})" for name in missing)
        super().__init__(f"{where}: missing {meanings}. {why}")
        self.missing = missing


class StartError(SandboxError):
    """The sandbox's server did not start."""


class ClosedError(SandboxError):
    """The sandbox was closed."""


class SessionLimitError(SandboxError):
    """``max_sessions`` sessions are open."""


class SessionForkError(SandboxError):
    """A session could not be forked. The session continues."""


class UnknownSessionError(SandboxError):
    """The session does not exist: it was never opened, was closed, or ended with its interpreter."""


class BusyError(SandboxError):
    """A service has no capacity for a call. Retry after ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(BusyError):
    """The queue is full."""


class UnreachableServiceError(BusyError):
    """A service did not respond. ``begun`` is true if the service may have started the call."""

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message, retry_after=0)
        self.begun = begun


class RefusedError(SandboxError):
    """A service rejected a call, for example because of its token or size. A retry does not help."""
