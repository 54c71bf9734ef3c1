"""A program in flight, as the server sees it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

from agentrl_sandbox.runner.capture import Capture
from agentrl_sandbox.runner.child import OUT_OF_MEMORY, STARTED
from agentrl_sandbox.types import Outcome


@dataclass(kw_only=True, slots=True)
class Program:
    """Everything the server holds for one program. Times are of ``time.monotonic``."""

    identifier: int
    slot: int
    zygote: str
    started: float
    deadline: float
    cpu_limit: int
    stdout: Capture
    stderr: Capture
    status: Capture
    pid: int = 0
    reason: Outcome | None = None  # why the server killed it
    why: str = ""  # of an infrastructure failure

    @property
    def captures(self) -> tuple[Capture, Capture, Capture]:
        """Standard output, standard error, status."""
        return (self.stdout, self.stderr, self.status)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a program ended."""

    outcome: Outcome
    exit_code: int | None
    why: str = field(default="")


def judge(program: Program, status: int, cpu_seconds: float) -> Ending:
    """The outcome, from the wait status, the limits and the status pipe.

    The status pipe begins with STARTED once the child was locked in; until then no line of the program has run, so a
    program cannot fake an infrastructure failure.
    """
    exit_code = os.waitstatus_to_exitcode(status)
    report = program.status.text()
    if not report.startswith(STARTED) and program.reason is None:
        why = report.decode("utf-8", "replace") or f"the child ended with status {exit_code} before the program began"
        return Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=why)
    if program.reason is not None and (exit_code < 0 or program.reason is not Outcome.TIMEOUT):
        return Ending(outcome=program.reason, exit_code=exit_code)
    if exit_code == 0:
        return Ending(outcome=Outcome.OK, exit_code=0)
    if exit_code > 0:
        out_of_memory = OUT_OF_MEMORY in report[len(STARTED) :]
        return Ending(outcome=Outcome.MEMORY_LIMIT if out_of_memory else Outcome.ERROR, exit_code=exit_code)
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_seconds >= program.cpu_limit:
        return Ending(outcome=Outcome.TIMEOUT, exit_code=exit_code)
    return Ending(outcome=Outcome.KILLED, exit_code=exit_code)
