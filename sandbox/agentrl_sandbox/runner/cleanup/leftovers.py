"""Without namespaces: ends every process that a program left behind, and removes every file."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.isolation.memory_use import children

SHARED_MEMORY = "/dev/shm"
_PATIENCE_SECONDS = 10.0  # for processes to end that were sent SIGKILL
_PAUSE_SECONDS = 0.001
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def kill_strays(keep: Collection[int], user: int | None = None) -> None:
    """Kill, and reap, every child of this process but ``keep``, and all that is below them.

    This process must adopt orphans: then all that an ended program left is its child. ``user`` is a slot's own user:
    all it has is killed at one stroke, so that nothing can fork away. Raises TimeoutError.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while strays := [pid for pid in children(os.getpid()) if pid not in keep]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(strays)} processes of a program did not end within {_PATIENCE_SECONDS:g} s")
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


def is_clean(scratch: str, user: int | None) -> bool:
    """Whether a program left no file in its scratch directory, nor, as a user of its own, in shared memory."""
    with os.scandir(scratch) as entries:
        if any(entries):
            return False
    return user is None or next(_shared_memory_of(user), None) is None


def clean(scratch: str, user: int | None) -> None:
    """Remove all that a program left. To be called as the program's user, when it has no process any more."""
    empty(scratch)
    if user is not None:
        for path in list(_shared_memory_of(user)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def bury(scratch: str, users: Callable[[int], int | None]) -> None:
    """The end of a server: kill all that is left and remove the directory of all slots. ``users`` gives a slot's."""
    kill_strays(())
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(scratch):
            directory, user = f"{scratch}/{name}", users(int(name))
            if not is_clean(directory, user):
                run_helper(user, functools.partial(clean, directory, user))
            os.rmdir(directory)
        os.rmdir(scratch)


def empty(directory: str) -> None:
    """Remove everything in a directory, however deep, and whatever rights the owner took from itself.

    It walks down and up one step at a time, so neither paths nor open files nor the stack grow with the depth.
    """
    here = os.open(directory, _DIRECTORY)
    way: list[str] = []  # the names from the directory to here
    waiting = [_unlink_files(here)]  # for each directory on the way the directories in it that are still there
    while way or waiting[-1]:
        if waiting[-1]:
            name = waiting[-1].pop()
            os.chmod(name, 0o700, dir_fd=here)
            here = _go(here, name)
            way.append(name)
            waiting.append(_unlink_files(here))
        else:
            here = _go(here, "..")
            waiting.pop()
            os.rmdir(way.pop(), dir_fd=here)
    os.close(here)


def _go(here: int, name: str) -> int:
    """Open a directory next to this one, and close this one."""
    there = os.open(name, _DIRECTORY, dir_fd=here)
    os.close(here)
    return there


def _unlink_files(directory: int) -> list[str]:
    """Remove all but directories; the names of these."""
    directories: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=directory)
    return directories


def _shared_memory_of(user: int) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # others' come and go
                if entry.stat(follow_symlinks=False).st_uid == user:
                    yield entry.path


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
