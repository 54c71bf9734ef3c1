"""One test case for a sandbox, and a client for SandboxFusion's interface, to test other sandboxes too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from agentrl_sandbox.call import Call, to_base64
from agentrl_sandbox.http import HttpSandbox, JsonObject, ServiceRequest
from agentrl_sandbox.runner.seccomp import MACHINES, number
from agentrl_sandbox.types import BusyError, Execution, Outcome, SandboxError

# One test case for a sandbox.

Judge = Callable[[Execution], bool]

ENDED = (Outcome.OK, Outcome.ERROR, Outcome.KILLED, Outcome.MEMORY_LIMIT, Outcome.TIMEOUT, Outcome.OUTPUT_LIMIT)
"""Every outcome of a program; the remaining one means that the sandbox failed."""


@dataclass(frozen=True)
class Case:
    """A program and the expected result.

    ``guards`` is ``conformance`` or the property that the program attacks. ``after`` runs once the program has ended
    and must print ``clean`` if it sees no trace of the first one. Attack programs print ``reached`` for each attempt
    that succeeded; their output is trusted, since they are part of this suite.
    """

    name: str
    program: str
    passes: Judge
    guards: str = "conformance"
    timeout: float = 20.0
    stdin: str = ""
    after: str | None = None


def prints(text: str) -> Judge:
    return lambda run: run.outcome is Outcome.OK and run.stdout == text


def ends(*outcomes: Outcome) -> Judge:
    return lambda run: run.outcome in outcomes


def fails_with(name: str) -> Judge:
    """An uncaught exception of this name, last in the traceback."""

    def judge(run: Execution) -> bool:
        lines = run.stderr.strip().splitlines()
        return run.outcome is Outcome.ERROR and bool(lines) and name in lines[-1]

    return judge


def survives(run: Execution) -> bool:
    """The sandbox reported the program's end, whatever the program did to itself."""
    return run.outcome in ENDED


def reaches_nothing(run: Execution) -> bool:
    """All attempts of the program failed, or it was killed for trying."""
    return run.outcome in ENDED and "reached" not in run.stdout and ("tried" in run.stdout or run.outcome != Outcome.OK)


def attempts(guards: str, name: str, body: str, *, prologue: str = "", after: str | None = None) -> Case:
    """A case of single statements, one per line. A statement that raises no OSError is reported as reached."""
    lines = [line.strip() for line in body.strip().splitlines()]
    program = (
        f"{_HELPERS}{prologue}\n"
        + "".join(
            f"try:\n    {line}\n    print('reached', {line!r})\nexcept (OSError, NotReachedError):\n    pass\n"
            for line in lines
        )
        + "print('tried')\n"
    )
    return Case(name, program, reaches_nothing, guards, after=after)


_CALLS = """
ptrace keyctl add_key bpf io_uring_setup userfaultfd perf_event_open process_vm_readv pidfd_getfd open_by_handle_at
kexec_load init_module mount unshare setns pivot_root chroot swapon reboot clock_settime fsopen open_tree move_mount
kcmp shmget semget msgget mq_open acct syslog landlock_create_ruleset seccomp
"""
_NUMBERS = {machine: {name: number(name, machine) for name in _CALLS.split()} for machine in MACHINES}
_HELPERS = (
    f"SYSTEM_CALLS = {_NUMBERS}\n"
    + '''
import ctypes, os, platform, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
class NotReachedError(Exception): pass
def foreign():
    """Processes that are not the program's own, as far as it can see any."""
    found = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return found
def refuse(): raise NotReachedError("empty")
def any_of(reach):
    """Whether any process that is not ours can be reached in this way."""
    for pid in foreign():
        try:
            reach(pid)
        except (OSError, NotReachedError):
            continue
        return
    raise NotReachedError("all")
def call(name, *arguments):
    """A function of the C library; minus one is a refusal."""
    if getattr(libc, name)(*arguments) == -1: raise NotReachedError(name)
NUMBERS = SYSTEM_CALLS[platform.machine()]
def system(name, *arguments):
    """A system call by its number; minus one is a refusal."""
    if libc.syscall(ctypes.c_long(NUMBERS[name]), *arguments) == -1: raise NotReachedError(name)
'''
)


_KILLED = 128  # exit codes above this report a signal, as in a shell


class FusionSandbox(HttpSandbox):
    """``POST /run_code`` of SandboxFusion or a compatible service. It has no sessions and no request ids."""

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """Run a program. The interface ignores ``request_id``. Raises SandboxError for sessions and echo."""
        if call.session is not None or call.echo:
            raise SandboxError("SandboxFusion's interface has neither sessions nor echo")
        seconds = self._settings.timeout if call.timeout is None else call.timeout
        body = {
            "code": call.program,
            "language": "python",
            "run_timeout": seconds,
            "stdin": call.stdin,
            "files": to_base64(call.files),
            "fetch_files": call.fetch_files,
        }
        started = time.monotonic()

        def read(answer: JsonObject) -> Execution:
            return fusion_execution(answer, time.monotonic() - started)

        try:
            return await self._call(
                ServiceRequest(method="POST", path="/run_code", body=body, seconds=seconds, read=read)
            )
        except BusyError as error:
            return read({"status": "SandboxError", "message": str(error)})


def fusion_execution(answer: JsonObject, seconds: float) -> Execution:
    """Convert an answer of ``/run_code``.

    >>> result = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "MemoryError", "execution_time": 0.1}
    >>> fusion_execution({"status": "Failed", "run_result": result}, 0.2).outcome.value
    'memory_limit'
    """
    result = answer.get("run_result")
    if answer["status"] == "SandboxError" or result is None:
        why = str(answer.get("message", ""))
        outcome, code, texts = Outcome.INFRASTRUCTURE_FAILURE, None, ("", why)
    else:
        code = result.get("return_code")
        texts = (result.get("stdout") or "", result.get("stderr") or "")
        outcome = _outcome(result["status"], code, texts[1])
    return Execution(
        outcome=outcome, stdout=texts[0], stderr=texts[1], exit_code=code, seconds=seconds, truncated=False
    )


def _outcome(status: str, code: int | None, stderr: str) -> Outcome:
    if status == "TimeLimitExceeded":
        return Outcome.TIMEOUT
    if code == 0:
        return Outcome.OK
    if "MemoryError" in stderr.strip().rpartition("\n")[2]:
        return Outcome.MEMORY_LIMIT
    return Outcome.KILLED if code is None or code < 0 or code > _KILLED else Outcome.ERROR
