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


def kill_strays(keep: Collection[int], user: int | None = None) -> None:
    """Kill and reap every child of this process except ``keep``, with all descendants.

    This process must adopt orphans, so that all leftover processes are its children. If a slot has its own ``user``,
    all of its processes are killed at once, so that none can escape by forking. Raises TimeoutError.
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
    """Run ``action`` in a forked process as ``user`` (None: unchanged). Returns its PID; the caller reaps it."""
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
    """``run_as``, and wait for it. Raises OSError if it failed."""
    _, status = os.waitpid(run_as(user, action), 0)
    if status != 0:
        raise OSError(f"a helper ended with status {os.waitstatus_to_exitcode(status)}")


def _end_trees(roots: Collection[int]) -> None:
    """Kill these processes and all their descendants.

    It signals whole process groups, which the kernel does atomically between forks, and stops all processes before it
    kills any. Stopped processes still count against RLIMIT_NPROC, so a fork bomb in groups of its own is exhausted.
    """
    own, stopped = os.getpgid(0), set[int]()
    while found := _stop_below([*roots, *stopped], stopped, own):
        stopped |= found
    for pid in stopped:
        _signal(pid, signal.SIGKILL, own)


def _stop_below(roots: list[int], stopped: set[int], own: int) -> set[int]:
    """Stop all running processes below ``roots``, each before its children are listed."""
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
