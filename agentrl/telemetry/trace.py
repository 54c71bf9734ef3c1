"""Timeline of a run in the JSON format of Perfetto and Chrome: ``telemetry.trace=true``.

All processes of a run append events to one file, one per line. The JSON array is never closed, which the format allows,
so the file remains valid if a process is killed. Without a trace, all functions return immediately.

Not guaranteed: complete lines from processes on several machines over a file system without atomic appends (NFS).
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from agentrl.telemetry.files import os_errors_as_world_errors

_LARGEST_BUFFER = 1 << 16  # bytes
_LONGEST_WAIT = 1_000_000_000  # maximum nanoseconds between two writes of a busy process

logger = logging.getLogger(__name__)

Lane = tuple[int, int]  # number of a group of lanes (a "process" in the format) and of a lane (a "thread")
Fact = str | int | float | None

_TASK_LANE: ContextVar[Lane | None] = ContextVar("lane", default=None)


class Trace:
    """Trace writer of one process. ``main_group`` is the group of the default lane, ``main_lane``."""

    def __init__(self, path: Path, main_group: str) -> None:
        with os_errors_as_world_errors(path, "write"):
            _create_trace_file(path)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._path, self._failed = path, False
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._written = time.monotonic_ns()
        # Slices are measured with the monotonic clock. The offset aligns the time axes of all processes.
        self._wall_offset = time.time_ns() - time.monotonic_ns()
        self._free: dict[str, list[int]] = {}
        self._used: dict[str, int] = {}
        self.main_lane = self.reserve_lane(main_group)

    def reserve_lane(self, group: str) -> Lane:
        """Reserve the lowest free lane of a group."""
        with self._lock:
            free = self._free.setdefault(group, [])
            lane = heapq.heappop(free) if free else self._used.get(group, 0)
            known = self._used.get(group, 0)
            self._used[group] = max(known, lane + 1)
        # Do not use `hash`: it differs between processes, but all processes write to one file and must give a group the
        # same number.
        number = zlib.crc32(group.encode()) & 0x7FFFFFFF
        if lane == known:
            self._name_lane(group, number, lane)
        return number, lane + 1

    def release_lane(self, group: str, lane: Lane) -> None:
        """Release a lane for other slices."""
        with self._lock:
            heapq.heappush(self._free[group], lane[1] - 1)

    def add_slice(self, name: str, lane: Lane, began: int, facts: dict[str, Fact]) -> None:
        """Add a slice from ``began`` (monotonic nanoseconds) until now."""
        start, end = (began + self._wall_offset) // 1000, (time.monotonic_ns() + self._wall_offset) // 1000
        event = {"ph": "X", "name": name, "pid": lane[0], "tid": lane[1], "ts": start, "dur": end - start}
        self._add(event | ({"args": facts} if facts else {}))

    def flush(self) -> None:
        """Write the buffered events."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write the buffered events and close the file."""
        with self._lock:
            self._write()
            os.close(self._file)

    def _name_lane(self, group: str, number: int, lane: int) -> None:
        if lane == 0:
            self._add({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": group}})
        self._add({"ph": "M", "name": "thread_name", "pid": number, "tid": lane + 1, "args": {"name": f"{lane + 1}"}})

    def _add(self, event: dict[str, object]) -> None:
        line = json.dumps(event, ensure_ascii=True, separators=(",", ":")).encode() + b",\n"
        with self._lock:
            self._buffer += line
            if len(self._buffer) > _LARGEST_BUFFER or time.monotonic_ns() - self._written > _LONGEST_WAIT:
                self._write()

    def _write(self) -> None:
        self._written = time.monotonic_ns()
        if not self._failed:
            try:
                os.write(self._file, self._buffer)
            except OSError as error:  # a full disk must not end the run
                self._failed = True
                logger.warning("cannot write to %s, so tracing stops: %s", self._path, error.strerror)
        self._buffer.clear()


_current: Trace | None = None


def start_trace(path: Path, main_group: str) -> None:
    """Start tracing this process into ``path``, unless it is already traced."""
    global _current
    if _current is None:
        _current = Trace(path, main_group)


def stop_trace() -> None:
    """Stop tracing this process."""
    global _current
    trace, _current = _current, None
    if trace is not None:
        trace.close()


@contextlib.contextmanager
def trace_span(name: str, **facts: Fact) -> Iterator[dict[str, Fact]]:
    """Trace the block as a slice on the lane of this task or process. The yielded mapping accepts further facts."""
    trace = _current
    if trace is None:
        yield facts
        return
    began, lane = time.monotonic_ns(), _TASK_LANE.get() or trace.main_lane
    try:
        yield facts
    finally:
        trace.add_slice(name, lane, began, facts)


@contextlib.contextmanager
def reserve_lane(group: str) -> Iterator[None]:
    """Reserve a lane of ``group`` for the spans of this task inside the block."""
    trace = _current
    if trace is None:
        yield
        return
    lane = trace.reserve_lane(group)
    before = _TASK_LANE.set(lane)
    try:
        yield
    finally:
        _TASK_LANE.reset(before)
        trace.release_lane(group, lane)


@contextlib.contextmanager
def trace_service_call(group: str, name: str, **facts: Fact) -> Iterator[None]:
    """Trace the block on the task's lane, if any, and on a lane of the service ``group`` that executes the block."""
    task_span = contextlib.nullcontext() if _TASK_LANE.get() is None else trace_span(name, **facts)
    with task_span, reserve_lane(group), trace_span(name, **facts):
        yield


def slice_start_time() -> int:
    """Return the start time of a slice that :func:`add_slice_since` ends."""
    return time.monotonic_ns()


def add_slice_since(began: int, name: str, **facts: Fact) -> None:
    """Add a slice from ``began`` until now, for code without a ``with`` block."""
    if _current is not None:
        _current.add_slice(name, _TASK_LANE.get() or _current.main_lane, began, facts)


def _create_trace_file(path: Path) -> None:
    """Create the file with its first line, unless it exists."""
    if path.exists():
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(b"[\n")
    # Unlike a rename, a link fails if the file exists, so that no process overwrites the events of another process.
    try:
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()
