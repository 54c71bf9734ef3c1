"""What a run says of itself: settings, stored steps, alerts, and whether it is going on."""

from __future__ import annotations

import time
from collections.abc import Mapping

from agentrl.inspection.run_settings import run_settings
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.metrics_file import read_new_rows

_NOTES = "notes.md"
_MOST_NOTES = 20_000  # bytes
_LIVE = 120.0  # seconds since the last row of a run that counts as going on


def run_summary(run: RunDirectory) -> dict[str, object]:
    """A run in the table of runs: where it stands, without its curves."""
    steps = run.trajectory_steps()
    return {
        "finished": run.summary.is_file(),
        "live": not run.summary.is_file() and time.time() - run.metrics_file.stat().st_mtime < _LIVE,
        "modified": run.metrics_file.stat().st_mtime,
        "stored_steps": len(steps),
        "notes": _notes(run),
        "settings": flat_settings(run),
    }


def run_facts(run: RunDirectory) -> dict[str, object]:
    """A run's own page, without its curves."""
    return {
        **run_summary(run),
        "path": str(run.path),
        "trajectory_steps": run.trajectory_steps(),
        "token_steps": run.token_steps(),
        "alerts": read_new_rows(run.alerts_file).rows,
    }


def _notes(run: RunDirectory) -> str:
    """The user's own notes: the file ``notes.md`` in the run's directory, its beginning at least."""
    try:
        with (run.path / _NOTES).open("rb") as file:
            return file.read(_MOST_NOTES).decode(errors="replace")
    except OSError:
        return ""


def flat_settings(run: RunDirectory) -> dict[str, object]:
    """Every setting by its key, as on the command line; empty where ``config.yaml`` is damaged."""
    flat: dict[str, object] = {}
    for name, value in run_settings(run).items():
        _flatten(value, name, flat)
    return flat


def _flatten(value: object, key: str, flat: dict[str, object]) -> None:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            _flatten(inner, f"{key}.{name}", flat)
    else:
        flat[key] = value
