"""A warm interpreter that forks one child for each program.

The zygote never reads a program's source: the child receives the source in a memory file. It communicates with the
server over a SEQPACKET socket, with one JSON object per message:

    server -> zygote   {"op": "spawn", "id", "slot", "cpu"} with descriptors [program file, stdout, stderr, status]
                       and [fetch file] if files are fetched
                       {"op": "init", "id", "slot", "session"} with descriptors [init's socket, session's socket]
                       {"op": "kill", "id"} · {"op": "locate", "id"} · {"op": "clean", "id"}: a slot
    zygote -> server   {"op": "ready"} · {"op": "failed", "id", "why"} · {"op": "located", "id", "pid"}
                       {"op": "exit", "id", "status", "cpu"} · {"op": "clean", "id"}

An exit is reported after the last process of the program has ended. The server checks for leftover files and a helper
removes them. Children are copies of the zygote, so not even the name of a file may enter the zygote's memory.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import sysconfig
from types import CodeType, ModuleType
from typing import Any, Self

from agentrl_sandbox.runner import cleanup, kernel
from agentrl_sandbox.runner.child import ChildLimits, has_separate_users, run_child, set_limits_of_children
from agentrl_sandbox.runner.config import BARE_MODULES, SCRATCH_VARIABLE, ProcessMessage, RunnerConfig
from agentrl_sandbox.runner.interpreter import make_random_seeders
from agentrl_sandbox.runner.session_process import run_session_init

# Makes the objects of a warm interpreter immortal, so that forks share more memory.
#
# Reading an object changes its reference count and thereby copies the page in a child. From CPython 3.12 on (PEP 683),
# the references of an immortal object are not counted.


def make_objects_immortal() -> None:
    """Make all objects that the garbage collector reaches immortal.

    No effect if the interpreter has no immortal objects or stores reference counts differently. Existing objects are
    never freed, so call this only in an interpreter that only forks.
    """
    count = _immortal_reference_count()
    if count is None:
        return
    seen: set[int] = set()
    seen.add(id(seen))
    waiting: list[object] = gc.get_objects()
    while waiting:
        item = waiting.pop()
        if id(item) not in seen:
            seen.add(id(item))
            waiting += gc.get_referents(item)
            if isinstance(item, CodeType):  # the collector does not traverse code objects
                waiting += (item.co_consts, item.co_names, item.co_linetable, item.co_exceptiontable, item.co_name)
    seen.remove(id(seen))
    for address in seen:
        ctypes.c_uint32.from_address(address).value = count


def _immortal_reference_count() -> int | None:
    """Return the low half of an immortal object's reference count, or None if Python has no immortal objects."""
    if sys.implementation.name != "cpython" or sys.version_info < (3, 12) or sys.maxsize < 1 << 32:
        return None
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    count: int = ctypes.c_uint32.from_address(id(None)).value
    return count if count == sys.getrefcount(None) >= 1 << 30 else None


_MAX_MESSAGE = 65_536
_MAX_DESCRIPTORS = 5


def main() -> None:
    """Entry point: ``main KIND CONFIG SOCKET_DESCRIPTOR PARENT_PID``. KIND is ``bare`` or ``science``."""
    kind, config_text, descriptor, parent = sys.argv[1:5]
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    config = RunnerConfig.from_json(config_text)
    sys.path[:] = [path for path in sys.path if path != config.package_path]
    sys.path += config.library_paths
    gc.disable()
    warm_up(science=kind == "science")
    sys.argv[:] = ["<program>"]
    gc.collect()
    seeders = make_random_seeders()
    make_objects_immortal()
    gc.freeze()
    move_heap_to_huge_pages()
    with socket.socket(fileno=int(descriptor)) as server:
        Zygote(config, server, ChildLimits.derive_in_zygote(config, seeders)).serve()


