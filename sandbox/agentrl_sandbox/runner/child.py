"""The forked child: its isolation layers (namespaces, Landlock, file system, lockdown), and how it runs the program."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from agentrl_sandbox.runner import interpreter, kernel, seccomp
from agentrl_sandbox.runner.config import SCRATCH_VARIABLE, RunnerConfig
from agentrl_sandbox.runner.files import ChildFetchWriter, fetch_files
from agentrl_sandbox.runner.usage import INODES, count_user_tasks

# Landlock restricts a process to given files and denies TCP ports, signals to other processes and abstract sockets.
#
# Paths are opened once, in the zygote. A child only adds the rules and enforces them. All rights that the kernel's
# Landlock supports are denied unless a rule grants them. Older kernels support fewer rights (``landlock_version``).

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same on all architectures
_VERSION = 1
_PATH_BENEATH = 1
_QUIET = 1  # keeps denials out of the host's audit log (ABI 7)

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, REMOVE_FILE, _MAKE_DIR, MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_PIPE, _MAKE_LINK = 1 << 10, 1 << 12
_REFER, TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15

READ_AND_EXECUTE_RIGHTS = EXECUTE | READ_FILE | READ_DIR
READ_ONLY_RIGHTS = READ_FILE | READ_DIR
_CHANGE_RIGHTS = (
    WRITE_FILE | TRUNCATE | _REMOVE_DIR | REMOVE_FILE | _MAKE_DIR | MAKE_FILE | _MAKE_PIPE | _MAKE_LINK | _REFER
)
SCRATCH_RIGHTS = READ_ONLY_RIGHTS | _CHANGE_RIGHTS
DEVICE_RIGHTS = READ_FILE | WRITE_FILE | TRUNCATE
SHARED_MEMORY_RIGHTS = READ_FILE | WRITE_FILE | TRUNCATE | MAKE_FILE | REMOVE_FILE
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | _IOCTL_DEVICE  # the rights that a rule on a file may grant

_FILES_BY_ABI = {1: (1 << 13) - 1, 2: _REFER, 3: TRUNCATE, 5: _IOCTL_DEVICE}
_TCP = 0b11  # bind and connect, ABI 4
_SCOPES = 0b11  # abstract Unix sockets and signals
SCOPES_SINCE = 6


class _RulesetAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scopes")]


class _PathBeneath(ctypes.Structure):
    _fields_ = [("rights", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """Return the Landlock version of this kernel, or 0."""
    return max(0, kernel.system_call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)))


class LandlockRules:
    """Rules shared by all children: readable files and devices, each with an open descriptor."""

    def __init__(self, version: int, rights: Iterable[tuple[str, int]]) -> None:
        self._files = sum(bits for since, bits in _FILES_BY_ABI.items() if since <= version)
        scoped = version >= SCOPES_SINCE
        self._attributes = _RulesetAttributes(self._files, _TCP if version >= 4 else 0, _SCOPES if scoped else 0)
        self._size = ctypes.sizeof(_RulesetAttributes) if scoped else 16 if version >= 4 else 8
        self._flags = _QUIET if version >= 7 else 0
        self._rules = [self._make_rule(path, bits) for path, bits in rights if os.path.exists(path)]

    def enforce(self, extra_rules: Iterable[tuple[str, int]]) -> None:
        """Apply these rules and ``extra_rules`` to this process and its children permanently.

        Raises OSError if a system call fails.
        """
        arguments = ctypes.byref(self._attributes), ctypes.c_size_t(self._size), ctypes.c_uint(0)
        ruleset = kernel.system_call_or_raise("landlock_create_ruleset", _CREATE, *arguments)
        opened_rules = [_PathBeneath(bits & self._files, os.open(path, os.O_PATH)) for path, bits in extra_rules]
        for rule in (*self._rules, *opened_rules):
            where = ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint(0)
            kernel.system_call_or_raise("landlock_add_rule", _ADD_RULE, *where)
        kernel.system_call_or_raise(
            "landlock_restrict_self", _RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(self._flags)
        )
        for descriptor in (ruleset, *(rule.parent for rule in opened_rules)):
            os.close(descriptor)

    def _make_rule(self, path: str, rights: int) -> _PathBeneath:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        supported = self._files if os.path.isdir(path) else self._files & _FILE_RIGHTS
        return _PathBeneath(rights & supported, descriptor)


# The file system of programs: the interpreter and the system's libraries, read-only, and a scratch directory.
#
# The server calls ``enter_namespaces`` once, before it starts other processes. ``/scratch`` is mounted later, in the
# mount namespace of the program.

SCRATCH = "/scratch"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
# /dev/zero is omitted, because the memory of its shared mappings is not counted.
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_LINKS = {"/tmp": SCRATCH, "/dev/shm": SCRATCH, "/dev/fd": "/proc/self/fd"}
_NEW_ROOT = "/tmp"  # hidden by the new root, in this mount namespace only


def enter_namespaces(readable_paths: Iterable[str]) -> None:
    """Move this process into new namespaces, with a root that contains only ``readable_paths`` and the system.

    The only network is an unconfigured loopback. Raises OSError if the kernel denies the namespaces.
    """
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    with contextlib.suppress(OSError):  # a kernel without cgroups has no cgroup namespace
        kernel.unshare(kernel.CLONE_NEWCGROUP)  # hides the host's paths in /proc/self/cgroup
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    sources = _open_mount_sources(readable_paths)
    kernel.mount("root", _NEW_ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path, (descriptor, is_directory) in sources.items():
        _bind_mount(descriptor, path, is_directory=is_directory)
        os.close(descriptor)
    _add_symlinks_to_new_root()
    for path in ("/proc", SCRATCH):
        os.mkdir(_NEW_ROOT + path)
    kernel.mount("proc", _NEW_ROOT + "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.chdir(_NEW_ROOT)
    kernel.make_current_directory_root()
    kernel.add_mount_attributes("/", kernel.MOUNT_ATTR_RDONLY, recursive=False)


def mount_proc(flags: int) -> None:
    """Mount /proc of this PID namespace, and hide the host kernel's command line."""
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    kernel.mount("/dev/null", "/proc/cmdline", None, kernel.MS_BIND)


