"""Without namespaces: ends every process that a program left behind, and removes every file."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import stat
import time
from collections.abc import Callable, Collection

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.memory import children

SHARED_MEMORY = "/dev/shm"
_PATIENCE_SECONDS = 10.0  # for processes to end that were sent SIGKILL
_PAUSE_SECONDS = 0.001


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
        for pid in strays:
            _kill_tree(pid)
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
    return user is None or not _shared_memory_of(user)


def clean(scratch: str, user: int | None) -> None:
    """Remove all that a program left. To be called as the program's user, when it has no process any more."""
    empty(scratch)
    if user is not None:
        for path in _shared_memory_of(user):
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

    Deep trees are flattened, so neither paths nor open files nor the stack grow with the depth.
    """
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    numbers = itertools.count()
    try:
        while names := os.listdir(top):
            for name in names:
                _remove(top, name, numbers)
    finally:
        os.close(top)


def _remove(top: int, name: str, numbers: itertools.count[int]) -> None:
    """Remove an entry of the directory ``top``; move what lies two levels below it up, to be removed later."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
        os.unlink(name, dir_fd=top)
        return
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for below in os.listdir(inner):
            if stat.S_ISDIR(os.lstat(below, dir_fd=inner).st_mode):
                os.chmod(below, 0o700, dir_fd=inner)
                os.rename(below, _unused(top, numbers), src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(below, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)


def _unused(top: int, numbers: itertools.count[int]) -> str:
    """A name that the directory does not have yet."""
    for number in numbers:
        name = f"moved-{number}"
        try:
            os.lstat(name, dir_fd=top)
        except FileNotFoundError:
            return name
    raise AssertionError("there is always another number")


def _shared_memory_of(user: int) -> list[str]:
    try:
        with os.scandir(SHARED_MEMORY) as entries:
            return [entry.path for entry in entries if entry.stat(follow_symlinks=False).st_uid == user]
    except FileNotFoundError:  # no such directory here, or an entry that just went
        return []


def _kill_tree(pid: int) -> None:
    for child in children(pid):
        _kill_tree(child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
