"""Measures the memory and tasks of a program and all its processes.

RLIMIT_AS bounds each process; this measures their sum. A program adopts its own orphans, as the first process of its
PID namespace or as a subreaper, so its process tree is complete.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field

_PAGE = resource.getpagesize()
_MOST_PROCESSES = 8192  # twice what max_processes may be


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of a process tree: bytes of resident memory, tasks (processes and threads), and its processes.

    Memory that processes share, as after a fork, counts once per process in ``resident``: it is an upper bound.
    """

    resident: int = 0
    tasks: int = 0
    processes: list[int] = field(default_factory=list)

    def add(self, other: Usage) -> Usage:
        return Usage(
            resident=self.resident + other.resident,
            tasks=self.tasks + other.tasks,
            processes=self.processes + other.processes,
        )


def usage(pid: int, beyond: int = 0) -> Usage:
    """The usage of a process tree, counting of each process only memory above ``beyond``. Dead processes count as 0."""
    processes = tree(pid)
    resident = sum(max(0, resident_bytes(process) - beyond) for process in processes)
    return Usage(resident=resident, tasks=sum(len(tasks(process)) for process in processes), processes=processes)


def proportional_bytes(processes: list[int], beyond: int) -> int:
    """Memory of processes, counting shared pages once, beyond the ``beyond`` bytes they started with.

    The kernel divides a page among the processes that map it. The zygote and possibly other programs also map the
    interpreter's own pages, so the n processes have at most n of n + 1 parts of them.
    """
    total = sum(map(_proportional, processes))
    return total - beyond * len(processes) // (len(processes) + 1)


def _proportional(pid: int) -> int:
    """One process's proportional memory, or its resident memory if the kernel shows no more."""
    for path in (f"/proc/{pid}/smaps_rollup", *(f"/proc/{pid}/task/{task}/smaps_rollup" for task in tasks(pid))):
        try:
            with open(path, encoding="ascii") as file:
                return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return resident_bytes(pid)


def resident_bytes(pid: int) -> int:
    """Resident memory of one process; 0 for one that is gone."""
    found = _resident(f"/proc/{pid}/statm")
    if found == 0:  # if its first thread ended before the others, that one shows nothing
        found = max((_resident(f"/proc/{pid}/task/{task}/statm") for task in tasks(pid)), default=0)
    return found


def _resident(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def children(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    found: list[int] = []
    for task in tasks(pid):
        try:
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def tree(pid: int, visit: Callable[[int], None] = lambda process: None) -> list[int]:
    """A process and all its descendants. ``visit`` is called with each before its children are listed.

    A program may fork as fast as it is looked at, so the list is bounded.
    """
    found = [pid]
    for process in found:  # which grows meanwhile
        visit(process)
        if len(found) < _MOST_PROCESSES:
            found += children(process)
    return found


def is_alive(pid: int) -> bool:
    """Whether any thread of a process still runs or is stopped; the first one may have ended before the others."""
    for task in tasks(pid):
        try:
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                    return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


def tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []


def tasks_of_user(user: int) -> int:
    """The number of tasks of a user on this host, as far as /proc shows them."""
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                total += len(tasks(int(name)))
        except FileNotFoundError:
            continue
    return total
