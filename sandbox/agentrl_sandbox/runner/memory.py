"""Resident memory of a program and all its processes.

RLIMIT_AS binds each process on its own; this watches their sum. Orphans are adopted by the program itself, the first
process of its PID namespace, so its tree is complete.
"""

from __future__ import annotations

import resource

_PAGE = resource.getpagesize()
_DEEPEST = 64


def resident_bytes(pid: int, beyond: int = 0, depth: int = 0) -> int:
    """Resident memory of a process tree, of each process what exceeds ``beyond``; 0 for one that is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            total = max(0, int(file.read().split()[1]) * _PAGE - beyond)
        if depth > _DEEPEST:
            return total
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = file.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return total + sum(resident_bytes(int(child), beyond, depth + 1) for child in children)
