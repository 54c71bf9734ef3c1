"""The forked child, which isolates itself and then runs the program."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from agentrl_sandbox.runner import interpreter, kernel
from agentrl_sandbox.runner.config import SCRATCH_VARIABLE, RunnerConfig
from agentrl_sandbox.runner.files import Fetched, fetch_files
from agentrl_sandbox.runner.isolation import SCRATCH, Lockdown, become_namespace_root, has_separate_users, mount_proc
from agentrl_sandbox.runner.usage import INODES, tasks_of_user

FILE_NAME = "<program>"
STARTED = b"R"
OUT_OF_MEMORY = b"M"
_STATUS_DESCRIPTOR = 200
_FETCHED_DESCRIPTOR = 201
_OPEN_FILES = 256
_QUEUED_SIGNALS = 256  # also bounds timers; the kernel would allow 100,000
_NICENESS = 5  # so that busy programs cannot delay the server
_SPARE_MEMORY = 16 << 20  # extra bytes for reporting a MemoryError
_OTHER_TASKS = 256  # tasks that the server's user may add later, if programs share this user


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildLimits:
    """Limits shared by all children of a zygote."""

    isolate: str
    first_user: int | None  # slot i has user first_user + i; None: programs keep the server's user
    lockdown: Lockdown
    address_space: int  # bytes
    max_processes: int
    scratch: str  # mount options
    scratch_bytes: int
    generators: tuple[Callable[[], None], ...]  # functions that reseed the interpreter's random generators

    @classmethod
    def from_config(cls, config: RunnerConfig, generators: tuple[Callable[[], None], ...]) -> ChildLimits:
        """Derive the limits in the warm zygote. The memory limit is added to the memory mapped by the interpreter."""
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        size = config.scratch_mb << 20
        processes = config.max_processes
        if config.isolate == "none" and not has_separate_users(config):  # the kernel counts all tasks of this user
            processes = tasks_of_user(os.geteuid()) + config.max_processes * config.slots + _OTHER_TASKS
        return cls(
            isolate=config.isolate,
            first_user=config.first_user if has_separate_users(config) else None,
            lockdown=Lockdown(config),
            address_space=mapped + (config.memory_mb << 20),
            max_processes=processes,
            scratch=f"size={size},nr_inodes={INODES},mode=700",
            scratch_bytes=size,
            generators=generators,
        )

    def user(self, slot: int) -> int | None:
        """Return the user id of a slot's programs, or None if they run as the server's user."""
        return None if self.first_user is None else self.first_user + slot

    def reseed(self) -> None:
        """Reseed the random generators. Otherwise all programs would draw the same numbers."""
        for seed in self.generators:
            seed()


def limit_children(limits: ChildLimits) -> None:
    """Set the limits that all children inherit. Call it once, in the zygote."""
    os.umask(0o022)
    kernel.no_new_privileges()
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_FSIZE, limits.scratch_bytes, limits.scratch_bytes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
        (resource.RLIMIT_SIGPENDING, _QUEUED_SIGNALS, _QUEUED_SIGNALS),
        (resource.RLIMIT_AS, limits.address_space, limits.address_space + _SPARE_MEMORY),
    ):
        resource.setrlimit(kind, (soft, hard))


def run_child(limits: ChildLimits, slot: int, cpu_seconds: int, descriptors: list[int]) -> NoReturn:
    """Isolate this process, run the program, and exit. Never returns, whatever the program does."""
    exit_code, leave, write = 70, os._exit, os.write  # programs may replace them
    try:
        _take_descriptors(descriptors)
        scratch, pid = isolate(limits, slot), os.getpid()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_NPROC, (limits.max_processes, limits.max_processes))
        limits.lockdown.close(scratch)
        close_other_descriptors(_STATUS_DESCRIPTOR, *([_FETCHED_DESCRIPTOR] if len(descriptors) > 4 else []))
        limits.reseed()
        os.write(_STATUS_DESCRIPTOR, STARTED)  # later failures are failures of the program
        exit_code, mark, names = _run(scratch)
        if names and os.getpid() == pid:  # false in a forked child of the program, which also returns here
            _fetch(scratch, names)
        if os.getpid() == pid:
            with contextlib.suppress(OSError):  # if the program closed it, the outcome is an ordinary error
                write(_STATUS_DESCRIPTOR, mark)
    except OSError as error:
        os.write(_STATUS_DESCRIPTOR, str(error).encode())
    finally:
        leave(exit_code)


def _take_descriptors(descriptors: list[int]) -> None:
    """Install the standard streams, the status pipe and the fetch file."""
    program, stdout, stderr, status, *fetched = descriptors
    os.dup2(program, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.dup2(status, _STATUS_DESCRIPTOR, inheritable=False)
    if fetched:
        os.dup2(fetched[0], _FETCHED_DESCRIPTOR, inheritable=False)


def close_other_descriptors(*kept: int) -> None:
    """Close all descriptors except the standard streams and ``kept``, in ascending order."""
    first = 3
    for descriptor in kept:
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 65_536)


def isolate(limits: ChildLimits, slot: int) -> str:
    """Leave the zygote's namespaces and user, and enter the scratch directory. Returns its path."""
    os.nice(_NICENESS)
    kernel.offer_to_oom_killer()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    user = limits.user(slot)
    if limits.isolate == "none":
        os.setsid()
        kernel.adopt_orphans(needed=user is None)
        directory = f"{os.environ.pop(SCRATCH_VARIABLE)}/{slot}"
        os.environ["HOME"] = os.environ["TMPDIR"] = directory
    else:
        # A separate group, because signals to a process group cross PID namespaces. Not a new session, because it
        # would receive a separate share of CPU time.
        os.setpgid(0, 0)
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        directory = SCRATCH
        owner = "" if user is None else f",uid={user},gid={user}"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("scratch", SCRATCH, "tmpfs", flags, limits.scratch + owner)
        mount_proc(flags)
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


def _run(scratch: str) -> tuple[int, bytes, tuple[str, ...]]:
    """Run the program as ``__main__``. Returns its exit status, the mark for the status pipe, and names to fetch.

    Only this mark counts. Marks of other processes, such as a fork that ran out of memory, are ignored.
    """
    sys.path.insert(0, "")
    gc.enable()
    marks: list[bytes] = []

    def on_out_of_memory() -> None:
        marks.append(OUT_OF_MEMORY)

    task = interpreter.take_task(scratch, on_out_of_memory)
    if task is None:
        return interpreter.UNCAUGHT, b"".join(marks), ()
    exit_code = interpreter.run(task, FILE_NAME, interpreter.make_main_module(), on_out_of_memory)
    exit_code = interpreter.finish(exit_code, on_out_of_memory, leaves=True)
    return exit_code, b"".join(marks[:1]), task.fetch


def _fetch(scratch: str, names: tuple[str, ...]) -> None:
    """Fetch files. Ignores all errors, because the program may have broken the interpreter."""
    with contextlib.suppress(BaseException):
        fetch_files(scratch, names, Fetched(_FETCHED_DESCRIPTOR, names))
