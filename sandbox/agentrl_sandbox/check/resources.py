"""Programs that exhaust resources. A program that is not stopped in time ends by itself and prints ``reached``."""

from __future__ import annotations

from agentrl_sandbox.check.case import (
    Case,
    Expectation,
    attack_case,
    expect_any_end,
    expect_exception,
    expect_outcome,
    expect_output,
)
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
_FLOOD_TEMPLATE = "import os\nfor _ in range({count}):\n    os.write({stream}, {chunk} * 65536)\nprint('reached')"
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

# Attacks that allocate kernel memory. Each attack stops at about one gigabyte.
_C = """
import ctypes, fcntl, mmap, os, resource, select, socket, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_size_t(-1).value
kept = []
"""
_FULL_SOCKETS = f"""{_C}
full, fills = os.pipe()
children = []
try:
    while len(children) < 14 and (child := os.fork()):
        children.append(child)
except OSError:
    print("bounded", flush=True)
    os._exit(0)
if len(children) == 14:
    for _ in children:
        os.read(full, 1)
    time.sleep(8)  # the measurement of all sockets takes seconds on a busy machine
    print("reached", flush=True)
    os._exit(0)
try:
    while len(kept) < 100:
        kept.append(socket.socketpair())
        for end in kept[-1]:
            end.setblocking(False)
            try:
                while True:
                    end.send(bytes(65536))
            except BlockingIOError:
                pass
finally:
    os.write(fills, b"x")
    time.sleep(30)
"""
_PAGE_TABLES = f"""{_C}
os.fork()
try:
    for index in range(50_000):
        if libc.mmap(0x1000_0000_0000 + (index << 30), 4096, mmap.PROT_READ, 0x108022, -1, 0) == FAILED:
            raise OSError("no further mapping")
except OSError:
    print("bounded", flush=True)
    os._exit(0)
time.sleep(2)
print("reached", flush=True)
"""
_UNMAPPED = f"""{_C}
try:
    for _ in range(16):
        kept.append(mmap.mmap(-1, 64 << 20))
        kept[-1][::4096] = bytes(len(kept[-1]) // 4096)
        libc.munmap(ctypes.addressof(ctypes.c_char.from_buffer(kept[-1])) + 4096, (64 << 20) - 4096)
    print("reached", flush=True)
except OSError:
    print("bounded", flush=True)
os._exit(0)
"""
_WATCHED = f"""{_C}
watched = [end for _ in range(40) for end in os.pipe()]
pollers = [select.epoll() for _ in range(40)]
free = range(max(watched[-1], pollers[-1].fileno()) + 1, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 256))
for end in watched:
    for number in free:
        os.dup2(end, number)
        for poller in pollers:
            poller.register(number, 0)
for number in free:
    os.close(number)
time.sleep(2)
print("reached")
"""
_LOCKS = f"""{_C}
for name in range(200):
    kept.append(open(str(name), "wb", buffering=0))
    for index in range(400):
        fcntl.lockf(kept[-1], fcntl.LOCK_EX, 1, 2 * index)
time.sleep(2)
print("reached")
"""
_TIMERS = f"""{_C}
timer, made = ctypes.c_void_p(), 0
while made < 20_000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0:
    made += 1
print("reached" if made == 20_000 else "bounded")
"""
_ENLARGED = attack_case(
    "bounded_memory",
    "kernel memory of a chosen size",
    """
    socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 20)
    socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
    call("setsockopt", pair[0].fileno(), 1, 32, b"    ", 4)
    call("fcntl", os.pipe()[1], 1031, 1 << 20)
    call("prctl", 78, 1, ctypes.c_ulong(1 << 10), ctypes.c_ulong(0), ctypes.c_ulong(0))
    call("mmap", None, ctypes.c_size_t(4096), 3, 0x21, -1, ctypes.c_long(0))
    call("mmap", None, ctypes.c_size_t(4096), 1, 1, os.open("/dev/zero", 0), ctypes.c_long(0))
    system("landlock_create_ruleset", struct.pack("Q", 4), 8, 0)
    system("seccomp", 1, 0, struct.pack("HxxxxxxP", 1, ctypes.addressof(rule)))
    """,
    prologue="""
pair = socket.socketpair()
rule = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
""",
)


def _printed_bounded_or_hit_limit(run: Execution) -> bool:
    return run.stdout == "bounded\n" or run.outcome in (Outcome.MEMORY_LIMIT, Outcome.OUTPUT_LIMIT, Outcome.TIMEOUT)


def _did_not_succeed(run: Execution) -> bool:
    return "reached" not in run.stdout and run.outcome is not Outcome.INFRASTRUCTURE_FAILURE


