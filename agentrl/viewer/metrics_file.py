"""Size-limited readers for JSON Lines files. A growing ``metrics.jsonl`` is read into columns."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np

from agentrl.telemetry.files import resolve_path_inside
from agentrl.viewer.run_files import json_numbers

_LONGEST_LINE = 1 << 24  # bytes; a row of metrics has a few thousand
_MOST_CACHED_RUNS = 16  # runs whose columns stay in memory: 8 MB each with 5,000 steps of 100 metrics
_RECENT_STEPS = 15  # number of latest steps over which means are computed
_LARGEST_STEP = 1 << 53  # JavaScript's largest exact integer


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run.

    ``seconds`` is the total duration of the steps, and ``step_seconds`` the median of the last 15 steps. ``result`` is
    the newest held-out score with its 95 % interval or, without evaluations, the mean reward of the last 15 steps, as
    ``{"metric", "step", "value", "low", "high"}``. Unknown bounds are None.
    """

    step: int
    seconds: float
    step_seconds: float | None
    result: dict[str, object] | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Column:
    """Values of a metric, and the indices of their rows."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricsColumns:
    """Values of one ``metrics.jsonl`` by metric. Each call reads only lines that were appended since the last call.

    Damaged lines are skipped and counted. Values that are not numbers are left out.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path, self._folder = path, folder
        self._lock = Lock()
        self._clear(0)

    def progress(self) -> Progress:
        """Return the run's progress so far."""
        with self._lock:
            self._refresh()
            seconds = [value for value in self._values("time/step_s") if math.isfinite(value)]
            return Progress(
                step=self._steps[-1] if self._steps else 0,
                seconds=math.fsum(seconds),
                step_seconds=statistics.median(seconds[-_RECENT_STEPS:]) if seconds else None,
                result=self._latest_score() or self._recent_reward(),
                warnings=tuple(self._warnings()),
            )

    def series(self, *, names: Collection[str] = (), points: int = 800, since: str = "") -> dict[str, object]:
        """Return the curves of the metrics ``names`` (default: all), each with at most ``points`` points.

        Returns ``{"version", "changed", "rows", "names", "axes", "series"}``. ``version`` identifies the state of the
        file. If it is passed as ``since`` and the file has not changed, only ``version`` and ``changed: False`` are
        returned. ``names`` lists all metrics of the run, and ``rows`` is its number of rows.

        ``series[name]`` is ``{"axis", "value", "low", "high", "last"}``. ``axes[axis]`` holds ``step``, ``tokens``
        (trained so far) and ``hours`` (of steps so far), one number for each ``value``. If a metric has at most
        ``points`` values, ``value`` holds the exact values, and ``low`` and ``high`` are None. Otherwise its rows are
        split into ``points`` spans: ``value`` is the mean of a span, ``low`` and ``high`` are its minimum and maximum,
        and the axes are taken from its last row. ``last`` is the newest value. Non-finite numbers are None.
        """
        with self._lock:
            self._refresh()
            version = f"{self._inode}:{self._end}"
            if since == version:
                return {"version": version, "changed": False}
            axes = {"step": np.array(self._steps), "tokens": self._cumulative_sum("policy/tokens")}
            axes["hours"] = self._cumulative_sum("time/step_s") / 3600
            axis_indices: dict[bytes, int] = {}
            drawn_axes: list[dict[str, object]] = []
            series = {}
            for name in sorted(self._columns.keys() & set(names) if names else self._columns):
                rows = np.array(self._columns[name].rows)
                values = np.array(self._columns[name].values)
                ends, mean, low, high = _aggregate_spans(values, points)
                key = rows[ends].tobytes()
                if key not in axis_indices:  # most metrics have the same rows and share an axis
                    axis_indices[key] = len(drawn_axes)
                    drawn_axes.append({kind: json_numbers(axis[rows[ends]]) for kind, axis in axes.items()})
                series[name] = {
                    "axis": axis_indices[key],
                    "value": json_numbers(mean),
                    "low": None if low is None else json_numbers(low),
                    "high": None if high is None else json_numbers(high),
                    "last": json_numbers(np.array(self._columns[name].values[-1:]))[0],
                }
            return {
                "version": version,
                "changed": True,
                "rows": len(self._steps),
                "names": sorted(self._columns),
                "axes": drawn_axes,
                "series": series,
            }

    def _clear(self, inode: int) -> None:
        self._inode, self._end, self._damaged = inode, 0, 0
        self._steps: list[int] = []
        self._columns: dict[str, _Column] = {}

    def _refresh(self) -> None:
        """Read the appended lines, or the whole file if it was truncated or replaced (``--resume``)."""
        try:
            with resolve_path_inside(self._path, self._folder).open("rb") as file:
                inode, size = os.fstat(file.fileno()).st_ino, file.seek(0, os.SEEK_END)
                if inode != self._inode or size < self._end:
                    self._clear(inode)
                file.seek(self._end)
                for line in _complete_lines(file):
                    self._end += len(line)
                    self._add(line)
        except FileNotFoundError:
            self._clear(0)

    def _add(self, line: bytes) -> None:
        row = _parse_object(line)
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or abs(step) > _LARGEST_STEP:
            self._damaged += bool(line.strip())
            return
        number = len(self._steps)
        self._steps.append(step)
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                column = self._columns.setdefault(name, _Column())
                column.rows.append(number)
                column.values.append(value if abs(value) <= sys.float_info.max else math.nan)

    def _values(self, name: str) -> array[float]:
        return self._columns.get(name, _Column()).values

    def _cumulative_sum(self, name: str) -> np.ndarray:
        """Return the cumulative sum of a metric at each row."""
        column = self._columns.get(name, _Column())
        whole = np.zeros(len(self._steps))
        whole[np.array(column.rows, dtype=np.int64)] = np.nan_to_num(np.array(column.values), posinf=0.0, neginf=0.0)
        return np.cumsum(whole)

    def _latest_score(self) -> dict[str, object] | None:
        column = self._columns.get("eval/avg_at_k")
        if column is None:
            return None
        row = column.rows[-1]
        bounds = {side: self._value_at_recent_row(f"eval/{side}", row) for side in ("low", "high")}
        return {"metric": "eval/avg_at_k", "step": self._steps[row], "value": column.values[-1], **bounds}

    def _recent_reward(self) -> dict[str, object] | None:
        column = self._columns.get("reward/mean")
        if column is None:
            return None
        recent = column.values[-_RECENT_STEPS:]
        mean = sum(recent) / len(recent)
        errors = [self._value_at_recent_row("reward/stderr", row) for row in column.rows[-_RECENT_STEPS:]]
        known = [error for error in errors if error is not None]
        half = 1.96 * math.hypot(*known) / len(recent) if len(known) == len(recent) else None
        bounds = {"low": None, "high": None} if half is None else {"low": mean - half, "high": mean + half}
        return {"metric": "reward/mean", "step": self._steps[column.rows[-1]], "value": mean, **bounds}

    def _value_at_recent_row(self, name: str, row: int) -> float | None:
        """Return the value of a metric at ``row``, or None if ``row`` is not among the metric's last 15 rows."""
        column = self._columns.get(name, _Column())
        recent = dict(zip(column.rows[-_RECENT_STEPS:], column.values[-_RECENT_STEPS:], strict=True))
        return recent.get(row)

    def _warnings(self) -> Iterator[str]:
        if self._damaged:
            yield f"{self._path.name}: skipped {self._damaged} damaged line{'s' * (self._damaged > 1)}"
        for name, column in self._columns.items():
            wrong = next(
                (row for row, value in zip(column.rows, column.values, strict=True) if not math.isfinite(value)), None
            )
            if wrong is not None:
                yield f"{self._path.name}: {name} is not a finite number at step {self._steps[wrong]}"


