"""Finds the processes below a process and kills those that a program left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.isolation.memory_use import children

_KILL_SECONDS = 10.0  # for processes to end after SIGKILL
_PAUSE_SECONDS = 0.001


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


def kill_strays(keep: Collection[int], user: int | None = None) -> None:
    """Kill, and reap, every child of this process but ``keep``, and all that is below them.

    This process must adopt orphans: then all that an ended program left is its child. ``user`` is a slot's own user:
    all it has is killed at one stroke, so that nothing can fork away. Raises TimeoutError.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while strays := [pid for pid in children(os.getpid()) if pid not in keep]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(strays)} processes of a program did not end within {_KILL_SECONDS:g} s")
        if user is not None:
            run_helper(user, lambda: os.kill(-1, signal.SIGKILL))
        _end_trees(strays)
        gone = [os.waitpid(pid, os.WNOHANG)[0] for pid in strays]
        if not any(gone):
            time.sleep(_PAUSE_SECONDS)


def run_as(user: int | None, action: Callable[[], None]) -> int:
    """Fork a process that takes on a user (None: stays who it is) and acts; its number. The caller reaps it."""
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        if user is not None:
            kernel.become(user)
        with contextlib.suppress(ProcessLookupError):
            action()
        status = 0
    finally:
        os._exit(status)


def run_helper(user: int | None, action: Callable[[], None]) -> None:
    """``run_as``, and wait. Raises OSError where it failed."""
    _, status = os.waitpid(run_as(user, action), 0)
    if status != 0:
        raise OSError(f"a helper ended with status {os.waitstatus_to_exitcode(status)}")


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


def _end_trees(roots: Collection[int]) -> None:
    """Kill these processes and all below them.

    Whole process groups at a time, which the kernel does between two forks, and all are stopped before any is killed:
    stopped ones hold their places below RLIMIT_NPROC, so what multiplies, in groups of its own, comes to an end.
    """
    own, stopped = os.getpgid(0), set[int]()
    while found := _stop_below([*roots, *stopped], stopped, own):
        stopped |= found
    for pid in stopped:
        _signal(pid, signal.SIGKILL, own)


def _stop_below(roots: list[int], stopped: set[int], own: int) -> set[int]:
    """Stop what was not yet; each before its children are looked for."""
    found: set[int] = set()
    waiting, seen = roots, set[int]()
    while waiting:
        pid = waiting.pop()
        if pid in seen:
            continue
        seen.add(pid)
        if pid not in stopped:
            _signal(pid, signal.SIGSTOP, own)
            found.add(pid)
        waiting += children(pid)
    return found


def _signal(pid: int, number: int, own: int) -> None:
    """Signal a process with its group, unless that is still the ``own`` one."""
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(pid)
        if group == own:
            os.kill(pid, number)
        else:
            os.killpg(group, number)
