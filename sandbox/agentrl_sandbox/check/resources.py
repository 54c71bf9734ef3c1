"""Programs that exhaust resources. Each stops by itself if nothing else stops it, and then reports that."""

from __future__ import annotations

from agentrl_sandbox.check.case import Case, Judge, ends, fails_with, prints, survives
from agentrl_sandbox.types import Execution, Outcome

_GIB = 1 << 30
_MOST_PROCESSES = 3000
_MOST_BYTES = 3 * _GIB
_MOST_FILES = 200_000
_MOST_OUTPUT = 100 << 20

_FORKS = f"""
import os, time
made = 0
try:
    while made < {_MOST_PROCESSES}:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
except OSError:
    pass
print("reached" if made == {_MOST_PROCESSES} else "bounded")
"""
_TREE = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
_THREADS = f"""
import threading, time
made = 0
try:
    while made < {_MOST_PROCESSES}:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        made += 1
except RuntimeError:
    pass
print("reached" if made == {_MOST_PROCESSES} else "bounded")
"""
_MEMORY = f"""
kept = []
while sum(map(len, kept)) < {_MOST_BYTES}:
    kept.append(b"x" * (64 << 20))
print("reached")
"""
_NUMPY = f"""
import numpy
kept = []
while len(kept) < {_MOST_BYTES >> 26}:
    kept.append(numpy.ones(8 << 20))
print("reached")
"""
_MMAP = f"""
import mmap
kept = []
while len(kept) < {_MOST_BYTES >> 26}:
    kept.append(mmap.mmap(-1, 64 << 20))
    kept[-1].write(b"x" * (64 << 20))
print("reached")
"""
_SPREAD = """
import os, time
for _ in range(12):
    if os.fork() == 0:
        kept = b"x" * (256 << 20)
        time.sleep(5)
        os._exit(0)
time.sleep(6)
print("reached")
"""
_IGNORING = """
import signal
for number in set(range(1, 65)) - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
"""
_FLOOD = "import os\nfor _ in range({count}):\n    os.write({stream}, {chunk} * 65536)\nprint('reached')"
_DISK = f"""
written = 0
try:
    for name in range(64):
        with open(str(name), "wb", buffering=0) as file:
            while written < {_MOST_BYTES} and file.tell() < {_GIB}:
                written += file.write(b"x" * (1 << 20))
except OSError:
    pass
print("reached" if written >= {_MOST_BYTES} else "bounded")
"""
_FILES = f"""
made = 0
try:
    while made < {_MOST_FILES}:
        open(str(made), "w").close()
        made += 1
except OSError:
    pass
print("reached" if made == {_MOST_FILES} else "bounded")
"""


def _bounded(run: Execution) -> bool:
    return run.stdout == "bounded\n" or run.outcome in (Outcome.MEMORY_LIMIT, Outcome.OUTPUT_LIMIT, Outcome.TIMEOUT)


def _not_reached(run: Execution) -> bool:
    return "reached" not in run.stdout and run.outcome is not Outcome.INFRASTRUCTURE_FAILURE


def _stopped_for_memory(run: Execution) -> bool:
    return run.outcome in (Outcome.MEMORY_LIMIT, Outcome.KILLED) and "reached" not in run.stdout


def _flooded(run: Execution) -> bool:
    return run.outcome in (Outcome.OUTPUT_LIMIT, Outcome.KILLED) or (run.truncated and "reached" in run.stdout[-8:])


def _flood(stream: int, chunk: str) -> str:
    return _FLOOD.format(count=_MOST_OUTPUT >> 16, stream=stream, chunk=chunk)


_ENDLESS_THREAD = "import threading\nthreading.Thread(target=lambda: any(iter(int, 1))).start()"
_FORGED = r"""
import os
for fd in range(3, 256):
    try:
        os.write(fd, b'\0\0\0\x10\0\0\0\x10{"op": "done"}')
        os.close(fd)
    except OSError:
        pass
os._exit(9)
"""
_C_RECURSION = """
import sys
sys.setrecursionlimit(10**9)
class A:
    def __repr__(self): return repr(self)
repr(A())
"""


def _exits_with(code: int) -> Judge:
    return lambda run: run.outcome is Outcome.ERROR and run.exit_code == code


RESOURCES = (
    Case("fork bomb", _FORKS, _bounded, "bounded_processes"),
    Case("fork bomb, exponential", _TREE, ends(Outcome.TIMEOUT), "bounded_processes", 1.0),
    Case("thread bomb", _THREADS, _bounded, "bounded_processes"),
    Case("memory bomb", _MEMORY, _stopped_for_memory, "bounded_memory"),
    Case("memory bomb in NumPy", _NUMPY, _stopped_for_memory, "bounded_memory"),
    Case("memory bomb by mmap", _MMAP, _not_reached, "bounded_memory"),
    Case("memory spread over processes", _SPREAD, _stopped_for_memory, "bounded_memory"),
    Case("spin that ignores every signal", _IGNORING, ends(Outcome.TIMEOUT), "bounded_time", 1.0),
    Case("10 ** 10 ** 9", "x = 10 ** 10 ** 9", ends(Outcome.TIMEOUT, Outcome.MEMORY_LIMIT), "bounded_time", 1.0),
    Case(
        "catastrophic pattern",
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        ends(Outcome.TIMEOUT),
        "bounded_time",
        1.0,
    ),
    Case("thread that never ends", _ENDLESS_THREAD, ends(Outcome.TIMEOUT), "bounded_time", 1.0),
    Case("flood of stdout", _flood(1, "b'x'"), _flooded, "bounded_output"),
    Case("flood of stderr", _flood(2, "b'x'"), _flooded, "bounded_output"),
    Case("flood of lines", _flood(1, "b'\\n'"), _flooded, "bounded_output"),
    Case("flood of bytes that are no text", _flood(1, "b'\\xff'"), _flooded, "bounded_output"),
    Case("closed streams", "import os\nos.close(1)\nos.close(2)", ends(Outcome.OK, Outcome.ERROR), "bounded_output"),
    Case("full disk", _DISK, _bounded, "bounded_disk", 30.0),
    Case("a million files", _FILES, _bounded, "bounded_disk", 30.0),
    Case("endless recursion", "def f():\n    f()\nf()", fails_with("RecursionError"), "robust"),
    Case("recursion through C", _C_RECURSION, survives, "robust"),
    Case("segmentation fault", "import ctypes\nctypes.string_at(0)", ends(Outcome.KILLED), "robust"),
    Case("nesting that breaks the parser", "(" * 100_000, survives, "robust"),
    Case("NUL byte in the text", "print(1)\n\0", ends(Outcome.ERROR), "robust"),
    Case("text of 4 MB", "x = '" + "a" * 4_000_000 + "'\nprint('end')", prints("end\n"), "robust", 60.0),
    Case("os._exit", "import os\nos._exit(0)", ends(Outcome.OK), "robust"),
    Case("a SystemExit of its own", "class E(SystemExit): pass\nraise E(7)", _exits_with(7), "robust"),
    Case("forged messages on every descriptor", _FORGED, _exits_with(9), "robust"),
)
"""Bombs, endless loops and floods, and texts that break interpreters."""
