"""Measurement of a program's memory, and of its files if the scratch directory is not a separate mount.

The program may change the directory during the measurement, so directories are opened one at a time and never through
links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# Memory and tasks of a program and all its processes.
#
# RLIMIT_AS limits each process, but not all processes together. A program adopts its orphans, as the first process of
# its PID namespace or as a subreaper, so its process tree is complete.
#
# Kernel memory of a program has no separate limit, and most hosts do not allow the sandbox to create a memory cgroup.
# Therefore page tables are measured, and buffers are counted at their full size. The system call filter (``seccomp``)
# prevents programs from enlarging buffers.

_PAGE = resource.getpagesize()
_MAX_PROCESSES = 8192  # twice the maximum of max_processes
_INTERPRETER_TABLE_BYTES = 1 << 20  # page tables of a warm interpreter at its start
_PIPE_BYTES = 16 * _PAGE  # capacity of a pipe
_MAPPING_BYTES = 256  # bytes of the kernel's record of a mapped range
_MAX_MAPPING_BYTES_READ = 256 << 10  # maximum size read from a list of mappings; ordinary programs have lists of 50 kB
_MAX_MAPPINGS = 65_530  # vm.max_map_count
# Bytes counted for a lock or a descriptor watched by epoll. Such a record takes 200 bytes. The higher count limits the
# length of the lists, because reading long lists would slow down the server.
_COUNTED_RECORD_BYTES = 16 << 10
_MAX_RECORD_BYTES_READ = 1 << 20  # maximum size read from one descriptor's list


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Resource usage of a process tree.

    ``resident`` and ``page_tables`` are bytes of memory. ``tasks`` counts processes and threads. ``resident`` is an
    upper bound: memory that processes share, as after a fork, counts once per process. Page tables are never shared,
    and for scattered mappings may be far larger than the mapped memory.
    """

    resident: int = 0
    page_tables: int = 0
    tasks: int = 0
    processes: list[int] = field(default_factory=list)

    def add(self, other: Usage) -> Usage:
        return Usage(
            resident=self.resident + other.resident,
            page_tables=self.page_tables + other.page_tables,
            tasks=self.tasks + other.tasks,
            processes=self.processes + other.processes,
        )


def measure_usage(pid: int, baseline: int = 0) -> Usage:
    """Measure a process tree. Counts the memory of each process above ``baseline`` bytes. Dead processes count as 0."""
    processes = process_tree(pid)
    result = [_resident_and_tables(process) for process in processes]
    return Usage(
        resident=sum(max(0, resident - baseline) for resident, _ in result),
        page_tables=sum(max(0, page_tables - _INTERPRETER_TABLE_BYTES) for _, page_tables in result),
        tasks=sum(len(task_ids(process)) for process in processes),
        processes=processes,
    )


def proportional_memory_bytes(processes: list[int], baseline: int) -> int:
    """Measure the memory of processes above ``baseline`` bytes each. Shared pages count once.

    The kernel divides a page among the processes that map it. The zygote and possibly other programs also map the
    interpreter's pages, so n processes account for at most n / (n + 1) of these pages.
    """
    total = sum(map(_proportional_set_size, processes))
    return total - baseline * len(processes) // (len(processes) + 1)


def _proportional_set_size(pid: int) -> int:
    """Return the proportional memory of a process, or its resident memory if the kernel does not report it."""
    for path in _proc_paths(pid, "smaps_rollup"):
        try:
            with open(path, encoding="ascii") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return resident_bytes(pid)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, or 0 if it has exited."""
    return _resident_and_tables(pid)[0]


def _resident_and_tables(pid: int) -> tuple[int, int]:
    for path in _proc_paths(pid, "status"):
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                result = {
                    line[:6]: int(line.split()[1]) << 10 for line in file if line.startswith(("VmRSS:", "VmPTE:"))
                }
        except (FileNotFoundError, ProcessLookupError):
            continue
        if result:
            return result.get("VmRSS:", 0), result.get("VmPTE:", 0)
    return 0, 0


def _proc_paths(pid: int, name: str) -> Iterator[str]:
    """Yield the paths of a process's file in /proc. After the main thread ends, only the task files have content."""
    yield f"/proc/{pid}/{name}"
    yield from (f"/proc/{pid}/task/{task}/{name}" for task in task_ids(pid))


@dataclass(kw_only=True, slots=True)
class ProgramMemoryQuota:
    """The memory left to a program after deducting the kernel memory that its processes may hold.

    Requires the rights of the processes' user, and counts only memory that is visible with these rights. Descriptors in
    flight between sockets are not counted. The kernel allows a user twice RLIMIT_NOFILE such descriptors.
    """

    bytes_left: int
    socket_bytes: int  # capacity of a socket's send buffer
    _counted: set[str] = field(default_factory=set)

    @property
    def is_exceeded(self) -> bool:
        return self.bytes_left < 0

    def add(self, processes: list[int]) -> None:
        for pid in processes:
            self._add_descriptors(pid)
            if len(processes) > 1:  # the records of one process take at most 16 MB
                self._add_mappings(pid)
            if self.is_exceeded:
                return

    def _add_descriptors(self, pid: int) -> None:
        for directory in _proc_paths(pid, "fd"):
            try:
                names = os.listdir(directory)
            except OSError:
                continue
            for name in names:
                try:
                    self._add_descriptor(f"{directory}/{name}", f"{directory}info/{name}")
                except OSError:  # closed meanwhile
                    continue
                if self.is_exceeded:
                    return
            if names:
                return

    def _add_descriptor(self, path: str, details: str) -> None:
        target = os.readlink(path)
        if target.startswith(("socket:", "pipe:")):
            if target not in self._counted:  # count shared sockets and pipes once
                self._counted.add(target)
                self.bytes_left -= self.socket_bytes if target.startswith("socket:") else _PIPE_BYTES
            return
        with open(details, "rb", buffering=0) as file:
            text = file.read(_MAX_RECORD_BYTES_READ)
        self.bytes_left -= _COUNTED_RECORD_BYTES * (text.count(b"\nlock:") + text.count(b"\ntfd:"))

    def _add_mappings(self, pid: int) -> None:
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                text = file.read(_MAX_MAPPING_BYTES_READ)
        except OSError:
            return
        count = _MAX_MAPPINGS if len(text) == _MAX_MAPPING_BYTES_READ else text.count(b"\n")
        self.bytes_left -= _MAPPING_BYTES * count


