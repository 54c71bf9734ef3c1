"""Test cases for a sandbox: their format, and the programs that every sandbox must support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl_sandbox.runner.seccomp import MACHINES, system_call_number
from agentrl_sandbox.types import Execution, Outcome

Expectation = Callable[[Execution], bool]

ENDED = (Outcome.OK, Outcome.ERROR, Outcome.KILLED, Outcome.MEMORY_LIMIT, Outcome.TIMEOUT, Outcome.OUTPUT_LIMIT)
"""All outcomes of a program except the failure of the sandbox."""


@dataclass(frozen=True)
class Case:
    """A program and the expected result.

    ``property_name`` is ``conformance`` or the property that the program attacks. The program ``after`` runs next and
    must print ``clean`` if it detects no trace of the first program. Attack programs print ``reached`` for each
    successful attempt. Their output is trusted, because they are part of this suite.
    """

    name: str
    program: str
    passes: Expectation
    property_name: str = "conformance"
    timeout: float = 20.0
    stdin: str = ""
    after: str | None = None


def expect_output(text: str) -> Expectation:
    return lambda run: run.outcome is Outcome.OK and run.stdout == text


def expect_outcome(*outcomes: Outcome) -> Expectation:
    return lambda run: run.outcome in outcomes


def expect_exception(name: str) -> Expectation:
    """Return an expectation that is met if the program ended with an uncaught exception of this name."""

    def judge(run: Execution) -> bool:
        lines = run.stderr.strip().splitlines()
        return run.outcome is Outcome.ERROR and bool(lines) and name in lines[-1]

    return judge


def expect_any_end(run: Execution) -> bool:
    """Return True if the sandbox reported the program's end."""
    return run.outcome in ENDED


def expect_blocked_attack(run: Execution) -> bool:
    """Return True if the program was killed or all its attempts failed."""
    return run.outcome in ENDED and "reached" not in run.stdout and ("tried" in run.stdout or run.outcome != Outcome.OK)


def attack_case(property_name: str, name: str, body: str, *, prologue: str = "", after: str | None = None) -> Case:
    """Build a case from attacks, one statement per line.

    A statement succeeds unless it raises OSError or AttackFailedError.
    """
    lines = [line.strip() for line in body.strip().splitlines()]
    program = (
        f"{_HELPERS}{prologue}\n"
        + "".join(
            f"try:\n    {line}\n    print('reached', {line!r})\nexcept (OSError, AttackFailedError):\n    pass\n"
            for line in lines
        )
        + "print('tried')\n"
    )
    return Case(name, program, expect_blocked_attack, property_name, after=after)


_ATTACKED_CALLS = """
ptrace keyctl add_key bpf io_uring_setup userfaultfd perf_event_open process_vm_readv pidfd_getfd open_by_handle_at
kexec_load init_module mount unshare setns pivot_root chroot swapon reboot clock_settime fsopen open_tree move_mount
kcmp shmget semget msgget mq_open acct syslog landlock_create_ruleset seccomp
"""
_NUMBERS_BY_MACHINE = {
    machine: {name: system_call_number(name, machine) for name in _ATTACKED_CALLS.split()} for machine in MACHINES
}
_HELPERS = (
    f"SYSTEM_CALLS = {_NUMBERS_BY_MACHINE}\n"
    + '''
import ctypes, os, platform, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
class AttackFailedError(Exception): pass
def refuse(): raise AttackFailedError("empty")
def any_of(attack):
    """Attack all other visible processes. Raises AttackFailedError if every attack fails."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        try:
            attack(pid)
        except (OSError, AttackFailedError):
            continue
        return
    raise AttackFailedError("all")
def call(name, *arguments):
    """Call a function of the C library. Raises AttackFailedError if it returns -1."""
    if getattr(libc, name)(*arguments) == -1: raise AttackFailedError(name)
NUMBERS = SYSTEM_CALLS[platform.machine()]
def system(name, *arguments):
    """Make a system call by name. Raises AttackFailedError if it returns -1."""
    if libc.syscall(ctypes.c_long(NUMBERS[name]), *arguments) == -1: raise AttackFailedError(name)
'''
)