def enter_user_namespace_as_root(extra_flags: int = 0) -> None:
    """Enter a new user namespace in which this process's user is root and the only user.

    ``extra_flags`` select further namespaces to enter.
    """
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | extra_flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def visible_files_and_devices(readable: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files and the devices visible to programs. No path is inside another path."""
    wanted = [path for path in _SYSTEM if not os.path.islink(path)]
    for path in readable:
        wanted += [os.path.abspath(path), os.path.realpath(path)]
    chosen: list[str] = []
    for path in sorted(set(wanted)):
        if os.path.isdir(path) and not any(path.startswith(parent + "/") for parent in chosen):
            chosen.append(path)
    chosen += [path for path in _SYSTEM_FILES if os.path.exists(path)]
    return chosen, [path for path in _DEVICES if os.path.exists(path)]


def _open_mount_sources(readable: Iterable[str]) -> dict[str, tuple[int, bool]]:
    """Open a descriptor for each path to mount, because the new root may cover the paths."""
    files, devices = visible_files_and_devices(readable)
    chosen = files + devices
    return {path: (os.open(path, os.O_PATH | os.O_CLOEXEC), os.path.isdir(path)) for path in chosen}


def _bind_mount(descriptor: int, path: str, *, is_directory: bool) -> None:
    target = _NEW_ROOT + path
    if is_directory:
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(f"/proc/self/fd/{descriptor}", target, None, kernel.MS_BIND | kernel.MS_REC)
    if path not in _DEVICES:
        attributes = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
        kernel.add_mount_attributes(target, attributes, recursive=True)


def _add_symlinks_to_new_root() -> None:
    for path in _SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), _NEW_ROOT + path)
    for path, target in _LINKS.items():
        if os.path.isdir(_NEW_ROOT + path):
            continue  # the path contains the interpreter, so it remains a read-only directory without other entries
        os.makedirs(os.path.dirname(_NEW_ROOT + path), exist_ok=True)
        os.symlink(target, _NEW_ROOT + path)


_SYSTEM_STATE = (
    "/proc/cpuinfo",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/version",
    "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu",
)
_SHARED_MEMORY = "/dev/shm"


class Lockdown:
    """The final restriction of a child, prepared once in the zygote."""

    def __init__(self, config: RunnerConfig) -> None:
        namespaces = config.isolate != "none"
        separate_user = has_separate_users(config)
        version = landlock_version()
        self._filter: seccomp.SeccompFilter | None = None
        if seccomp.seccomp_available():
            self._filter = seccomp.SeccompFilter(
                seccomp.build_seccomp_filter(platform.machine(), separate_user=separate_user or namespaces)
            )
        self._processes = "/proc" if namespaces else "/proc/self"
        self._rules: LandlockRules | None = None
        if version:
            files, devices = visible_files_and_devices(config.readable)
            rights = [(path, READ_AND_EXECUTE_RIGHTS) for path in files] + [(path, DEVICE_RIGHTS) for path in devices]
            if not namespaces:
                rights += [(path, READ_ONLY_RIGHTS) for path in _SYSTEM_STATE]
                rights += [(_SHARED_MEMORY, SHARED_MEMORY_RIGHTS)] if separate_user else []
            self._rules = LandlockRules(version, rights)

    def apply(self, scratch: str) -> None:
        """Restrict this process permanently, so that it can write only to ``scratch``. Raises OSError on failure."""
        if self._rules is not None:
            self._rules.enforce(((scratch, SCRATCH_RIGHTS), (self._processes, READ_ONLY_RIGHTS)))
        if self._filter is not None:
            self._filter.install()


def has_separate_users(config: RunnerConfig) -> bool:
    """Return True if every slot has a separate user."""
    return config.isolate != "user" and kernel.can_change_user()


def programs_can_signal_init(config: RunnerConfig) -> bool:
    """Return True if programs can signal other processes of their user, including the init process of their session."""
    return config.isolate == "none" and landlock_version() < SCOPES_SINCE


def detect_available_layers(config: RunnerConfig) -> dict[str, int]:
    """Return the layers available here: the version of Landlock, and 1 or 0 for each other layer."""
    return {
        "landlock": landlock_version(),
        "seccomp": int(seccomp.seccomp_available()),
        "separate_users": int(has_separate_users(config)),
    }


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
    seeders: tuple[Callable[[], None], ...]  # functions that reseed the interpreter's random generators

    @classmethod
    def derive_in_zygote(cls, config: RunnerConfig, seeders: tuple[Callable[[], None], ...]) -> ChildLimits:
        """Derive the limits in the warm zygote. The memory limit is added to the memory mapped by the interpreter."""
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        size = config.scratch_mb << 20
        processes = config.max_processes
        if config.isolate == "none" and not has_separate_users(config):  # the kernel counts all tasks of this user
            processes = count_user_tasks(os.geteuid()) + config.max_processes * config.slots + _OTHER_TASKS
        return cls(
            isolate=config.isolate,
            first_user=config.first_user if has_separate_users(config) else None,
            lockdown=Lockdown(config),
            address_space=mapped + (config.memory_mb << 20),
            max_processes=processes,
            scratch=f"size={size},nr_inodes={INODES},mode=700",
            scratch_bytes=size,
            seeders=seeders,
        )

    def user_of_slot(self, slot: int) -> int | None:
        """Return the user id of a slot's programs, or None if they run as the server's user."""
        return None if self.first_user is None else self.first_user + slot

    def reseed_generators(self) -> None:
        """Reseed the random generators. Otherwise all programs would draw the same numbers."""
        for seed in self.seeders:
            seed()


def set_limits_of_children(limits: ChildLimits) -> None:
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
    exit_code, exit_process, write = 70, os._exit, os.write  # programs may replace them
    try:
        _install_descriptors(descriptors)
        scratch, pid = isolate_child(limits, slot), os.getpid()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_NPROC, (limits.max_processes, limits.max_processes))
        limits.lockdown.apply(scratch)
        close_other_descriptors(_STATUS_DESCRIPTOR, *([_FETCHED_DESCRIPTOR] if len(descriptors) > 4 else []))
        limits.reseed_generators()
        os.write(_STATUS_DESCRIPTOR, STARTED)  # later failures are failures of the program
        exit_code, memory_mark, names = _receive_and_run_program(scratch)
        if names and os.getpid() == pid:  # false in a forked child of the program, which also returns here
            _write_fetch_file(scratch, names)
        if os.getpid() == pid:
            with contextlib.suppress(OSError):  # if the program closed the pipe, the outcome is an ordinary error
                write(_STATUS_DESCRIPTOR, memory_mark)
    except OSError as error:
        os.write(_STATUS_DESCRIPTOR, str(error).encode())
    finally:
        exit_process(exit_code)


def _install_descriptors(descriptors: list[int]) -> None:
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


def isolate_child(limits: ChildLimits, slot: int) -> str:
    """Leave the zygote's namespaces and user, and enter the scratch directory. Returns its path."""
    os.nice(_NICENESS)
    kernel.prefer_for_oom_kill()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    user = limits.user_of_slot(slot)
    if limits.isolate == "none":
        os.setsid()
        kernel.adopt_orphans(needed=user is None)
        directory = f"{os.environ.pop(SCRATCH_VARIABLE)}/{slot}"
        os.environ["HOME"] = os.environ["TMPDIR"] = directory
    else:
        # Use a separate process group, because signals to a process group cross PID namespaces. Do not create a new
        # session, because a session would receive a separate share of CPU time.
        os.setpgid(0, 0)
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        directory = SCRATCH
        owner = "" if user is None else f",uid={user},gid={user}"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("scratch", SCRATCH, "tmpfs", flags, limits.scratch + owner)
        mount_proc(flags)
    if limits.isolate == "user":
        os.chdir(directory)
        enter_user_namespace_as_root()
        kernel.drop_capabilities()
    elif user is not None:
        kernel.switch_user(user)
    os.chdir(directory)
    kernel.set_dumpable()
    kernel.die_with_parent(signal.SIGKILL)
    return directory


def _receive_and_run_program(scratch: str) -> tuple[int, bytes, tuple[str, ...]]:
    """Run the program as ``__main__``. Returns its exit status, a mark for the status pipe, and the files to fetch.

    Only this mark counts. Marks of other processes, such as a fork that ran out of memory, are ignored.
    """
    sys.path.insert(0, "")
    gc.enable()
    marks: list[bytes] = []

    def on_out_of_memory() -> None:
        marks.append(OUT_OF_MEMORY)

    task = interpreter.receive_task(scratch, on_out_of_memory)
    if task is None:
        return interpreter.UNCAUGHT, b"".join(marks), ()
    exit_code = interpreter.run_program(task, FILE_NAME, interpreter.install_main_module(), on_out_of_memory)
    exit_code = interpreter.finish_program(exit_code, on_out_of_memory, run_exit_functions=True)
    return exit_code, b"".join(marks[:1]), task.fetch


def _write_fetch_file(scratch: str, names: tuple[str, ...]) -> None:
    """Write the fetch file. Ignores all errors, because the program may have broken the interpreter."""
    with contextlib.suppress(BaseException):
        fetch_files(scratch, names, ChildFetchWriter(_FETCHED_DESCRIPTOR, names))
