"""Without namespaces: removes the files that a program left in its scratch directory and in shared memory."""

from __future__ import annotations

import contextlib
import os

from agentrl_sandbox.runner.isolation.scratch_use import files_of

SHARED_MEMORY = "/dev/shm"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def is_clean(scratch: str, user: int | None) -> bool:
    """Whether a program left no files in its scratch directory or, if it has its own user, in shared memory."""
    with os.scandir(scratch) as entries:
        if any(entries):
            return False
    return user is None or next(files_of(user, SHARED_MEMORY), None) is None


def clean(scratch: str, user: int | None) -> None:
    """Remove all files of a program. Call it as the program's user, once no process of it is left."""
    empty(scratch)
    if user is not None:
        for path, _ in list(files_of(user, SHARED_MEMORY)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def empty(directory: str) -> None:
    """Remove everything in a directory, at any depth and with any permissions.

    It moves down and up one step at a time, so paths, open files and the stack do not grow with the depth.
    """
    here = os.open(directory, _DIRECTORY)
    way: list[str] = []  # the path from the directory to here
    waiting = [_unlink_files(here)]  # for each directory on the way, its remaining subdirectories
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
    there = os.open(name, _DIRECTORY, dir_fd=here)
    os.close(here)
    return there


def _unlink_files(directory: int) -> list[str]:
    """Remove everything except directories; return their names."""
    directories: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=directory)
    return directories
