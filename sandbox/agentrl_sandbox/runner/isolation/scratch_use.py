"""Measures a program's files in a scratch directory that has no mount of its own.

The program may change it meanwhile, so directories are opened one by one and never through links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

INODES = 16_384
"""The number of files and directories that a program may have."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SEEN = stat.S_IRUSR | stat.S_IXUSR
_BLOCK = 512
_SPARE = 1 << 20  # bytes for the file system's own block lists


class ScratchUse:
    """The rest of a program's quota. Counting stops when it is used up."""

    def __init__(self, *, bytes_left: int, inodes_left: int) -> None:
        self._bytes_left = bytes_left + _SPARE
        self._inodes_left = inodes_left
        self._linked: set[tuple[int, int]] = set()  # files of several names, whose bytes count once
        self._devices: set[int] = set()

    @property
    def is_over(self) -> bool:
        return self._bytes_left < 0 or self._inodes_left < 0

    def add_tree(self, directory: str) -> None:
        """Count everything in a directory. Raises OSError if it does not exist."""
        way = [(os.open(directory, _DIRECTORY), [""])]  # the path to here, each with its unvisited subdirectories
        try:
            self._devices.add(os.fstat(way[0][0]).st_dev)
            way[0] = way[0][0], self._add_entries(way[0][0])
            while way and not self.is_over:
                here, names = way[-1]
                if not names:
                    way.pop()
                    os.close(here)
                elif (deeper := _enter(here, names.pop())) is not None:
                    way.append((deeper, []))
                    way[-1] = deeper, self._add_entries(deeper)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._inodes_left = -1  # no program needs so deep a tree
        finally:
            for here, _ in way:
                os.close(here)

    def add_files_of(self, user: int, directory: str) -> None:
        """Count a user's files in a shared directory, if that exists."""
        with contextlib.suppress(FileNotFoundError):
            self._devices.add(os.stat(directory).st_dev)
        for _, status in files_of(user, directory):
            self._add(status)

    def add_unlinked(self, processes: list[int]) -> None:
        """Count unlinked files that processes hold open, on the same file systems."""
        for pid in processes:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                        status = os.stat(f"/proc/{pid}/fd/{name}")
                        if status.st_nlink == 0 and status.st_dev in self._devices:
                            self._add(status)

    def _add_entries(self, directory: int) -> list[str]:
        """Count the entries of a directory; return the names of its subdirectories."""
        names: list[str] = []
        if os.fstat(directory).st_mode & _SEEN != _SEEN:
            os.fchmod(directory, 0o700)
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    self._add(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        names.append(entry.name)
                if self.is_over:
                    break
        return names

    def _add(self, status: os.stat_result) -> None:
        self._inodes_left -= 1
        if stat.S_ISDIR(status.st_mode):  # only the number of directories counts, not their bytes
            return
        if status.st_nlink != 1:
            file = status.st_dev, status.st_ino
            if file in self._linked:
                return
            self._linked.add(file)
        self._bytes_left -= status.st_blocks * _BLOCK


def files_of(user: int, directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """The paths and states of a user's files in a shared directory, if that exists."""
    with contextlib.suppress(FileNotFoundError, PermissionError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # files of others come and go
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == user:
                    yield entry.path, status


def _enter(parent: int, name: str) -> int | None:
    """Open a directory, even one that denies access to its owner; None if it is gone. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            return os.open(name, _DIRECTORY, dir_fd=parent)
        except PermissionError:
            return _force(parent, name)
    return None


def _force(parent: int, name: str) -> int:
    """Grant the owner access through a path descriptor, which cannot be redirected, and open the directory."""
    here = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{here}", 0o700)
        return os.open(f"/proc/self/fd/{here}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(here)
