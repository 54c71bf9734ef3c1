"""MLflow: ``telemetry.trackers=[mlflow]``, at MLFLOW_TRACKING_URI, else in ``trackers/mlflow/``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.telemetry.trackers.tracker import SampleTable, TrackedRun

_LONGEST_PARAMETER = 6000
_PARAMETERS = 100  # of one request


class MlflowTracker:
    """A run of the experiment ``telemetry.tracker_project``. A resumed run keeps the settings that it began with."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self.place = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "store").absolute().as_uri()
        if self.place.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise it asks for a database
        self._client = MlflowClient(tracking_uri=self.place)
        self.id = run.continued or self._create(run)
        if run.continued:
            self._client.update_run(self.id, status="RUNNING")

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if found is None else found.experiment_id
        created: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in run.settings.items()]
        for start in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(created, params=parameters[start : start + _PARAMETERS])
        return created

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """The row as one batch."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, metrics=[Metric(name, float(value), now, step) for name, value in row.items()])

    def trajectories(self, table: SampleTable) -> None:
        """A table of its own for each step."""
        columns = {name: [row[place] for row in table.rows] for place, name in enumerate(table.columns)}
        self._client.log_table(self.id, columns, f"trajectories/{table.step:08d}.json")

    def plots(self, files: Sequence[Path]) -> None:
        """The plots as artifacts."""
        for file in files:
            self._client.log_artifact(self.id, str(file), "plots")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.id)
