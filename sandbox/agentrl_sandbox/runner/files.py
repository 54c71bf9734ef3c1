"""Files in a scratch directory, written and read by the child as the slot's user.

The contents of the directory are untrusted. Each path component is opened relative to the previous component, without
following links, so a path cannot leave the directory. Fetched files are opened without blocking and must be regular.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Sequence

# The fetch file is a memory file that returns fetched files. It cannot grow, and its contents are untrusted.
#
# The fetch file contains the length of the rest (8 bytes), then for each file its index in the requested names (4
# bytes), its size (8 bytes) and its content. The length is written last, and until then no file counts as fetched.

_LENGTH = struct.Struct("!Q")
_RECORD = struct.Struct("!IQ")
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # forbid further seals, shrinking and growing


def create_fetch_file(limit: int, names: Sequence[str]) -> int:
    """Create a fetch file for at most ``limit`` bytes of content. Memory is allocated on write."""
    file = os.memfd_create("files", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, _LENGTH.size + len(names) * _RECORD.size + limit)
    fcntl.fcntl(file, _F_ADD_SEALS, _SEALS)
    return file


def read_fetch_file(file: int, names: Sequence[str]) -> dict[str, bytes]:
    """Read the files that the child wrote, up to the first invalid record."""
    room = os.fstat(file).st_size - _LENGTH.size
    (length,) = _LENGTH.unpack(os.pread(file, _LENGTH.size, 0))
    data = os.pread(file, min(length, room), _LENGTH.size)
    found: dict[str, bytes] = {}
    position = 0
    while len(data) - position >= _RECORD.size:
        index, size = _RECORD.unpack_from(data, position)
        position += _RECORD.size
        if index >= len(names) or size > len(data) - position:
            break
        found[names[index]] = data[position : position + size]
        position += size
    return found


class ChildFetchWriter:
    """Writes files into the fetch file, in the child."""

    def __init__(self, file: int, names: Sequence[str]) -> None:
        self._file = file
        self._bytes_left = os.fstat(file).st_size - _LENGTH.size - len(names) * _RECORD.size
        self._end = _LENGTH.size

    def add(self, index: int, source: int, size: int) -> None:
        """Append a file of ``size`` bytes if it fits completely. After an OSError, nothing is appended."""
        if size > self._bytes_left:
            return
        os.lseek(self._file, self._end + _RECORD.size, os.SEEK_SET)
        left = size
        while left > 0:
            sent = os.sendfile(self._file, source, None, left)
            if sent == 0:
                break
            left -= sent
        size -= left  # the file was truncated while it was read
        os.pwrite(self._file, _RECORD.pack(index, size), self._end)
        self._end += _RECORD.size + size
        self._bytes_left -= size

    def write_length(self) -> None:
        """Write the length. Until then, the file counts as empty."""
        os.pwrite(self._file, _LENGTH.pack(self._end - _LENGTH.size), 0)


_DIRECTORY_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_files(scratch: str, source: int, files: Sequence[tuple[str, int]]) -> None:
    """Write files with these names and sizes, in order, from the current position of ``source``.

    Raises OSError if a file cannot be written.
    """
    for name, size in files:
        with _open_inside(scratch, name, _WRITE_FLAGS, make=True) as target:
            if not stat.S_ISREG(os.fstat(target).st_mode):
                raise OSError(f"{name!r} is not a regular file")
            _copy_bytes(source, target, size)


def fetch_files(scratch: str, names: Sequence[str], fetched: ChildFetchWriter) -> None:
    """Copy the regular files in ``names`` into ``fetched``, up to the size limit."""
    for index, name in enumerate(names):
        # Missing files, links and unreadable files are skipped.
        with contextlib.suppress(OSError), _open_inside(scratch, name, _READ_FLAGS, make=False) as file:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode):
                fetched.add(index, file, status.st_size)
    fetched.write_length()


@contextlib.contextmanager
def _open_inside(scratch: str, name: str, flags: int, *, make: bool) -> Iterator[int]:
    """Open a file. If ``make`` is set, create its parent directories."""
    *directories, last = name.split("/")
    current = os.open(scratch, _DIRECTORY_FLAGS)
    try:
        for part, how in (*((part, _DIRECTORY_FLAGS) for part in directories), (last, flags)):
            if make and how == _DIRECTORY_FLAGS:
                with contextlib.suppress(FileExistsError):  # if it is not a directory, the next open fails
                    os.mkdir(part, 0o755, dir_fd=current)
            inner = os.open(part, how, 0o644, dir_fd=current)
            os.close(current)
            current = inner
        yield current
    finally:
        os.close(current)


def _copy_bytes(source: int, target: int, size: int) -> None:
    while size > 0:
        sent = os.sendfile(target, source, None, size)
        if sent == 0:
            raise OSError("the file ended early")
        size -= sent
