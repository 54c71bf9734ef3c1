"""Trackio: ``telemetry.trackers=[trackio]``. TRACKIO_DIR, TRACKIO_SPACE_ID and so on mean what they always mean."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.telemetry.trackers.tracker import SampleTable, TrackedRun


class TrackioTracker:
    """A run in Trackio's local database, which ``trackio show`` draws, or in the user's Space."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        self.id = run.continued or f"{run.name}-{uuid.uuid4().hex[:6]}"  # runs are known by their names
        self.place = f"trackio show --project {run.project}"
        settings = {key: value for key, value in run.settings.items() if not key.startswith("_")}
        resume = "must" if run.continued else "never"
        self._run = trackio.init(project=run.project, name=self.id, config=settings, resume=resume, embed=False)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(row), step=step)

    def trajectories(self, table: SampleTable) -> None:
        """A table of the step's trajectories."""
        import pandas as pd

        shown = pd.DataFrame([list(row) for row in table.rows], columns=list(table.columns))
        self._run.log({"trajectories": self._trackio.Table(dataframe=shown)}, step=table.step)

    def plots(self, files: Sequence[Path]) -> None:
        """The plots as images."""
        self._run.log({f"plots/{file.stem}": self._trackio.Image(str(file)) for file in files})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
