"""What happens in the forked child: it locks itself in, then becomes the program."""

from __future__ import annotations

import atexit
import gc
import linecache
import os
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import NoReturn

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.config import SCRATCH_VARIABLE, RunnerConfig
from agentrl_sandbox.runner.lockdown import Lockdown, has_own_users
from agentrl_sandbox.runner.memory import tasks_of_user
from agentrl_sandbox.runner.rootfs import SCRATCH, become_namespace_root

FILE_NAME = "<program>"
STARTED = b"R"
OUT_OF_MEMORY = b"M"
_STATUS_DESCRIPTOR = 200
_OPEN_FILES = 256
_NICENESS = 5  # so that spinning programs do not keep the server from ending them
_SPARE_MEMORY = 16 << 20  # bytes lent to report a MemoryError
_OTHER_TASKS = 256  # that the server's user may add after the start, where programs share it


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildLimits:
    """What is the same for every child of a zygote."""

    isolate: str
    first_user: int | None  # slot i has user first_user + i; None: programs keep the server's user
    lockdown: Lockdown
    address_space: int  # bytes
    max_processes: int
    scratch: str  # mount options
    scratch_bytes: int

    @classmethod
    def from_config(cls, config: RunnerConfig) -> ChildLimits:
        """Measured in the warm zygote: the limit on memory counts from what the interpreter has mapped already."""
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        size = config.scratch_mb << 20
        processes = config.max_processes
        if config.isolate == "none" and not has_own_users(config):  # the kernel counts all that this user has
            processes = tasks_of_user(os.geteuid()) + config.max_processes * config.workers + _OTHER_TASKS
        return cls(
            isolate=config.isolate,
            first_user=config.first_user if has_own_users(config) else None,
            lockdown=Lockdown(config),
            address_space=mapped + (config.memory_mb << 20),
            max_processes=processes,
            scratch=f"size={size},nr_inodes=16384,mode=700",
            scratch_bytes=size,
        )

    def user(self, slot: int) -> int | None:
        """The user of a slot's programs, where slots have users of their own."""
        return None if self.first_user is None else self.first_user + slot


def limit_children(limits: ChildLimits) -> None:
    """Set, once and in the zygote, what every child inherits and no zygote needs."""
    os.umask(0o022)
    kernel.no_new_privileges()
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_FSIZE, limits.scratch_bytes, limits.scratch_bytes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
        (resource.RLIMIT_AS, limits.address_space, limits.address_space + _SPARE_MEMORY),
    ):
        resource.setrlimit(kind, (soft, hard))


def run_child(limits: ChildLimits, slot: int, cpu_seconds: int, descriptors: list[int]) -> NoReturn:
    """Isolate this process, run the program, exit. Never returns, whatever the program does."""
    exit_code, leave = 70, os._exit  # the program may replace os._exit
    try:
        source = _take_descriptors(descriptors)
        directory = _isolate(limits, slot)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_NPROC, (limits.max_processes, limits.max_processes))
        limits.lockdown.close(directory)
        _close_other_descriptors()
        os.write(_STATUS_DESCRIPTOR, STARTED)
        exit_code = _run(source)
    except OSError as error:
        os.write(_STATUS_DESCRIPTOR, str(error).encode())
    finally:
        leave(exit_code)


def _take_descriptors(descriptors: list[int]) -> bytes:
    """Put standard streams and the status pipe in place and read the program.

    The memory file holds the program's length (8 bytes), the program, and what it reads from stdin.
    """
    program, stdout, stderr, status = descriptors
    os.dup2(program, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.dup2(status, _STATUS_DESCRIPTOR, inheritable=False)
    length = int.from_bytes(os.read(0, 8), "big")
    source = b""
    while len(source) < length:
        source += os.read(0, length - len(source))
    return source


def _close_other_descriptors() -> None:
    os.closerange(3, _STATUS_DESCRIPTOR)
    os.closerange(_STATUS_DESCRIPTOR + 1, 65_536)


def _isolate(limits: ChildLimits, slot: int) -> str:
    """Leave the zygote's namespaces and user; the scratch directory, where the process then is."""
    os.nice(_NICENESS)
    kernel.offer_to_oom_killer()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    user = limits.user(slot)
    if limits.isolate == "none":
        os.setsid()
        kernel.adopt_orphans()
        directory = f"{os.environ.pop(SCRATCH_VARIABLE)}/{slot}"
        os.environ["HOME"] = os.environ["TMPDIR"] = directory
    else:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        directory = SCRATCH
        owner = "" if user is None else f",uid={user},gid={user}"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("scratch", SCRATCH, "tmpfs", flags, limits.scratch + owner)
        kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    if limits.isolate == "user":
        os.chdir(directory)
        become_namespace_root()
        kernel.drop_capabilities()
    elif user is not None:
        kernel.become(user)
    os.chdir(directory)
    kernel.set_dumpable()
    kernel.die_with_parent(signal.SIGKILL)
    return directory


def _run(source: bytes) -> int:
    """Run the program as ``__main__`` and give its exit status, as the interpreter would."""
    if b"random" in source:
        _reseed()
    sys.path.insert(0, "")
    gc.enable()
    try:
        exit_code = _execute(source)
    except SystemExit as leaving:
        exit_code = _exit_status(leaving.code)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything, and that is its outcome
        exit_code = 1
        _report(error)
    return _finish(exit_code)


def _reseed() -> None:
    """Otherwise every program would draw what the zygote would have drawn."""
    sys.modules["random"].seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _execute(source: bytes) -> int:
    text = source.decode("utf-8", "surrogatepass")
    linecache.cache[FILE_NAME] = (len(text), None, text.splitlines(keepends=True), FILE_NAME)
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __file__=FILE_NAME)
    sys.modules["__main__"] = main
    code = compile(text, FILE_NAME, "exec", dont_inherit=True)
    exec(code, main.__dict__)
    return 0


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    """Write the traceback as Python does, beginning at the program's first frame."""
    if isinstance(error, MemoryError):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        _mark_out_of_memory()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, frames)
        return
    _print_traceback(error, frames)


def _print_traceback(error: BaseException, frames: TracebackType | None) -> None:
    try:
        traceback.print_exception(type(error), error, frames)
    except (MemoryError, RecursionError):
        os.write(2, f"{type(error).__name__}\n".encode())


def _mark_out_of_memory() -> None:
    try:
        os.write(_STATUS_DESCRIPTOR, OUT_OF_MEMORY)
    except OSError:
        return  # the program closed the descriptor: it is then an ordinary error


def _finish(exit_code: int) -> int:
    """What the interpreter does at its end: threads joined, atexit run, streams flushed."""
    threading = sys.modules.get("threading")
    try:
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException as error:  # noqa: BLE001 - these run the program's code too
        _report(error)
        return exit_code or 120
    return exit_code
