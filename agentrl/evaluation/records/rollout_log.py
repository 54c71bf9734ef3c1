"""Rollouts on disk: compressed JSON Lines that are appended one by one and repaired after a kill.

Every rollout is a separate zstd frame with a checksum, written by one system call as soon as the rollout ends. SIGKILL
loses only the rollouts in flight. A power failure may also lose the last few seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import zstandard

from agentrl.errors import WorldError
from agentrl.evaluation.records.transcript import Transcript
from agentrl.telemetry.files import json_line, world_errors

_CHUNK = 1 << 20
_SYNC_EVERY = 5.0  # seconds


class RolloutLog:
    """Appends rollouts to one file, which is repaired when opened. The lock on the directory excludes other writers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repaired = repair_frames(path)
        with world_errors(path, "open"):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._packer = zstandard.ZstdCompressor(level=6, write_checksum=True)
        self._synced = time.monotonic()

    def append(self, transcript: Transcript) -> None:
        """Write one rollout. If the write fails, remove the partly written frame and raise WorldError."""
        frame = self._packer.compress(json_line(transcript.to_record()))
        with world_errors(self.path, "append to"):
            end = os.fstat(self._file).st_size
            try:
                written = os.write(self._file, frame)
                if written < len(frame):
                    raise OSError(f"{written} of {len(frame)} bytes written, the disk is full")
            except OSError:
                os.ftruncate(self._file, end)
                raise
            if time.monotonic() - self._synced > _SYNC_EVERY:
                self._sync()

    def close(self) -> None:
        """Sync everything to disk and close. May be called more than once."""
        if self._file >= 0:
            with world_errors(self.path, "close"):
                self._sync()
                os.close(self._file)
            self._file = -1

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = time.monotonic()

    def __enter__(self) -> RolloutLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_rollouts(path: Path) -> Iterator[Transcript]:
    """Yield the rollouts in the order written, one in memory at a time. An incomplete last frame is skipped.

    Raises WorldError with the file and the position for any other damage.
    """
    if not path.exists():
        return
    for position, frame in _frames(path):
        try:
            yield Transcript.from_record(json.loads(frame))
        except (ValueError, KeyError, TypeError) as error:
            raise WorldError(f"{path}, byte {position}: damaged, not a rollout ({error})") from error


def repair_frames(path: Path) -> int:
    """Remove an incomplete frame at the end. Returns the number of bytes removed."""
    if not path.exists():
        return 0
    with world_errors(path, "repair"):
        end = 0
        for position, _ in _frames(path, ends=True):
            end = position
        size = path.stat().st_size
        if end < size:
            with path.open("rb+") as file:
                file.truncate(end)
                os.fsync(file.fileno())
        return size - end


def _frames(path: Path, *, ends: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the start (or, with ``ends``, the end) and the content of each complete frame."""
    unpacker = zstandard.ZstdDecompressor()
    with world_errors(path, "read"), path.open("rb") as file:
        begin = position = 0
        pending = b""
        frame, parts = unpacker.decompressobj(), list[bytes]()
        while True:
            data = pending or file.read(_CHUNK)
            if not data:
                return
            try:
                parts.append(frame.decompress(data))
            except zstandard.ZstdError as error:
                raise WorldError(f"{path}, byte {begin}: damaged ({error})") from error
            pending = frame.unused_data if frame.eof else b""
            position += len(data) - len(pending)
            if frame.eof:
                yield (position if ends else begin), b"".join(parts)
                begin, frame, parts = position, unpacker.decompressobj(), []