_LONG_OUTPUT_BYTES = 400_000
_LIBRARIES = "numpy, scipy, sympy, mpmath, networkx, pandas"


def _keeps_head_and_tail(run: Execution) -> bool:
    return (
        run.outcome is Outcome.OK
        and run.stdout.startswith("head")
        and run.stdout.rstrip().endswith("tail")
        and len(run.stdout) < _LONG_OUTPUT_BYTES
    )


CONFORMANCE = (
    Case("prints", "print(1 + 1)", expect_output("2\n")),
    Case("prints Unicode", "print('∑ π ≈ 3.14159 🙂')", expect_output("∑ π ≈ 3.14159 🙂\n")),
    Case("runs as __main__", "print(__name__)", expect_output("__main__\n")),
    Case("reads stdin to its end", "import sys\nprint(len(sys.stdin.read()))", expect_output("3\n"), stdin="abc"),
    Case("stdin is empty by default", "import sys\nprint(repr(sys.stdin.read()))", expect_output("''\n")),
    Case("reports an exception", "print('before')\n1 / 0", expect_exception("ZeroDivisionError")),
    Case("reports a syntax error", "print('before'", expect_exception("SyntaxError")),
    Case(
        "reports an exit status",
        "import sys\nsys.exit(3)",
        lambda run: run.outcome is Outcome.ERROR and run.exit_code == 3,
    ),
    Case("treats exit status 0 as success", "import sys\nprint(1)\nsys.exit()", expect_output("1\n")),
    Case(
        "separates standard error",
        "import sys\nprint('out')\nprint('err', file=sys.stderr)",
        lambda run: (run.outcome, run.stdout, run.stderr) == (Outcome.OK, "out\n", "err\n"),
    ),
    Case("ends an endless loop", "while True:\n    pass", expect_outcome(Outcome.TIMEOUT), timeout=1.0),
    Case("ends a long sleep", "import time\ntime.sleep(60)", expect_outcome(Outcome.TIMEOUT), timeout=1.0),
    Case(
        "keeps output from before a timeout",
        "print('early', flush=True)\nwhile True:\n    pass",
        lambda run: run.outcome is Outcome.TIMEOUT and run.stdout == "early\n",
        timeout=1.0,
    ),
    Case("trims long output", f"print('head' + 'x' * {_LONG_OUTPUT_BYTES} + 'tail')", _keeps_head_and_tail),
    Case("replaces bytes that are not UTF-8", "import os\nos.write(1, b'a\\xffb\\n')", expect_output("a\ufffdb\n")),
    Case("reports that memory ran out", "x = bytearray(1 << 40)", expect_outcome(Outcome.MEMORY_LIMIT)),
    Case("has the scientific libraries", f"import {_LIBRARIES}\nprint('all')", expect_output("all\n"), timeout=60.0),
    Case(
        "solves with SymPy",
        "from sympy import *\nx = symbols('x')\nprint(solve(x**2 - 2, x))",
        expect_output("[-sqrt(2), sqrt(2)]\n"),
    ),
    Case("computes with NumPy", "import numpy as np\nprint(np.linalg.det(np.eye(50)))", expect_output("1.0\n")),
    Case(
        "runs child processes",
        "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p:\n    print(p.map(abs, [-1, -2]))",
        expect_output("[1, 2]\n"),
    ),
    Case(
        "runs threads",
        "import threading\nt = threading.Thread(target=print, args=('in',))\nt.start()\nt.join()",
        expect_output("in\n"),
    ),
    Case("writes and reads files", "open('f', 'w').write('kept')\nprint(open('f').read())", expect_output("kept\n")),
    Case(
        "removes files between programs",
        "open('left-behind', 'w').close()",
        expect_outcome(Outcome.OK),
        after="import os\nprint('dirty' if os.path.exists('left-behind') else 'clean')",
    ),
    Case(
        "isolates variables and imports",
        "import sys\nsys.modules['left'] = sys\nleft = 1",
        expect_outcome(Outcome.OK),
        after="import sys\nprint('dirty' if 'left' in globals() or 'left' in sys.modules else 'clean')",
    ),
)
"""Programs that must work, in the order of the report. ``suite`` adds cases with several programs."""