def warm_up(*, science: bool) -> None:
    """Import modules that programs use. Programs cannot use modules that are not importable here."""
    _add_site_builtins()
    _redirect_anonymous_mmap_to_files()
    for name in (*BARE_MODULES, "linecache", "traceback"):
        importlib.import_module(name)
    if not science:
        return
    numpy = importlib.import_module("numpy")
    for name in ("numpy.linalg", "numpy.random", "subprocess", "tempfile", "pprint", "textwrap", "threading"):
        importlib.import_module(name)
    numpy.linalg.solve([[2.0, 1.0], [1.0, 3.0]], [1.0, 2.0])
    sympy = importlib.import_module("sympy")
    for name in ("sympy.ntheory", "sympy.geometry", "sympy.combinatorics", "sympy.solvers.diophantine"):
        importlib.import_module(name)
    _warm_up_sympy(sympy)


def _warm_up_sympy(sympy: ModuleType) -> None:
    """Run common operations once, so that their imports and caches are warm."""
    x, y = sympy.symbols("x y")
    root = sympy.solve(x**2 - 5 * x + 6, x)
    sympy.solve([x + y - 3, x - y - 1], [x, y])
    sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
    sympy.factor(x**2 - 1)
    sympy.expand((x + 1) ** 3)
    sympy.integrate(x**2 * sympy.exp(x), x)
    sympy.diff(sympy.log(x), x)
    sympy.Matrix([[1, 2], [3, 4]]).det()
    sympy.factorint(360)
    sympy.sqrt(8) + sympy.Rational(1, 3)
    sympy.N(sympy.pi, 20)
    sympy.summation(x, (x, 1, y))
    sympy.latex(root[0] / 7)
    str(sympy.sympify("x + 1/2"))


