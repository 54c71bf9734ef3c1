"""Weights & Biases: ``telemetry.trackers=[wandb]``. WANDB_MODE, WANDB_ENTITY and so on mean what they always mean."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.telemetry.trackers.tracker import SampleTable, TrackedRun

if TYPE_CHECKING:
    from wandb import Run


class WandbTracker:
    """A run at Weights & Biases, or in ``trackers/wandb/`` offline; ``wandb sync`` sends what was recorded there.

    Without a connection at the start it records offline.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self.id = run.continued or uuid.uuid4().hex[:12]
        try:
            self._run = self._begin(run, mode=None)
        except (wandb.errors.CommError, TimeoutError):
            wandb.teardown()  # its service keeps the run's id otherwise
            self._run = self._begin(run, mode="offline")
        self.place = str(run.folder) if self._run.offline else str(self._run.url)

    def _begin(self, run: TrackedRun, *, mode: Literal["offline"] | None) -> Run:
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
                init_timeout=max(1.0, run.patience),
                finish_timeout=max(1.0, run.patience),
                login_timeout=max(1.0, run.patience),
            ),
        )

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """A part of the step's row of history. wandb drops rows of earlier steps, which a resumed run tells again."""
        self._run.log({**row}, step=step)

    def trajectories(self, table: SampleTable) -> None:
        """A table of the step's trajectories."""
        shown = self._wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({"trajectories": shown}, step=table.step)

    def plots(self, files: Sequence[Path]) -> None:
        """The plots as images."""
        self._run.log({f"plots/{file.stem}": self._wandb.Image(str(file)) for file in files})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