@lru_cache(maxsize=_MOST_CACHED_RUNS)
def cached_metrics_columns(path: Path, folder: Path) -> MetricsColumns:
    """Return the cached columns of the file ``path`` in ``folder``."""
    return MetricsColumns(path, folder)


def _aggregate_spans(
    values: np.ndarray, points: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Split values into at most ``points`` spans. Returns their last indices, means, minima and maxima.

    Minima and maxima are None if every span is a single value.
    """
    if len(values) <= points:
        return np.arange(len(values)), values, None, None
    edges = np.linspace(0, len(values), points + 1).astype(np.int64)
    starts = edges[:-1]
    means = np.add.reduceat(values, starts) / np.diff(edges)
    return edges[1:] - 1, means, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def read_json_lines(path: Path, folder: Path) -> list[dict[str, object]]:
    """Read the objects of a JSON Lines file inside ``folder``. Damaged and incomplete lines are skipped."""
    try:
        with resolve_path_inside(path, folder).open("rb") as file:
            return [row for line in _complete_lines(file) if (row := _parse_object(line))]
    except FileNotFoundError:
        return []


def _complete_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield complete lines. Overlong lines are split into pieces, none of which parses as a JSON object."""
    while (line := file.readline(_LONGEST_LINE)).endswith(b"\n") or len(line) == _LONGEST_LINE:
        yield line


def _parse_object(line: bytes) -> dict[str, object]:
    """Parse the object in a line. Returns {} if the line is damaged or nested too deeply."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
