"""TensorBoard: ``telemetry.trackers=[tensorboard]`` writes event files into the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.telemetry.trackers.tracker import Cell, SampleTable, TrackedRun


class TensorboardTracker:
    """Event files, read by ``tensorboard --logdir RUNS``. A resumed run adds a file, which replaces later steps."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard shows a run's path below --logdir as its name: NAME, not NAME/trackers/tensorboard.
        self.id = self.place = str(run.folder.parents[1])
        self._step = run.step
        self._writer = SummaryWriter(self.place, purge_step=run.step + 1 if run.continued else None)
        lines = (f"    {key}: {json.dumps(value, default=str)}" for key, value in run.settings.items())
        self._writer.add_text("settings", "\n".join(lines), run.step)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """A scalar for each metric."""
        self._step = step
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def trajectories(self, table: SampleTable) -> None:
        """A table in Markdown."""
        lines = ["|".join(table.columns), "|".join("---" for _ in table.columns)]
        lines += ["|".join(map(_cell, row)) for row in table.rows]
        self._writer.add_text("trajectories", "\n".join(lines), table.step)

    def plots(self, files: Sequence[Path]) -> None:
        """The plots as images."""
        from matplotlib.image import imread

        for file in files:
            self._writer.add_image(f"plots/{file.stem}", imread(file), self._step, dataformats="HWC")

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def _cell(value: Cell) -> str:
    text = "" if value is None else str(value)
    for plain, shown in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("`", "&#96;"), ("\n", "<br>")):
        text = text.replace(plain, shown)
    return text
