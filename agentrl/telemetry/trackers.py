"""Experiment trackers: protocol, registry, and adapters for wandb, trackio, TensorBoard and MLflow.

A tracker's package is imported when the tracker is opened. Environment variables of the package (WANDB_MODE,
TRACKIO_DIR, MLFLOW_TRACKING_URI and so on) have their usual meaning.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from agentrl.errors import SettingsError
from agentrl_envs.registry import Registry, install_command

if TYPE_CHECKING:
    from wandb import Run


Factory = TypeVar("Factory", bound="TrackerFactory")
Cell = str | float | None


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Arguments of a tracker's factory.

    ``settings`` has dotted keys. ``folder`` is inside the run directory and used by this tracker only. ``resume_id``
    is the tracker's id of the run that ``--resume`` continues. ``step`` is the number of completed steps. Rows of later
    steps may be sent again. Opening and closing should fail after ``open_deadline`` seconds.
    """

    name: str
    project: str
    settings: Mapping[str, object]
    folder: Path
    resume_id: str | None
    step: int
    open_deadline: float


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """A few trajectories of a step."""

    step: int
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


class Tracker(Protocol):
    """A run in an experiment tracker. All methods are called from a separate thread, and may block and raise."""

    @property
    def id(self) -> str:
        """Identifier for ``TrackedRun.resume_id``, with which a later tracker continues this run."""

    @property
    def location(self) -> str:
        """Address or folder of the run, for display."""

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Log a row of ``metrics.jsonl`` without ``step``, for a training step or an evaluation (``eval/...``)."""

    def trajectories(self, table: SampleTable) -> None:
        """Log a sample of a step's trajectories."""

    def plots(self, files: Sequence[Path]) -> None:
        """Log the plots (PNG files) at the end of the run."""

    def close(self) -> None:
        """Send all pending data. Called when the run has ended or was stopped."""


TrackerFactory = Callable[[TrackedRun], Tracker]

_MODULE = __name__
TRACKERS: Registry[TrackerFactory] = Registry(
    "tracker",
    builtin={
        "wandb": f"{_MODULE}:WandbTracker",
        "trackio": f"{_MODULE}:TrackioTracker",
        "tensorboard": f"{_MODULE}:TensorboardTracker",
        "mlflow": f"{_MODULE}:MlflowTracker",
    },
    group="agentrl.trackers",
    paths=True,
)
"""Classes and functions that open a `Tracker`. A built-in tracker requires the package with its name."""


def register_tracker(name: str) -> Callable[[Factory], Factory]:
    """Register a class or function as the tracker ``name`` of ``telemetry.trackers``."""
    return TRACKERS.decorator(name)


def check_trackers(names: Iterable[str]) -> None:
    """Raise SettingsError if a tracker's package is missing, and PluginError if a tracker cannot be imported."""
    for name in names:
        if name in TRACKERS.builtin and importlib.util.find_spec(name) is None:
            raise SettingsError(f"telemetry.trackers: {name} is not installed: run {install_command(name)}")
        TRACKERS[name]


_LONGEST_PARAMETER = 6000  # maximum number of characters of a parameter in MLflow
_PARAMETERS_PER_REQUEST = 100  # limit of MLflow


