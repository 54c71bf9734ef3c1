"""Writes and reads files of a scratch directory, in the child, as the slot's user.

A program may have put anything there. Each path component is opened relative to the previous one, without following
links, so a path cannot leave the directory. Fetched files are opened without blocking and must be regular files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from agentrl_sandbox.runner.program.fetched import Fetched

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_files(scratch: str, source: int, files: Sequence[tuple[str, int]]) -> None:
    """Write (name, size) after (name, size) from the position of ``source``. Raises OSError."""
    for name, size in files:
        directory = _open_directory(scratch, name, make=True)
        try:
            target = os.open(name.split("/")[-1], _WRITE, 0o644, dir_fd=directory)
        finally:
            os.close(directory)
        try:
            if not stat.S_ISREG(os.fstat(target).st_mode):
                raise OSError(f"{name!r} is not a regular file")
            _copy(source, target, size)
        finally:
            os.close(target)


def fetch_files(scratch: str, names: Sequence[str], fetched: Fetched) -> None:
    """Copy those of ``names`` that are regular files and still fit into ``fetched``."""
    for index, name in enumerate(names):
        try:
            _fetch(scratch, name, index, fetched)
        except OSError:
            continue  # missing, a link, or unreadable: leave it out
    fetched.seal()


def _fetch(scratch: str, name: str, index: int, fetched: Fetched) -> None:
    directory = _open_directory(scratch, name, make=False)
    try:
        file = os.open(name.split("/")[-1], _READ, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode):
            fetched.add(index, file, status.st_size)
    finally:
        os.close(file)


def _open_directory(scratch: str, name: str, *, make: bool) -> int:
    """A descriptor of the directory that holds ``name``."""
    current = os.open(scratch, _DIRECTORY)
    for part in name.split("/")[:-1]:
        try:
            if make:
                _make_directory(part, current)
            deeper = os.open(part, _DIRECTORY, dir_fd=current)
        finally:
            os.close(current)
        current = deeper
    return current


def _make_directory(part: str, parent: int) -> None:
    try:
        os.mkdir(part, 0o755, dir_fd=parent)
    except FileExistsError:
        return  # opening it shows whether it is a directory


def _copy(source: int, target: int, size: int) -> None:
    while size > 0:
        sent = os.sendfile(target, source, None, size)
        if sent == 0:
            raise OSError("the file ended early")
        size -= sent
