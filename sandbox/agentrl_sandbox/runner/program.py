"""The server's view of a running program: output, limits and outcome. Also the zygotes that fork programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_sandbox.call import Call
from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.child import OUT_OF_MEMORY, STARTED
from agentrl_sandbox.runner.cleanup import SHARED_MEMORY
from agentrl_sandbox.runner.config import ProcessMessage, RunnerConfig, ServerRequest, python_command
from agentrl_sandbox.runner.files import create_fetch_file, read_fetch_file
from agentrl_sandbox.runner.interpreter import UNCAUGHT, create_task_file
from agentrl_sandbox.runner.usage import (
    INODES,
    ProgramMemoryQuota,
    ScratchQuota,
    Usage,
    process_tree,
    proportional_memory_bytes,
    resident_bytes,
)
from agentrl_sandbox.types import Execution, Outcome

# An output stream of a program, drained while the program runs.

_CHUNK_BYTES = 65_536


class OutputCapture:
    """Keeps the first and the last ``limit // 2`` bytes read from a non-blocking descriptor."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor = descriptor
        self.total = 0
        self.open = True
        self._half = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def read_and_check_open(self, max_bytes: int) -> bool:
        """Read available data, up to about ``max_bytes`` bytes. Returns True while the stream is open."""
        bytes_read = 0
        while self.open and bytes_read < max_bytes:
            try:
                data = os.read(self.descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not data:
                self.open = False
            bytes_read += len(data)
            self._keep(data)
        return self.open

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def truncated(self) -> bool:
        return self.total > 2 * self._half

    def head_and_tail(self) -> bytes:
        """Return head and tail, with a note in between if bytes were dropped."""
        tail = b"".join(self._tail)
        if not self.truncated:
            return bytes(self._head) + tail
        note = f"\n... [{self.total - 2 * self._half} bytes left out] ...\n".encode()
        return bytes(self._head) + note + tail[-self._half :]

    def _keep(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) >= self._half:
            self._tail_size -= len(self._tail.popleft())


# Limits that the kernel does not enforce: the total memory of a program's processes and, without namespaces, the size
# and number of its scratch files.
#
# A program controls the cost of the checks, so expensive checks use at most a tenth of the server's time.

_CHECK_PAUSE_FACTOR = 10.0  # time between checks, as a multiple of a check's duration
_SOCKET_BUFFER_FILE = "/proc/sys/net/core/wmem_default"
_DEFAULT_SOCKET_BYTES = 212_992  # Linux's default, used if the network namespace does not show the value


class LimitChecker:
    """Checks a program's limits. Without namespaces, ``scratch`` is the parent of the slots' directories."""

    def __init__(self, config: RunnerConfig, user_of_slot: Callable[[int], int | None], scratch: str = "") -> None:
        self._memory = config.memory_mb << 20
        self._scratch = scratch
        try:
            self._socket_bytes = int(Path(_SOCKET_BUFFER_FILE).read_text("ascii"))
        except OSError:
            self._socket_bytes = _DEFAULT_SOCKET_BYTES
        self._scratch_bytes = config.scratch_mb << 20
        self._user_of_slot = user_of_slot

    def exceeds_memory(self, program: Program, used: Usage, baseline: int) -> bool:
        """Return True if a program uses more than ``memory_mb``. Pages shared by its processes count once."""
        unshared = used.page_tables + (used.resident if len(used.processes) == 1 else 0)
        if unshared > self._memory:
            return True
        return self._run_if_due(program, "memory", lambda: self._memory_left(used, baseline) < 0)

    def _memory_left(self, used: Usage, baseline: int) -> int:
        resident = used.resident
        if resident + used.page_tables > self._memory:
            resident = proportional_memory_bytes(used.processes, baseline)
        quota = ProgramMemoryQuota(
            bytes_left=self._memory - used.page_tables - resident, socket_bytes=self._socket_bytes
        )
        quota.add(used.processes)
        return quota.bytes_left

    def exceeds_scratch(self, program: Program) -> bool:
        """Return True if the files exceed ``scratch_mb`` or are too many. With namespaces, the mount enforces this."""
        return bool(self._scratch) and self._run_if_due(
            program, "scratch", lambda: self._scratch_quota(program).is_exceeded
        )

    def _run_if_due(self, program: Program, what: str, check: Callable[[], bool]) -> bool:
        """Run a check with the rights of the program's user if it is due. Returns its result."""
        started = time.monotonic()
        if started < program.next_checks.get(what, 0.0):
            return False
        with kernel.file_access_as(self._user_of_slot(program.slot)):
            exceeded = check()
        program.next_checks[what] = started + _CHECK_PAUSE_FACTOR * (time.monotonic() - started)
        return exceeded

    def _scratch_quota(self, program: Program) -> ScratchQuota:
        quota = ScratchQuota(bytes_left=self._scratch_bytes, inodes_left=INODES)
        quota.count_tree(f"{self._scratch}/{program.slot}")
        if (user := self._user_of_slot(program.slot)) is not None:
            quota.count_user_files(user, SHARED_MEMORY)
        if program.pid:
            quota.count_unlinked_files(process_tree(program.pid))
        return quota


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
    stdout: OutputCapture
    stderr: OutputCapture
    status: OutputCapture | None  # None in a session, whose interpreter reports the end
    fetch: tuple[str, ...] = ()
    fetched_file: int = -1  # the memory file that returns fetched files
    session: int | None = None
    pid: int = 0  # PID of the first process, or of the session init
    next_checks: dict[str, float] = field(default_factory=dict)  # times of the next expensive checks
    reason: Outcome | None = None  # reason why the server killed the program

    @property
    def output_captures(self) -> tuple[OutputCapture, ...]:
        """Standard output, standard error, and the status pipe if there is one."""
        return (self.stdout, self.stderr) if self.status is None else (self.stdout, self.stderr, self.status)

    def to_execution(self, ending: Ending) -> Execution:
        """Return the result for the client. The result of a killed program contains no files."""
        killed = self.reason is not None or ending.exit_code is None or ending.exit_code < 0
        return Execution(
            outcome=ending.outcome,
            stdout=self.stdout.head_and_tail().decode("utf-8", "replace"),
            stderr=self.stderr.head_and_tail().decode("utf-8", "replace") + ending.why,
            exit_code=ending.exit_code,
            seconds=time.monotonic() - self.started,
            truncated=self.stdout.truncated or self.stderr.truncated,
            files={} if killed or self.fetched_file < 0 else read_fetch_file(self.fetched_file, self.fetch),
        )

    def close(self) -> None:
        for capture in self.output_captures:
            capture.close()
        if self.fetched_file >= 0:
            os.close(self.fetched_file)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    outcome: Outcome
    exit_code: int | None
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedRun:
    """The server's record of a requested run. ``session`` is the session's number at the server."""

    identifier: int
    session: int | None
    call: Call

    @classmethod
    def from_frame(cls, header: ServerRequest, blobs: list[bytes]) -> RequestedRun:
        return cls(identifier=header["id"], session=header["number"], call=Call.from_frame(header, blobs))


def prepare_program(order: RequestedRun, config: RunnerConfig, kind: str, slot: int) -> tuple[Program, list[int]]:
    """Start a program's deadline and open its pipes. Returns the program and the descriptors for the child.

    The caller closes these descriptors: the memory file, stdout, stderr, the status pipe (outside sessions), and the
    fetch file if there is one.
    """
    descriptors = [create_task_file(order.call)]
    limits = [config.output_limit, config.output_limit] + ([] if order.session is not None else [_STATUS_LIMIT])
    captures = []
    for limit in limits:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        captures.append(OutputCapture(read, limit))
        descriptors.append(write)
    fetched_file = -1
    if order.call.fetch_files:
        fetched_file = create_fetch_file(config.fetch_limit, order.call.fetch_files)
        descriptors.append(os.dup(fetched_file))
    now, seconds = time.monotonic(), order.call.timeout or 0.0
    program = Program(
        identifier=order.identifier,
        slot=slot,
        zygote=kind,
        session=order.session,
        started=now,
        deadline=now + seconds,
        cpu_limit=int(seconds) + 1,
        stdout=captures[0],
        stderr=captures[1],
        status=captures[2] if len(captures) > 2 else None,
        fetch=order.call.fetch_files,
        fetched_file=fetched_file,
    )
    return program, descriptors


def determine_ending(program: Program, status: int, cpu_seconds: float) -> Ending:
    """Determine the outcome from the wait status, the limits and the status pipe.

    The child writes STARTED to the status pipe after it is isolated and before the program runs, so a program cannot
    fake an infrastructure failure.
    """
    assert program.status is not None
    exit_code = os.waitstatus_to_exitcode(status)
    report = program.status.head_and_tail()
    if program.reason is None:
        if not report.startswith(STARTED):
            why = (
                report.decode("utf-8", "replace")
                or f"the child exited with status {exit_code} before the program started"
            )
            return Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=why)
        if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_seconds >= program.cpu_limit:
            return Ending(outcome=Outcome.TIMEOUT, exit_code=exit_code)
    return ending_of_exit_code(program, exit_code, out_of_memory=report == STARTED + OUT_OF_MEMORY)


