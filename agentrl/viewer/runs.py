"""Search for runs and evaluations below the paths of the command line, and summaries of runs."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

from agentrl.errors import AgentRLError, SettingsError
from agentrl.telemetry.files import resolve_path_inside
from agentrl.telemetry.records import dotted_keys
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.metrics_file import Progress, cached_metrics_columns, read_json_lines
from agentrl.viewer.run_files import read_run_settings

Kind = Literal["run", "evaluation"]

_DEPTH = 3  # levels of directories to search below a path
_MARKER_FILES: dict[str, Kind] = {"config.yaml": "run", "provenance.json": "evaluation"}
_METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class ViewedFolder:
    """A run or evaluation. ``id`` identifies it in addresses and depends only on the path."""

    id: str
    kind: Kind
    name: str
    path: Path


class RunLibrary:
    """Runs and evaluations below ``paths``. Every listing searches again to include new runs."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Check the paths. Raises SettingsError if a path is missing or contains neither a run nor an evaluation."""
        self._paths = tuple(paths)
        self._known: dict[str, ViewedFolder] = {}
        for path in self._paths:
            if not path.exists():
                raise SettingsError(
                    f"{path} does not exist: pass the directory of a run or evaluation, or a parent directory"
                )
            if next(_find_folders(path, _DEPTH), None) is None:
                raise SettingsError(
                    f"{path} contains no run (a directory with config.yaml and metrics.jsonl) and no evaluation (a "
                    f"directory with provenance.json) within {_DEPTH} levels: pass a directory such as runs/NAME"
                )

    def folders(self) -> list[ViewedFolder]:
        """Return all runs and evaluations, sorted by name."""
        folders: dict[str, ViewedFolder] = {}
        for root in self._paths:
            for kind, path in _find_folders(root, _DEPTH):
                name = path.resolve().name if path == root else path.relative_to(root).as_posix()
                folder = ViewedFolder(id=_folder_id(path), kind=kind, name=name, path=path)
                folders.setdefault(folder.id, folder)
        self._known = folders
        return sorted(folders.values(), key=lambda folder: folder.name)

    def run(self, folder_id: str) -> RunDirectory:
        """Return the run with this id. Raises SettingsError if it does not exist."""
        return RunDirectory(self._path(folder_id, "run"))

    def evaluation(self, folder_id: str) -> Path:
        """Return the directory of the evaluation with this id. Raises SettingsError if it does not exist."""
        return self._path(folder_id, "evaluation")

    def _path(self, folder_id: str, kind: Kind) -> Path:
        if folder_id not in self._known:
            self.folders()
        folder = self._known.get(folder_id)
        if folder is not None and folder.kind == kind == _folder_kind(folder.path):
            return folder.path
        raise SettingsError(f"the {kind} {folder_id} does not exist: it was moved or deleted")


def _find_folders(folder: Path, depth: int) -> Iterator[tuple[Kind, Path]]:
    kind = _folder_kind(folder)
    if kind is not None:
        yield kind, folder
    elif depth > 0 and folder.is_dir():
        try:
            inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:
            return  # directories without read permission are skipped
        for path in inside:
            yield from _find_folders(path, depth - 1)


def _folder_kind(folder: Path) -> Kind | None:
    for mark, kind in _MARKER_FILES.items():
        if (folder / mark).is_file() and (kind != "run" or (folder / _METRICS_FILE).is_file()):
            return kind
    return None


def _folder_id(path: Path) -> str:
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:10]


_NOTES_FILE = "notes.md"
_LONGEST_NOTES = 20_000  # bytes
_MOST_CACHED_RUNS = 4_096  # runs whose contents stay in memory until their files change
_COLLAPSES = ("reward_collapse", "entropy_collapse")
# A run counts as stopped when its last row is older than the larger of these two limits. The first allows for
# checkpoints and evaluations.
_STOPPED_AFTER = 120.0  # seconds
_STOPPED_AFTER_STEPS = 10  # multiple of the median step duration
_LONGEST_START = 900.0  # seconds that a run may take to complete its first step
_NO_PROGRESS = Progress(step=0, seconds=0.0, step_seconds=None, result=None, warnings=())

Part = TypeVar("Part")


