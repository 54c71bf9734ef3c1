"""Atomic writes, appended files with repair of an incomplete last line, locks and checksums."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from agentrl.errors import SettingsError, WorldError

_BLOCK = 1 << 16
LOCK_DEADLINE = 10.0  # seconds; children of a killed run may briefly hold a lock


@contextmanager
def os_errors_as_world_errors(path: Path, operation: str) -> Iterator[None]:
    """Convert file-system errors to a WorldError with the name of the file."""
    try:
        yield
    except OSError as error:
        raise WorldError(f"cannot {operation} {path}: {error.strerror or error}") from error
    except SafetensorError as error:  # safetensors raises this instead of an OSError
        raise WorldError(f"cannot {operation} {path}: {error}") from error


@contextmanager
def malformed_as_world_error(location: str) -> Iterator[None]:
    """Convert errors from malformed content (a missing field, a string instead of a number) to a WorldError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise WorldError(f"{location} is damaged ({type(error).__name__}: {error})") from error


def atomic_write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically and durably: ``write`` fills a temporary file, which is then renamed to ``path``.

    A device or a pipe, such as ``/dev/null``, is written in place, because a rename would replace it.
    """
    if path.exists() and not path.is_file():
        with os_errors_as_world_errors(path, "write"), path.open("wb") as out:
            write(out)
        return
    # The temporary file is in the same directory, because a rename is atomic only within a file system. The process id
    # separates concurrent writers of the same file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with os_errors_as_world_errors(path, "write"):
        try:
            with partial.open("wb") as out:
                write(out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        # Syncing the file does not make its new directory entry durable.
        _sync_directory(path.parent)


class BackgroundWriter:
    """Writes files in a background thread, one at a time."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._current: Future[object] | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Wait until the previous file is written, then start ``write``. Raises the error of the previous write."""
        self.wait()
        self._current = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the current file is written. Raises the error of this write."""
        current, self._current = self._current, None
        if current is not None:
            current.result()

    def close(self) -> None:
        """Wait for the current file and stop the thread. Ignores the error of the write."""
        self._thread.shutdown()


def resolve_path_inside(path: Path, folder: Path) -> Path:
    """Return ``path`` with links resolved. Raises WorldError if it is outside ``folder`` or is not a regular file.

    Directories of runs and evaluations are shared between users, so a link in a directory must not expose files of the
    reader's machine. A missing file is not an error, because opening it raises FileNotFoundError.
    """
    with os_errors_as_world_errors(path, "read"):
        resolved, root = path.resolve(), folder.resolve()
        if not resolved.is_relative_to(root):
            raise WorldError(
                f"{path} was not read because it links to a file outside {folder}: replace the link with the file"
            )
        # Reading a pipe or a device could block forever.
        if resolved.exists() and not stat.S_ISREG(resolved.stat().st_mode):
            raise WorldError(f"{path} was not read because it is not a regular file")
    return resolved


def acquire_lock(path: Path, message: str, *, deadline: float) -> int:
    """Create and lock the file ``path``. Returns the open handle, which releases the lock when closed.

    Writes the identity of this machine into the file for :func:`lock_is_held`. Raises SettingsError with ``message``
    after ``deadline`` seconds, and OSError if the file cannot be created. Not guaranteed: protection on file systems
    without ``flock``.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    end = time.monotonic() + deadline
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            os.close(lock)
            raise SettingsError(f"{message} (waited {deadline:.0f} s)") from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, _machine_boot_id().encode(), 0)
        return lock


def lock_is_held(path: Path) -> bool | None:
    """Return True if a process holds the lock ``path``, False if it is free, and None if the state is unknown.

    Some network file systems do not share locks between machines. A lock therefore counts as free only if this machine
    was the last to acquire it.
    """
    try:
        # The directory may be from another user, so do not follow links or block on a pipe.
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released by closing; acquire_lock retries meanwhile
        return False if os.read(lock, 256).decode(errors="replace") == _machine_boot_id() else None
    except BlockingIOError:
        return True
    except OSError:  # the file system has no flock
        return None
    finally:
        os.close(lock)


def _machine_boot_id() -> str:
    """Return the identity of the running kernel. Containers on one machine share the kernel and its locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def encode_json_line(row: Mapping[str, object]) -> bytes:
    """Encode ``row`` as a line of JSON. Raises ValueError for values that JSON cannot express, such as NaN."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append one complete line, which is on disk when this function returns."""
    with os_errors_as_world_errors(path, "append to"), path.open("ab") as out:
        out.write(line)
        out.flush()
        os.fsync(out.fileno())


def repair_torn_line(path: Path) -> int:
    """Remove an incomplete last line after a crash or a full disk. Returns the number of removed bytes."""
    if not path.exists():
        return 0
    with os_errors_as_world_errors(path, "repair"), path.open("rb+") as file:
        size = start = file.seek(0, os.SEEK_END)
        end = 0
        while start and not end:  # search backwards, because the file may be large
            stop, start = start, max(0, start - _BLOCK)
            file.seek(start)
            newline = file.read(stop - start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else 0
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
        return size - end


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """Compute the SHA-256 of a file. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_damaged_files(folder: Path, expected: Mapping[str, str], *, part: int = 0, parts: int = 1) -> list[str]:
    """Compare files with their ``expected`` checksums. Returns a message for each damaged file.

    Checks every ``parts``-th file, starting with number ``part``.
    """
    messages = []
    for name in sorted(expected)[part::parts]:
        try:
            if checksum(folder / name) != expected[name]:
                messages.append(f"{name} has changed since it was written")
        except OSError as error:
            messages.append(f"{name}: {error.strerror or error}")
    return messages