def child_pids(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    result: list[int] = []
    for task in task_ids(pid):
        try:
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                result += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return result


def process_tree(pid: int, visit: Callable[[int], None] = lambda process: None) -> list[int]:
    """Return a process and all its descendants. ``visit`` is called with each process before its children are listed.

    The list is bounded, because a program may fork as fast as it is scanned.
    """
    result = [pid]
    for process in result:  # the list grows during the iteration
        visit(process)
        if len(result) < _MAX_PROCESSES:
            result += child_pids(process)
    return result


def has_live_thread(pid: int) -> bool:
    """Return True if any thread of a process is running or stopped. The main thread may end before other threads."""
    for task in task_ids(pid):
        try:
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                    return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


def task_ids(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []


def count_user_tasks(user: int) -> int:
    """Return the number of a user's tasks that /proc lists."""
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                total += len(task_ids(int(name)))
        except FileNotFoundError:
            continue
    return total


INODES = 16_384
"""Maximum number of files and directories of a program."""

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OWNER_ACCESS = stat.S_IRUSR | stat.S_IXUSR
_BLOCK_BYTES = 512
_BLOCK_LIST_BYTES = 1 << 20  # bytes for the file system's block lists


class ScratchQuota:
    """The remaining bytes and inodes of a program. Counting stops when the quota is exceeded."""

    def __init__(self, *, bytes_left: int, inodes_left: int) -> None:
        self._bytes_left = bytes_left + _BLOCK_LIST_BYTES
        self._inodes_left = inodes_left
        self._multiply_linked: set[tuple[int, int]] = set()  # files with several names, whose bytes count once
        self._devices: set[int] = set()

    @property
    def is_exceeded(self) -> bool:
        return self._bytes_left < 0 or self._inodes_left < 0

    def count_tree(self, directory: str) -> None:
        """Count everything in a directory. Raises OSError if it does not exist."""
        # Stack of the open directories on the current path, each with its unvisited subdirectories.
        names: list[str] = []
        root = os.open(directory, _DIRECTORY_FLAGS)
        open_directories = [(root, names)]
        try:
            self._devices.add(os.fstat(root).st_dev)
            names += self._count_entries(root)
            while open_directories and not self.is_exceeded:
                here, names = open_directories[-1]
                if not names:
                    open_directories.pop()
                    os.close(here)
                elif (subdirectory := _open_subdirectory(here, names.pop())) is not None:
                    names = []
                    open_directories.append((subdirectory, names))
                    names += self._count_entries(subdirectory)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._inodes_left = -1  # no program needs such a deep tree
        finally:
            for here, _ in open_directories:
                os.close(here)

    def count_user_files(self, user: int, directory: str) -> None:
        """Count a user's files in a shared directory, if the directory exists."""
        with contextlib.suppress(FileNotFoundError):
            self._devices.add(os.stat(directory).st_dev)
        for _, status in user_files(user, directory):
            self._add(status)

    def count_unlinked_files(self, processes: list[int]) -> None:
        """Count unlinked files that processes keep open on the same file systems."""
        for pid in processes:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                        status = os.stat(f"/proc/{pid}/fd/{name}")
                        if status.st_nlink == 0 and status.st_dev in self._devices:
                            self._add(status)

    def _count_entries(self, directory: int) -> list[str]:
        """Count the entries of a directory. Returns the names of its subdirectories."""
        names: list[str] = []
        if os.fstat(directory).st_mode & _OWNER_ACCESS != _OWNER_ACCESS:
            os.fchmod(directory, 0o700)
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    self._add(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        names.append(entry.name)
                if self.is_exceeded:
                    break
        return names

    def _add(self, status: os.stat_result) -> None:
        self._inodes_left -= 1
        if stat.S_ISDIR(status.st_mode):  # only the number of directories counts, not their bytes
            return
        if status.st_nlink != 1:
            file = status.st_dev, status.st_ino
            if file in self._multiply_linked:
                return
            self._multiply_linked.add(file)
        self._bytes_left -= status.st_blocks * _BLOCK_BYTES


def user_files(user: int, directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the paths and stat results of a user's files in a shared directory, if the directory exists."""
    with contextlib.suppress(FileNotFoundError, PermissionError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # files of other users may disappear
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == user:
                    yield entry.path, status


def _open_subdirectory(parent: int, name: str) -> int | None:
    """Open a directory, even if it denies access to its owner. Returns None if the directory does not exist.

    Raises OSError if the directory cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            return os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
        except PermissionError:
            return _grant_access_and_open(parent, name)
    return None


def _grant_access_and_open(parent: int, name: str) -> int:
    """Grant the owner access through a path descriptor, which cannot be redirected, and open the directory."""
    here = os.open(name, os.O_PATH | _DIRECTORY_FLAGS, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{here}", 0o700)
        return os.open(f"/proc/self/fd/{here}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(here)