class WandbTracker:
    """A run at Weights & Biases. Offline runs are in ``trackers/wandb/``, and ``wandb sync`` uploads them.

    The run is recorded offline if there is no connection at the start.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self.id = run.resume_id or uuid.uuid4().hex[:12]
        try:
            self._run = self._init_run(run, mode=None)
        except (wandb.errors.CommError, TimeoutError):
            wandb.teardown()  # otherwise wandb's service still holds the run's id
            self._run = self._init_run(run, mode="offline")
        self.location = str(run.folder) if self._run.offline else str(self._run.url)

    def _init_run(self, run: TrackedRun, *, mode: Literal["offline"] | None) -> Run:
        return self._wandb.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            mode=mode,
            dir=str(run.folder),
            config={**run.settings},
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                init_timeout=max(1.0, run.open_deadline),
                finish_timeout=max(1.0, run.open_deadline),
                login_timeout=max(1.0, run.open_deadline),
            ),
        )

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        # wandb drops rows of earlier steps, which a resumed run logs again.
        self._run.log({**row}, step=step)

    def trajectories(self, table: SampleTable) -> None:
        shown = self._wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({"trajectories": shown}, step=table.step)

    def plots(self, files: Sequence[Path]) -> None:
        self._run.log({f"plots/{file.stem}": self._wandb.Image(str(file)) for file in files})

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A run in Trackio's local database, which ``trackio show`` displays, or in the user's Space."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        self.id = run.resume_id or f"{run.name}-{uuid.uuid4().hex[:6]}"  # trackio identifies runs by name
        self.location = f"trackio show --project {run.project}"
        settings = {key: value for key, value in run.settings.items() if not key.startswith("_")}
        resume = "must" if run.resume_id else "never"
        self._run = trackio.init(project=run.project, name=self.id, config=settings, resume=resume, embed=False)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def trajectories(self, table: SampleTable) -> None:
        import pandas as pd

        shown = pd.DataFrame([list(row) for row in table.rows], columns=list(table.columns))
        self._run.log({"trajectories": self._trackio.Table(dataframe=shown)}, step=table.step)

    def plots(self, files: Sequence[Path]) -> None:
        self._run.log({f"plots/{file.stem}": self._trackio.Image(str(file)) for file in files})

    def close(self) -> None:
        self._run.finish()


class TensorboardTracker:
    """Event files for ``tensorboard --logdir RUNS``. A resumed run overwrites the steps after its checkpoint."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard uses the path below --logdir as the run's name, which should not end in trackers/tensorboard.
        self.id = self.location = str(run.folder.parents[1])
        self._step = run.step
        self._writer = SummaryWriter(self.location, purge_step=run.step + 1 if run.resume_id else None)
        lines = (f"    {key}: {json.dumps(value, default=str)}" for key, value in run.settings.items())
        self._writer.add_text("settings", "\n".join(lines), run.step)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self._step = step
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def trajectories(self, table: SampleTable) -> None:
        lines = ["|".join(table.columns), "|".join("---" for _ in table.columns)]
        lines += ["|".join(map(_escape_cell, row)) for row in table.rows]
        self._writer.add_text("trajectories", "\n".join(lines), table.step)

    def plots(self, files: Sequence[Path]) -> None:
        from matplotlib.image import imread

        for file in files:
            self._writer.add_image(f"plots/{file.stem}", imread(file), self._step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class MlflowTracker:
    """A run of the experiment ``telemetry.tracker_project``. A resumed run keeps its initial settings."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self.location = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "store").absolute().as_uri()
        if self.location.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise MLflow requires a database
        self._client = MlflowClient(tracking_uri=self.location)
        self.id = run.resume_id or self._create_run(run)
        if run.resume_id:
            self._client.update_run(self.id, status="RUNNING")

    def _create_run(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if found is None else found.experiment_id
        created: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in run.settings.items()]
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            self._client.log_batch(created, params=parameters[start : start + _PARAMETERS_PER_REQUEST])
        return created

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, metrics=[Metric(name, float(value), now, step) for name, value in row.items()])

    def trajectories(self, table: SampleTable) -> None:
        columns = {name: [row[index] for row in table.rows] for index, name in enumerate(table.columns)}
        self._client.log_table(self.id, columns, f"trajectories/{table.step:08d}.json")

    def plots(self, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(self.id, str(file), "plots")

    def close(self) -> None:
        self._client.set_terminated(self.id)


def _escape_cell(value: Cell) -> str:
    text = "" if value is None else str(value)
    for plain, shown in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("`", "&#96;"), ("\n", "<br>")):
        text = text.replace(plain, shown)
    return text