def ending_of_exit_code(program: Program, exit_code: int, *, out_of_memory: bool) -> Ending:
    """Determine the outcome from an exit status (negative for a signal) and the reason for a kill by the server.

    ``out_of_memory``: the interpreter reported an uncaught MemoryError. The report counts only with the exit status of
    an uncaught exception.
    """
    if program.reason is not None and (exit_code < 0 or program.reason is not Outcome.TIMEOUT):
        return Ending(outcome=program.reason, exit_code=exit_code)
    if exit_code == 0:
        return Ending(outcome=Outcome.OK, exit_code=0)
    if exit_code > 0:
        ran_out = out_of_memory and exit_code == UNCAUGHT
        return Ending(outcome=Outcome.MEMORY_LIMIT if ran_out else Outcome.ERROR, exit_code=exit_code)
    return Ending(outcome=Outcome.KILLED, exit_code=exit_code)


_MAX_MESSAGE = 65_536


class ZygoteHandle:
    """The server's handle to a warm interpreter: sends programs and reads reports."""

    def __init__(self, kind: str, config: RunnerConfig) -> None:
        self.kind = kind
        self.ready = False
        self.resident = 0  # bytes of the warm interpreter, shared by every child at its start
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin = os.memfd_create("stdin")
        command = python_command(
            sys.executable,
            "agentrl_sandbox.runner.zygote",
            config.package_path,
            kind,
            config.to_json(),
            str(theirs.fileno()),
            str(os.getpid()),
        )
        with theirs:
            # The standard streams have the same types as the streams of programs: a file and pipes.
            self._process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, pass_fds=(theirs.fileno(),), env=dict(os.environ)
            )
        os.close(stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_ready(self) -> None:
        self.ready = True
        self.resident = resident_bytes(self._process.pid)

    def request_child(self, message: ProcessMessage, descriptors: list[int]) -> None:
        """Request a child process. Raises OSError if the zygote has exited."""
        socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)

    def send_command(self, operation: str, identifier: int) -> None:
        """Send a command about a child or slot. Ignored if the zygote has exited, because its children exit with it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(json.dumps({"op": operation, "id": identifier}).encode())

    def receive(self) -> ProcessMessage | None:
        """Receive the next report, or None if the zygote has exited."""
        try:
            data = self._socket.recv(_MAX_MESSAGE)
        except ConnectionResetError:
            return None
        if not data:
            return None
        message: ProcessMessage = json.loads(data)
        return message

    def kill_and_reap(self) -> int:
        """Kill the zygote and its children. Returns its exit status."""
        self._socket.close()
        self._process.kill()
        status = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return status
