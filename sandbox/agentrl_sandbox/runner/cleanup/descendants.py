"""Who descends from whom, read from /proc."""

from __future__ import annotations

import os


def parents_below(ancestor: int) -> dict[int, int]:
    """The parent of every living process that descends from ``ancestor``."""
    parents = dict(_read_parents())
    return {pid: parents[pid] for pid in processes_below(ancestor, parents)}


def processes_below(ancestor: int, parents: dict[int, int]) -> set[int]:
    """The descendants of ``ancestor``, given everyone's parent."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    below: set[int] = set()
    reached = list(children.get(ancestor, ()))
    while reached:
        pid = reached.pop()
        below.add(pid)
        reached += children.get(pid, ())
    return below


def _read_parents() -> list[tuple[int, int]]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != b"Z":
            found.append((int(name), int(parent)))
    return found
