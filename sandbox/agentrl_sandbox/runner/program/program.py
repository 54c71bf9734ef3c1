"""A running program, as the server sees it, and its outcome."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

from agentrl_sandbox.runner.config import RunnerConfig
from agentrl_sandbox.runner.program import fetched
from agentrl_sandbox.runner.program.capture import Capture
from agentrl_sandbox.runner.program.child import OUT_OF_MEMORY, STARTED
from agentrl_sandbox.runner.program.interpreter import UNCAUGHT
from agentrl_sandbox.runner.program.order import Order, to_memory_file
from agentrl_sandbox.types import Execution, Outcome

_STATUS_LIMIT = 4096


@dataclass(kw_only=True, slots=True)
class Program:
    """The server's record of one program. Times are from ``time.monotonic``."""

    identifier: int
    slot: int
    zygote: str
    started: float
    deadline: float
    cpu_limit: int
    stdout: Capture
    stderr: Capture
    status: Capture | None  # None in a session, which reports the end itself
    fetch: tuple[str, ...] = ()
    fetched_file: int = -1  # the memory file that returns them
    session: int | None = None
    pid: int = 0  # of its first process, or of the session's init process
    due: dict[str, float] = field(default_factory=dict)  # times of the next expensive checks
    reason: Outcome | None = None  # why the server killed it

    @property
    def captures(self) -> tuple[Capture, ...]:
        """Standard output, standard error, and status where there is one."""
        return (self.stdout, self.stderr) if self.status is None else (self.stdout, self.stderr, self.status)

    def execution(self, ending: Ending) -> Execution:
        """The run as the client sees it. After a kill it returns no files."""
        killed = self.reason is not None or ending.exit_code is None or ending.exit_code < 0
        return Execution(
            outcome=ending.outcome,
            stdout=self.stdout.text().decode("utf-8", "replace"),
            stderr=self.stderr.text().decode("utf-8", "replace") + ending.why,
            exit_code=ending.exit_code,
            seconds=time.monotonic() - self.started,
            truncated=self.stdout.truncated or self.stderr.truncated,
            files={} if killed or self.fetched_file < 0 else fetched.read(self.fetched_file, self.fetch),
        )

    def close(self) -> None:
        for capture in self.captures:
            capture.close()
        if self.fetched_file >= 0:
            os.close(self.fetched_file)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    outcome: Outcome
    exit_code: int | None
    why: str = ""


def launch(order: Order, config: RunnerConfig, kind: str, slot: int) -> tuple[Program, list[int]]:
    """Start a program's deadline and open its pipes. Returns the descriptors for the child, which the caller closes:

    the memory file, stdout, stderr, the status pipe (outside sessions), and the fetch file if there is one.
    """
    files = [to_memory_file(order.call)]
    limits = [config.output_limit, config.output_limit] + ([] if order.session is not None else [_STATUS_LIMIT])
    captures = []
    for limit in limits:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        captures.append(Capture(read, limit))
        files.append(write)
    fetched_file = -1
    if order.call.fetch_files:
        fetched_file = fetched.create(config.fetch_limit, order.call.fetch_files)
        files.append(os.dup(fetched_file))
    now = time.monotonic()
    program = Program(
        identifier=order.identifier,
        slot=slot,
        zygote=kind,
        session=order.session,
        started=now,
        deadline=now + order.timeout,
        cpu_limit=int(order.timeout) + 1,
        stdout=captures[0],
        stderr=captures[1],
        status=captures[2] if len(captures) > 2 else None,
        fetch=order.call.fetch_files,
        fetched_file=fetched_file,
    )
    return program, files


def judge(program: Program, status: int, cpu_seconds: float) -> Ending:
    """The outcome, from the wait status, the limits and the status pipe.

    The child writes STARTED to the status pipe once it is isolated and before the program runs, so a program cannot
    fake an infrastructure failure.
    """
    assert program.status is not None
    exit_code = os.waitstatus_to_exitcode(status)
    report = program.status.text()
    if program.reason is None:
        if not report.startswith(STARTED):
            why = report.decode("utf-8", "replace") or f"the child ended with status {exit_code} before it began"
            return Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=why)
        if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_seconds >= program.cpu_limit:
            return Ending(outcome=Outcome.TIMEOUT, exit_code=exit_code)
    return judge_exit(program, exit_code, out_of_memory=report == STARTED + OUT_OF_MEMORY)


def judge_exit(program: Program, exit_code: int, *, out_of_memory: bool) -> Ending:
    """The outcome, from an exit status (minus a signal's number) and from why the server killed the program.

    ``out_of_memory``: the interpreter reported an uncaught MemoryError, which counts only with the exit status of an
    uncaught exception.
    """
    if program.reason is not None and (exit_code < 0 or program.reason is not Outcome.TIMEOUT):
        return Ending(outcome=program.reason, exit_code=exit_code)
    if exit_code == 0:
        return Ending(outcome=Outcome.OK, exit_code=0)
    if exit_code > 0:
        ran_out = out_of_memory and exit_code == UNCAUGHT
        return Ending(outcome=Outcome.MEMORY_LIMIT if ran_out else Outcome.ERROR, exit_code=exit_code)
    return Ending(outcome=Outcome.KILLED, exit_code=exit_code)
