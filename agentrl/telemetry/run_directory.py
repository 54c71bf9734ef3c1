"""Directory of one run (docs/start/what-you-see.md). ``step`` counts completed training steps, 0 before training.

A lock ensures that one process at a time uses a run directory, and is released when the process ends. Not guaranteed:
protection on file systems without ``flock``, and against other programs that write to the directory.
"""

from __future__ import annotations

import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from agentrl.errors import SettingsError, WorldError
from agentrl.telemetry.alerts import Alert
from agentrl.telemetry.files import (
    LOCK_DEADLINE,
    acquire_lock,
    append_line,
    atomic_write,
    encode_json_line,
    lock_is_held,
    os_errors_as_world_errors,
    repair_torn_line,
    resolve_path_inside,
)
from agentrl.telemetry.records import JsonRecord, Metrics, Summary
from agentrl.telemetry.trajectory_file import is_complete_file, read_trajectories, write_trajectories


class RunDirectory:
    """Files of one run. Use :meth:`create` or :meth:`resume` to write; the constructor suffices for reading."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.alerts_file = self.path / "alerts.jsonl"
        self.trajectories = self.path / "trajectories"
        self.tokens = self.path / "tokens"
        self.checkpoints = self.path / "checkpoints"
        self.plots = self.path / "plots"
        self.logs = self.path / "logs"
        self.trackers = self.path / "trackers"
        self.trace = self.path / "trace.json"
        self.summary = self.path / "summary.json"
        self._unlock: Callable[[], object] | None = None

    @classmethod
    def create(cls, path: str | Path, config: str) -> RunDirectory:
        """Start a run: create the directory and write ``config``, the resolved settings as YAML.

        Replaces a run that ended before it wrote a row. Raises SettingsError if ``path`` contains other files, cannot
        be written or is not a directory.
        """
        run = cls(path)
        if run.path.exists() and not run.path.is_dir():
            raise SettingsError(f"the run directory {run.path} is a file: choose another name=... or runs_dir=...")
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            used = sorted(entry.name for entry in run.path.iterdir() if not _is_left_by_killed_run(entry.name))
            if used and not run._is_run_without_rows(used):
                raise SettingsError(
                    f"the run directory {run.path} is not empty (it contains {', '.join(used[:5])}"
                    f"{', ...' if len(used) > 5 else ''}): continue that run with --resume, or choose another name=..."
                )
            run._take_lock()
        except OSError as error:
            raise SettingsError(
                f"cannot write to the run directory {run.path} ({error.strerror}): choose another runs_dir=..."
            ) from error
        run.write_text("config.yaml", config)  # first, because --resume requires this file
        run._create_and_clean_folders()
        return run

    @classmethod
    def resume(cls, path: str | Path) -> RunDirectory:
        """Open a run to continue it. Removes an incomplete last line of its metrics.

        Raises SettingsError if ``path`` is not a run, cannot be written or is used by another process.
        """
        run = cls(path)
        if not run.config.is_file():
            raise SettingsError(f"--resume: {run.path} is not a run directory, because it has no config.yaml")
        try:
            run._take_lock()
        except OSError as error:
            raise SettingsError(f"cannot write to the run directory {run.path}: {error.strerror}") from error
        run._create_and_clean_folders()
        repair_torn_line(run.metrics_file)
        repair_torn_line(run.trace)
        return run

    def close(self) -> None:
        """Release the lock, which is also released when the process ends or this object is deleted."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def in_use(self) -> bool | None:
        """Return True if a process uses the run, False if no process uses it, and None if the state is unknown."""
        return lock_is_held(self.path / "lock")

    def write_text(self, name: str, text: str) -> None:
        """Write the file ``name`` atomically."""
        atomic_write(self.path / name, lambda out: out.write(text.encode()))

    def write_summary(self, summary: Summary) -> None:
        """Write ``summary.json`` atomically."""
        self.write_text("summary.json", json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def append_metrics(self, row: Mapping[str, float]) -> None:
        """Append a row, which is on disk when this method returns. Raises ValueError if it has no integer ``step``."""
        if not isinstance(row.get("step"), int):
            raise ValueError(f"a metrics row must have an integer 'step'; got {dict(row)!r}")
        append_line(self.metrics_file, encode_json_line(row))

    def metrics(self) -> Iterator[Metrics]:
        """Yield the rows in the order written, without an incomplete last line.

        Raises WorldError with file and line if any other line is damaged.
        """
        if not self.metrics_file.exists():
            return
        with self.metrics_file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n"):
                    yield _parse_row(line, f"{self.metrics_file}, line {number}")

    def append_alert(self, alert: Alert) -> None:
        """Append an alert to ``alerts.jsonl``. The alert is on disk when this method returns."""
        append_line(self.alerts_file, encode_json_line(asdict(alert)))

    def alerts(self) -> list[Alert]:
        """Return the alerts so far, in order, without an incomplete last line."""
        if not self.alerts_file.exists():
            return []
        lines = self.alerts_file.read_bytes().splitlines(keepends=True)
        return [Alert(**_parse_row(line, str(self.alerts_file))) for line in lines if line.endswith(b"\n")]

    def trajectory_file(self, step: int) -> Path:
        """Return the file for the trajectories of ``step``."""
        return self.trajectories / f"{step:08d}.parquet"

    def write_trajectories(self, step: int, rows: Iterable[Mapping[str, object]]) -> Path:
        """Write the trajectories of ``step`` atomically. Returns the file."""
        path = self.trajectory_file(step)
        write_trajectories(path, rows)
        return path

    def read_trajectories(self, step: int) -> Iterator[JsonRecord]:
        """Yield the trajectories of ``step``. Raises WorldError if their file is missing or damaged."""
        return (record for _, record in self.select_trajectories(step, lambda _number, _line: True))

    def select_trajectories(
        self, step: int, predicate: Callable[[int, bytes], bool]
    ) -> Iterator[tuple[int, JsonRecord]]:
        """Yield the index (from 0) and the record of each trajectory for which ``predicate(index, JSON)`` is true.

        The JSON contains neither token ids nor log-probabilities. Raises WorldError if the file is missing or damaged.
        """
        return read_trajectories(resolve_path_inside(self.trajectory_file(step), self.path), predicate)

    def steps_with_trajectories(self) -> list[int]:
        """Return the steps with stored trajectories, ascending."""
        return _steps_of_files(self.trajectories.glob("*.parquet"))

    def require_trajectories(self, step: int) -> None:
        """Raise SettingsError unless the trajectories of ``step`` are stored."""
        steps = self.steps_with_trajectories()
        if step not in steps:
            stored = f"stored steps: {steps[0]} to {steps[-1]}" if steps else "no step is stored"
            raise SettingsError(f"{self.path} has no trajectories of step {step}; {stored}")

    def token_statistics_file(self, step: int, rank: int) -> Path:
        """Return the file for the token statistics of one rank."""
        return self.tokens / f"{step:08d}.{rank}.parquet"

    def token_statistics_files(self, step: int) -> list[Path]:
        """Return the existing files of token statistics of ``step``, by rank."""
        files = (path for path in self.tokens.glob(f"{step:08d}.*.parquet") if path.name.split(".")[1].isdecimal())
        return sorted(files, key=lambda path: int(path.name.split(".")[1]))

    def truncated_trajectory_files(self) -> list[Path]:
        """Return the trajectory files that are truncated."""
        with os_errors_as_world_errors(self.trajectories, "read"):
            files = map(self.trajectory_file, self.steps_with_trajectories())
            return [path for path in files if not is_complete_file(path)]

    def truncate_after(self, step: int, *, rows: int) -> None:
        """Remove metrics after the first ``rows`` rows and files after ``step``, which a resumed run writes again."""
        with os_errors_as_world_errors(self.metrics_file, "truncate"):
            kept = list(itertools.islice(self.metrics(), rows))
        atomic_write(self.metrics_file, lambda out: out.writelines(encode_json_line(row) for row in kept))
        alerts = [alert for alert in self.alerts() if alert.step <= step]
        if self.alerts_file.exists():
            atomic_write(
                self.alerts_file, lambda out: out.writelines(encode_json_line(asdict(alert)) for alert in alerts)
            )
        with os_errors_as_world_errors(self.trajectories, "truncate"):
            for folder in (self.trajectories, self.tokens):
                for file in folder.glob("*"):
                    if any(later > step for later in _steps_of_files([file])):
                        file.unlink()

    def _is_run_without_rows(self, entries: Iterable[str]) -> bool:
        """Return True if ``entries``, the names in the directory, belong to a run that wrote no row."""
        folders = (self.trajectories, self.checkpoints, self.plots)
        begun = (self.config, self.metrics_file, self.logs, self.trackers, self.trace, self.path / "tokenizer.json")
        expected = {path.name for path in (*begun, *folders)}
        if not self.config.is_file() or not expected.issuperset(entries):
            return False
        empty = not self.metrics_file.exists() or self.metrics_file.stat().st_size == 0
        return empty and not any(any(folder.iterdir()) for folder in folders if folder.is_dir())

    def _create_and_clean_folders(self) -> None:
        """Create missing directories and remove partial files of a killed process."""
        with os_errors_as_world_errors(self.path, "prepare"):
            for folder in (self.trajectories, self.checkpoints, self.plots):
                folder.mkdir(exist_ok=True)
            self.metrics_file.touch()
            for folder in (self.path, self.trajectories, self.tokens, self.plots):
                for left in folder.glob(".*.partial"):
                    left.unlink()

    def _take_lock(self) -> None:
        lock = acquire_lock(
            self.path / "lock", f"another process is using the run directory {self.path}", deadline=LOCK_DEADLINE
        )
        # The finalizer releases the lock of an object that is deleted without `close`.
        self._unlock = weakref.finalize(self, os.close, lock)


def _is_left_by_killed_run(name: str) -> bool:
    """Return True for a file that a run may leave if it is killed before it starts."""
    return name == "lock" or (name.startswith(".") and name.endswith(".partial"))


def _steps_of_files(files: Iterable[Path]) -> list[int]:
    """Return the step numbers at the start of file names, ascending."""
    return sorted({int(start) for path in files if (start := path.name.split(".")[0]).isdecimal()})


def _parse_row(line: bytes, location: str) -> JsonRecord:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorldError(f"{location} is damaged: invalid JSON ({error})") from error
    if not isinstance(row, dict):
        raise WorldError(f"{location} is damaged: not a JSON object")
    return row