def _add_site_builtins() -> None:
    """Add ``exit``, ``quit`` and ``help``, which the site module normally provides."""
    site_builtins = importlib.import_module("_sitebuiltins")
    for name in ("exit", "quit"):
        setattr(builtins, name, site_builtins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    setattr(builtins, "help", site_builtins._Helper())  # noqa: B010 - an attribute that the type lacks


def _redirect_anonymous_mmap_to_files() -> None:
    """Make ``mmap.mmap(-1, length)`` map a file in the scratch directory, so that it counts toward the scratch limit.

    The system call filter denies shared memory without a file, because such memory would persist after the last process
    has unmapped it.
    """
    mmap_module = importlib.import_module("mmap")

    class Mapping(mmap_module.mmap):  # type: ignore[misc, name-defined]
        def __new__(
            cls,
            fileno: int,
            length: int,
            flags: int = mmap_module.MAP_SHARED,
            prot: int = mmap_module.PROT_READ | mmap_module.PROT_WRITE,
            access: int = mmap_module.ACCESS_DEFAULT,
            **more: Any,
        ) -> Self:
            rest = {"prot": prot, "access": access, **more}
            if fileno != -1 or not flags & mmap_module.MAP_SHARED or access == mmap_module.ACCESS_COPY:
                return super().__new__(cls, fileno, length, flags, **rest)
            with importlib.import_module("tempfile").TemporaryFile() as file:
                if length > 0:
                    os.posix_fallocate(file.fileno(), 0, length)
                return super().__new__(cls, file.fileno(), length, flags & ~mmap_module.MAP_ANONYMOUS, **rest)

    Mapping.__name__ = Mapping.__qualname__ = "mmap"
    Mapping.__module__ = "mmap"
    mmap_module.mmap = Mapping  # type: ignore[attr-defined]


def move_heap_to_huge_pages() -> None:
    """Move the heap to huge pages. Forks then copy, and exits free, far fewer page table entries."""
    with open("/proc/self/maps", encoding="ascii") as file:
        lines = file.read().splitlines()
    for line in lines:
        span, mode, _, _, inode, *_ = line.split()
        if mode.startswith("rw-p") and inode == "0":
            begin, end = (int(edge, 16) for edge in span.split("-"))
            kernel.collapse_to_huge_pages(begin, end)


class Zygote:
    def __init__(self, config: RunnerConfig, server: socket.socket, limits: ChildLimits) -> None:
        self._config = config
        self._server = server
        self._limits = limits
        set_limits_of_children(limits)
        self._ids: dict[int, int] = {}  # process -> program
        self._pids: dict[int, int] = {}  # program -> process
        self._slots: dict[int, int] = {}  # process of a program or of a cleanup helper -> slot
        self._without_namespaces = config.isolate == "none"
        self._scratch = os.environ.get(SCRATCH_VARIABLE, "")
        if self._without_namespaces:
            kernel.adopt_orphans(needed=not has_separate_users(config))
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY) if config.isolate != "none" else -1
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        self._send({"op": "ready"})
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._reap()
                elif not self._receive_and_execute_command():
                    return

    def _receive_and_execute_command(self) -> bool:
        """Execute one command from the server. Returns False if the server has disconnected."""
        flags = socket.MSG_CMSG_CLOEXEC
        data, descriptors, _, _ = socket.recv_fds(self._server, _MAX_MESSAGE, _MAX_DESCRIPTORS, flags)
        if not data:
            return False
        message: ProcessMessage = json.loads(data)
        if message["op"] in ("spawn", "init"):
            self._spawn(message, descriptors)
        elif message["op"] == "clean":
            self._clean_slot(message["id"])
        elif message["id"] in self._pids:
            pid = self._pids[message["id"]]
            if message["op"] == "kill":
                self._kill(pid)
            else:
                self._send({"op": "located", "id": message["id"], "pid": pid})
        return True

    def _kill(self, pid: int) -> None:
        """Kill a program, with its process group if it leads one. The PID is valid, because the child is not reaped."""
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)

    def _spawn(self, message: ProcessMessage, descriptors: list[int]) -> None:
        identifier = message["id"]
        try:
            if self._own_pid_namespace >= 0:
                kernel.unshare(kernel.CLONE_NEWPID)
            pid = os.fork()
        except OSError as error:
            self._send({"op": "failed", "id": identifier, "why": str(error)})
            return
        else:
            if pid == 0 and message["op"] == "init":
                run_session_init(self._limits, message["slot"], message["session"], descriptors)
            if pid == 0:
                run_child(self._limits, message["slot"], int(message["cpu"]), descriptors)
            self._ids[pid] = identifier
            self._pids[identifier] = pid
            self._slots[pid] = message["slot"]
        finally:
            if self._own_pid_namespace >= 0:
                kernel.setns(self._own_pid_namespace, kernel.CLONE_NEWPID)
            for descriptor in descriptors:
                os.close(descriptor)

    def _reap(self) -> None:
        while self._slots:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            slot = self._slots.pop(pid, None)
            identifier = self._ids.pop(pid, None)
            if identifier is not None and slot is not None:
                del self._pids[identifier]
                if self._without_namespaces:
                    cleanup.kill_leftover_processes(self._slots, self._limits.user_of_slot(slot))
                cpu = usage.ru_utime + usage.ru_stime
                self._send({"op": "exit", "id": identifier, "status": status, "cpu": cpu})
            elif slot is not None:
                if status != 0:
                    raise RuntimeError(f"slot {slot} could not be cleaned: status {status}")
                self._send({"op": "clean", "id": slot})

    def _clean_slot(self, slot: int) -> None:
        """Start a helper that removes a slot's files, because removing many files would delay other programs."""
        user, directory = self._limits.user_of_slot(slot), f"{self._scratch}/{slot}"
        cleanup.kill_leftover_processes(self._slots, user)
        self._slots[cleanup.fork_as(user, functools.partial(cleanup.remove_program_files, directory, user))] = slot

    def _send(self, message: ProcessMessage) -> None:
        self._server.send(json.dumps(message).encode())