def read_run_summary(run: RunDirectory) -> dict[str, object]:
    """Return the entry of a run in the table of runs.

    - ``state``: ``"running"``, ``"finished"`` (summary.json exists) or ``"stopped"``.
    - ``step`` and ``steps``: the newest step, 0 before the first, and ``training.steps`` (None if the settings cannot
      be read). ``seconds``: the sum of the steps' times.
    - ``result``: ``{"metric", "step", "value", "low", "high"}``, the newest held-out score with its 95 % interval or,
      without evaluations, the mean reward of the last 15 steps; None before the first step. ``low`` and ``high`` may
      be None.
    - ``alerts``: ``{"alert", "step", "message"}`` of the newest alert of each name, newest first. ``collapsed``: True
      if there is an alert for a collapse of the reward or the entropy.
    - ``warnings``: messages about files of the run that could not be read. Fields that depend on them are empty.
    - ``modified`` (seconds since 1970), ``stored_steps`` (number of steps with trajectories), ``notes``, ``settings``
      by dotted key.
    """
    warnings: list[str] = []

    def read(part: Callable[[], Part], missing: Part) -> Part:
        """Return a part of the summary, or ``missing`` if its file is damaged."""
        try:
            return part()
        except (AgentRLError, OSError) as error:
            warnings.append(str(error))
            return missing

    settings: dict[str, object] = read(lambda: _flat_settings(run.path, *_file_signature(run.config)), {})
    progress = read(lambda: _progress(run.metrics_file, run.path, *_file_signature(run.metrics_file)), _NO_PROGRESS)
    alerts: list[dict[str, object]] = read(
        lambda: _cached_alerts(run.alerts_file, run.path, *_file_signature(run.alerts_file)), []
    )
    notes = read(lambda: _read_notes(run), "")
    newest = {str(alert["alert"]): alert for alert in alerts}
    steps = settings.get("training.steps")
    return {
        "state": _run_state(run, progress),
        "step": progress.step,
        "steps": steps if isinstance(steps, int) else None,
        "seconds": progress.seconds,
        "result": progress.result,
        "alerts": [{key: alert.get(key) for key in ("alert", "step", "message")} for alert in newest.values()][::-1],
        "collapsed": any(name in newest for name in _COLLAPSES),
        "warnings": [*warnings, *progress.warnings],
        "modified": _modification_time(run.metrics_file),
        "stored_steps": len(_stored_steps(run.path, _modification_time(run.trajectories))),
        "notes": notes,
        "settings": settings,
    }


def read_run_page(run: RunDirectory) -> dict[str, object]:
    """Return the content of a run's page without curves: :func:`read_run_summary` with all alerts and stored steps."""
    return {
        **read_run_summary(run),
        "path": str(run.path),
        "trajectory_steps": list(_stored_steps(run.path, _modification_time(run.trajectories))),
        "alerts": _cached_alerts(run.alerts_file, run.path, *_file_signature(run.alerts_file)),
    }


def _run_state(run: RunDirectory, progress: Progress) -> str:
    """Return the state of a run. If its lock cannot be checked, a run counts as running while rows arrive."""
    in_use = run.in_use()
    if in_use is None and not run.summary.is_file():
        usual = (
            _LONGEST_START
            if progress.step_seconds is None
            else max(_STOPPED_AFTER, _STOPPED_AFTER_STEPS * progress.step_seconds)
        )
        in_use = time.time() - max(_modification_time(run.metrics_file), _modification_time(run.config)) < usual
    return "running" if in_use else "finished" if run.summary.is_file() else "stopped"


# In the cached functions, `_changed` is the signature of the file, so that a changed file is read again.
@lru_cache(maxsize=_MOST_CACHED_RUNS)
def _progress(path: Path, folder: Path, *_changed: int) -> Progress:
    return cached_metrics_columns(path, folder).progress()


@lru_cache(maxsize=_MOST_CACHED_RUNS)
def _cached_alerts(path: Path, folder: Path, *_changed: int) -> list[dict[str, object]]:
    """Return the alerts that have a name, in order."""
    return [alert for alert in read_json_lines(path, folder) if isinstance(alert.get("alert"), str)]


@lru_cache(maxsize=_MOST_CACHED_RUNS)
def _stored_steps(path: Path, _changed: float) -> tuple[int, ...]:
    return tuple(RunDirectory(path).steps_with_trajectories())


def _file_signature(path: Path) -> tuple[int, int, int]:
    """Return inode, size and modification time (ns) of a file, or zeros if it is missing."""
    try:
        about = os.stat(path)
    except OSError:
        return 0, 0, 0
    return about.st_ino, about.st_size, about.st_mtime_ns


def _modification_time(path: Path) -> float:
    """Return the modification time of a file in seconds since 1970, or 0 if it is missing."""
    return _file_signature(path)[2] / 1e9


def _read_notes(run: RunDirectory) -> str:
    """Return the user's notes, the first 20,000 bytes of ``notes.md`` in the run's directory."""
    try:
        with resolve_path_inside(run.path / _NOTES_FILE, run.path).open("rb") as file:
            return file.read(_LONGEST_NOTES).decode(errors="replace")
    except FileNotFoundError:
        return ""


@lru_cache(maxsize=_MOST_CACHED_RUNS)
def _flat_settings(path: Path, *_changed: int) -> dict[str, object]:
    return dotted_keys(read_run_settings(RunDirectory(path)))