def _was_stopped_for_memory(run: Execution) -> bool:
    return run.outcome in (Outcome.MEMORY_LIMIT, Outcome.KILLED) and "reached" not in run.stdout


def _was_stopped_for_output(run: Execution) -> bool:
    return run.outcome in (Outcome.OUTPUT_LIMIT, Outcome.KILLED) or (run.truncated and "reached" in run.stdout[-8:])


def _flood_program(stream: int, chunk: str) -> str:
    return _FLOOD_TEMPLATE.format(count=_MOST_OUTPUT >> 16, stream=stream, chunk=chunk)


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


def _expect_exit_code(code: int) -> Expectation:
    return lambda run: run.outcome is Outcome.ERROR and run.exit_code == code


RESOURCES = (
    Case("fork bomb", _FORKS, _printed_bounded_or_hit_limit, "bounded_processes"),
    Case("fork bomb, exponential", _TREE, expect_outcome(Outcome.TIMEOUT), "bounded_processes", 1.0),
    Case("thread bomb", _THREADS, _printed_bounded_or_hit_limit, "bounded_processes"),
    Case("memory bomb", _MEMORY, _was_stopped_for_memory, "bounded_memory"),
    Case("memory bomb in NumPy", _NUMPY, _was_stopped_for_memory, "bounded_memory"),
    Case("memory bomb by mmap", _MMAP, _did_not_succeed, "bounded_memory"),
    Case("memory spread over processes", _SPREAD, _was_stopped_for_memory, "bounded_memory"),
    _ENLARGED,
    Case("full sockets", _FULL_SOCKETS, _did_not_succeed, "bounded_memory"),
    Case("page tables", _PAGE_TABLES, _did_not_succeed, "bounded_memory"),
    Case("shared memory that no process maps", _UNMAPPED, _did_not_succeed, "bounded_memory"),
    Case("descriptors watched by epoll", _WATCHED, _did_not_succeed, "bounded_memory"),
    Case("file locks", _LOCKS, _did_not_succeed, "bounded_memory"),
    Case("timers", _TIMERS, _did_not_succeed, "bounded_memory"),
    Case("spin that ignores every signal", _IGNORING, expect_outcome(Outcome.TIMEOUT), "bounded_time", 1.0),
    Case(
        "10 ** 10 ** 9", "x = 10 ** 10 ** 9", expect_outcome(Outcome.TIMEOUT, Outcome.MEMORY_LIMIT), "bounded_time", 1.0
    ),
    Case(
        "catastrophic pattern",
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        expect_outcome(Outcome.TIMEOUT),
        "bounded_time",
        1.0,
    ),
    Case("thread that never ends", _ENDLESS_THREAD, expect_outcome(Outcome.TIMEOUT), "bounded_time", 1.0),
    Case("flood of stdout", _flood_program(1, "b'x'"), _was_stopped_for_output, "bounded_output"),
    Case("flood of stderr", _flood_program(2, "b'x'"), _was_stopped_for_output, "bounded_output"),
    Case("flood of lines", _flood_program(1, "b'\\n'"), _was_stopped_for_output, "bounded_output"),
    Case("flood of invalid UTF-8", _flood_program(1, "b'\\xff'"), _was_stopped_for_output, "bounded_output"),
    Case(
        "closed streams",
        "import os\nos.close(1)\nos.close(2)",
        expect_outcome(Outcome.OK, Outcome.ERROR),
        "bounded_output",
    ),
    Case("full disk", _DISK, _printed_bounded_or_hit_limit, "bounded_disk", 30.0),
    Case("too many files", _FILES, _printed_bounded_or_hit_limit, "bounded_disk", 30.0),
    Case("endless recursion", "def f():\n    f()\nf()", expect_exception("RecursionError"), "robust"),
    Case("recursion through C", _C_RECURSION, expect_any_end, "robust"),
    Case("segmentation fault", "import ctypes\nctypes.string_at(0)", expect_outcome(Outcome.KILLED), "robust"),
    Case("nesting that overflows the parser", "(" * 100_000, expect_any_end, "robust"),
    Case("NUL byte in the source", "print(1)\n\0", expect_outcome(Outcome.ERROR), "robust"),
    Case("source of 4 MB", "x = '" + "a" * 4_000_000 + "'\nprint('end')", expect_output("end\n"), "robust", 60.0),
    Case("os._exit", "import os\nos._exit(0)", expect_outcome(Outcome.OK), "robust"),
    Case("subclass of SystemExit", "class E(SystemExit): pass\nraise E(7)", _expect_exit_code(7), "robust"),
    Case("forged messages on every descriptor", _FORGED, _expect_exit_code(9), "robust"),
)
"""Bombs, endless loops, floods, and sources that break interpreters."""
