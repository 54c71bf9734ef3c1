"""Tells the trackers of a run what goes into the run directory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.records import JsonRecord, Metrics
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.telemetry.trackers.thread import TrackerThread
from agentrl.telemetry.trackers.tracker import TRACKERS, Cell, SampleTable, TrackedRun, Tracker

COLUMNS = ("problem", "group", "sample", "reward", "ended", "verdict", "turns", "model tokens", "conversation")
LONGEST_CELL = 20_000  # characters of a conversation


class Trackers:
    """The trackers of one run, none of which anything waits for before :meth:`close`."""

    def __init__(
        self,
        telemetry: TelemetrySettings,
        run: RunDirectory | None,
        *,
        say: Callable[[str], object],
        warn: Callable[[str], object],
    ) -> None:
        """Without a ``run`` (ranks other than 0) there are none."""
        self._telemetry, self._run, self._say, self._warn = telemetry, run, say, warn
        self._threads: list[TrackerThread] = []
        self._due: int | None = None  # step whose sample is sent next

    def begin(self, settings: Mapping[str, object], *, step: int, resumed: bool) -> None:
        """Open the trackers, after ``step`` steps; a ``resumed`` run continues what it began."""
        run = self._run
        if run is None:
            return
        for name in self._telemetry.trackers:
            opening = partial(self._open, name, run, dict(flat(settings)), step=step, resumed=resumed)
            self._threads.append(TrackerThread(name, opening, say=self._say, warn=self._warn))

    def row(self, row: Metrics) -> None:
        """Send a row of ``metrics.jsonl``, and a sample of the previous step's trajectories if it is due.

        The sample is sent one step later, because the trajectories of a step are written during the next one.
        """
        step = int(row["step"])
        numbers = {key: value for key, value in row.items() if key != "step"}
        every, trained = self._telemetry.tracker_tables_every, "policy/updates" in row
        if trained:
            self._send_due_table()  # before the metrics: wandb drops data of earlier steps
        self._tell(lambda tracker: tracker.metrics(step, numbers))
        if trained and every and step % every == 0:
            self._due = step

    def table(self, table: SampleTable) -> None:
        """A sample that the caller chose."""
        self._tell(lambda tracker: tracker.trajectories(table))

    def plots(self) -> None:
        """The plots that the run directory has by now."""
        if self._run is not None:
            files = sorted(file for file in self._run.plots.glob("*.png") if not file.stem.endswith("-dark"))
            self._tell(lambda tracker: tracker.plots(files))

    def close(self) -> None:
        """Wait, all trackers together for ``telemetry.tracker_deadline`` seconds at most, until everything is sent."""
        self._send_due_table()
        deadline = time.monotonic() + self._telemetry.tracker_deadline
        for thread in self._threads:
            thread.close(deadline)
        self._threads.clear()

    def _tell(self, message: Callable[[Tracker], object]) -> None:
        for thread in self._threads:
            thread.put(message)

    def _send_due_table(self) -> None:
        step, run, self._due = self._due, self._run, None
        if step is not None and run is not None:
            self._tell(lambda tracker: self._send_table(tracker, run, step))

    def _send_table(self, tracker: Tracker, run: RunDirectory, step: int) -> None:
        if run.trajectory_file(step).exists():
            first = itertools.islice(run.read_trajectories(step), self._telemetry.tracker_rows)
            tracker.trajectories(SampleTable(step=step, columns=COLUMNS, rows=[table_row(row) for row in first]))

    def _open(
        self, name: str, run: RunDirectory, settings: Mapping[str, object], *, step: int, resumed: bool
    ) -> Tracker:
        folder = run.trackers / name.replace(":", ".")
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "run-id"
        tracker = TRACKERS[name](
            TrackedRun(
                name=run.path.name,
                project=self._telemetry.tracker_project,
                settings=settings,
                folder=folder,
                continued=known.read_text(encoding="utf-8") if resumed and known.exists() else None,
                step=step,
                patience=self._telemetry.tracker_deadline / 2,
            )
        )
        atomic_write(known, lambda out: out.write(tracker.id.encode()))
        return tracker


def flat(settings: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Settings by their dotted keys.

    >>> dict(flat({"seed": 1, "model": {"path": None, "tiny": {"layers": 2}}}))
    {'seed': 1, 'model.path': None, 'model.tiny.layers': 2}
    """
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def table_row(record: JsonRecord) -> tuple[Cell, ...]:
    """The cells of a stored trajectory, as :data:`COLUMNS` names them."""
    segments = record["segments"]
    model = [segment for segment in segments if segment["origin"] == "model"]
    said = [
        ("problem", record["problem"]["statement"]),
        *((segment["origin"], segment["text"]) for segment in segments),
    ]
    conversation = "\n".join(f"--- {who}\n{text}" for who, text in said)
    return (
        str(record["problem"]["id"]),
        record["group"],
        record["sample"],
        sum(segment["reward"] for segment in segments),
        record["ended"],
        record["verdict"],
        len(model),
        sum(len(segment["token_ids"]) for segment in model),
        conversation[:LONGEST_CELL],
    )
