"""What the sandbox says of a program it ran, and of its own isolation.

>>> done = Execution(outcome=Outcome.OK, stdout="2\\n", stderr="", exit_code=0, seconds=0.01, truncated=False)
>>> done.outcome == "ok"
True
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Outcome(StrEnum):
    """How a program ended, as told by the kernel and the limits; never by what the program printed."""

    OK = "ok"  # exit status 0
    ERROR = "error"  # an uncaught exception, a SyntaxError, or another exit status
    TIMEOUT = "timeout"  # killed at its deadline, of wall clock or of CPU
    MEMORY_LIMIT = "memory_limit"  # killed for its memory, or ended by an uncaught MemoryError
    OUTPUT_LIMIT = "output_limit"  # killed for flooding its output or its scratch directory
    KILLED = "killed"  # ended by a signal that the sandbox did not send
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"  # the sandbox failed: the run says nothing of the program


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """One program run.

    ``exit_code`` is the exit status, minus the signal's number when a signal ended the program, and None for
    infrastructure failures. ``seconds`` is wall time. ``truncated`` says that a stream was longer than
    ``output_limit`` and only its head and tail were kept. ``files`` are those of ``fetch_files`` that were there.
    """

    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int | None
    seconds: float
    truncated: bool
    files: Mapping[str, bytes] = field(default_factory=dict)


def failed_execution(why: str, started: float) -> Execution:
    """A run that the sandbox failed to complete; ``started`` is a time of ``time.monotonic``."""
    return Execution(
        outcome=Outcome.INFRASTRUCTURE_FAILURE,
        stdout="",
        stderr=why,
        exit_code=None,
        seconds=time.monotonic() - started,
        truncated=False,
    )


PROPERTIES: Mapping[str, str] = {
    "no_network": "a program reaches no network",
    "scratch_only_writes": "a program writes nowhere but in its scratch directory",
    "no_foreign_reads": "a program reads nothing but the interpreter, the system's libraries and its scratch directory",
    "bounded_memory": "a program's memory is bounded",
    "bounded_processes": "a program's number of processes is bounded",
    "bounded_time": "a program's time is bounded",
    "bounded_output": "a program's output is bounded",
    "no_foreign_signals": "a program cannot signal processes that are not its own",
    "no_tracing": "a program cannot trace processes that are not its own, nor read their memory",
}
"""The properties probed when a sandbox opens, with what each means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """For each of ``PROPERTIES`` the layer that gives it, or None where a probe showed it missing.

    >>> Isolation(layers={"no_network": "namespaces", "bounded_time": "server"}, mode="root").describe()
    'no_network, bounded_time (root namespaces)'
    """

    layers: Mapping[str, str | None]
    mode: str  # "root" or "user" namespaces, or "none"

    @property
    def missing(self) -> tuple[str, ...]:
        """The properties that do not hold."""
        return tuple(name for name, layer in self.layers.items() if layer is None)

    def describe(self) -> str:
        """One line for the console."""
        held = ", ".join(name for name, layer in self.layers.items() if layer is not None)
        line = f"{held} ({'no' if self.mode == 'none' else self.mode} namespaces)"
        return line if not self.missing else f"{line}; MISSING: {', '.join(self.missing)}"


class Sandbox(Protocol):
    """Anything that runs programs. Single-use after ``close``; belongs to the event loop it was opened in."""

    @property
    def isolation(self) -> Isolation:
        """What the probes found when the sandbox opened."""
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

        ``files`` are written into the scratch directory before, ``fetch_files`` read from it afterwards. ``echo``
        prints the value of a last expression. In a ``session`` variables and files of earlier programs are there.
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
        """End a session and what runs in it; nothing happens if it has ended. Raises UnknownSessionError."""
        ...

    async def close(self) -> None:
        """Kill what runs and release everything. May be called more than once."""
        ...
