"""Writes and reads files of a scratch directory, in the child, as the slot's user.

A program may have put anything there. Each path component is opened relative to the previous one, without following
links, so a path cannot leave the directory. Fetched files are opened without blocking and must be regular files.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence

from agentrl_sandbox.runner.program.fetched import Fetched

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_files(scratch: str, source: int, files: Sequence[tuple[str, int]]) -> None:
    """Write (name, size) after (name, size) from the position of ``source``. Raises OSError."""
    for name, size in files:
        with _opened(scratch, name, _WRITE, make=True) as target:
            if not stat.S_ISREG(os.fstat(target).st_mode):
                raise OSError(f"{name!r} is not a regular file")
            _copy(source, target, size)


def fetch_files(scratch: str, names: Sequence[str], fetched: Fetched) -> None:
    """Copy those of ``names`` that are regular files and still fit into ``fetched``."""
    for index, name in enumerate(names):
        # Missing files, links and what cannot be read are left out.
        with contextlib.suppress(OSError), _opened(scratch, name, _READ, make=False) as file:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode):
                fetched.add(index, file, status.st_size)
    fetched.seal()


@contextlib.contextmanager
def _opened(scratch: str, name: str, flags: int, *, make: bool) -> Iterator[int]:
    """A descriptor of a file; ``make`` creates the directories on its way."""
    *directories, last = name.split("/")
    current = os.open(scratch, _DIRECTORY)
    try:
        for part, how in (*((part, _DIRECTORY) for part in directories), (last, flags)):
            if make and how == _DIRECTORY:
                with contextlib.suppress(FileExistsError):  # opening it shows whether it is a directory
                    os.mkdir(part, 0o755, dir_fd=current)
            deeper = os.open(part, how, 0o644, dir_fd=current)
            os.close(current)
            current = deeper
        yield current
    finally:
        os.close(current)


def _copy(source: int, target: int, size: int) -> None:
    while size > 0:
        sent = os.sendfile(target, source, None, size)
        if sent == 0:
            raise OSError("the file ended early")
        size -= sent
