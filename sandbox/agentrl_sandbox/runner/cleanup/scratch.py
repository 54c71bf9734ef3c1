"""Without namespaces: removes the files that a program left in its scratch directory and in shared memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SHARED_MEMORY = "/dev/shm"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


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
