"""Background threads that send a run's data to experiment trackers. Training waits for them only at its end."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, Full, Queue

from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.records import JsonRecord, Metrics, dotted_keys
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.telemetry.trackers import TRACKERS, Cell, SampleTable, TrackedRun, Tracker
from agentrl_envs.registry import describe_error

SAMPLE_COLUMNS = ("problem", "group", "sample", "reward", "ended", "verdict", "turns", "model tokens", "conversation")
LONGEST_CONVERSATION = 20_000  # characters of a conversation
_LONGEST_QUEUE = 1000  # messages, enough for the rows and tables of hundreds of steps
_RUN_CONTINUES = "the run continues, and its directory contains all data"

Message = Callable[[Tracker], object]


class TrackerThread:
    """Thread that opens a tracker and processes messages in order, from a bounded queue.

    ``notify`` and ``warn`` print a line. Only the first failure and the first dropped message are printed. The
    numbers of failures and dropped messages are printed at the end.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        *,
        notify: Callable[[str], object],
        warn: Callable[[str], object],
        longest_queue: int = _LONGEST_QUEUE,
    ) -> None:
        self._name, self._open_tracker, self._notify, self._warn = name, open_tracker, notify, warn
        self._messages: Queue[Message | None] = Queue(longest_queue)  # None: no further message follows
        self._stopped = False  # True if remaining messages are discarded
        self._dropped = self._failed = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Queue a message without waiting. Drops it if the queue is full or the tracker could not be opened."""
        if self._stopped:
            return
        try:
            self._messages.put_nowait(message)
        except Full:
            self._dropped += 1
            if self._dropped == 1:
                self._warn(f"tracker {self._name} is too slow, so messages are dropped; {_RUN_CONTINUES}")

    def close(self, deadline: float) -> None:
        """Wait until the queue is empty and stop the thread, at the latest at ``deadline`` (monotonic)."""
        if not self._stopped:
            with contextlib.suppress(Full):
                self._messages.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._stopped = True
            lost = self._dropped
            with contextlib.suppress(Empty):
                while True:
                    lost += self._messages.get_nowait() is not None
            self._warn(
                f"tracker {self._name} did not finish within telemetry.tracker_deadline: {lost} messages were lost"
            )
        elif self._dropped or self._failed:
            self._warn(f"tracker {self._name}: {self._dropped} messages were dropped and {self._failed} failed")

    def _run(self) -> None:
        try:
            tracker = self._open_tracker()
            self._notify(f"tracker {self._name}: {tracker.location}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - others' code, which must not end a run
            self._stopped = True
            self._warn(f"tracker {self._name} could not be opened: {describe_error(error)}; {_RUN_CONTINUES}")
            with contextlib.suppress(Empty):
                self._messages.get_nowait()  # `close` may be waiting for room in the queue
            return
        while not self._stopped and (message := self._messages.get()) is not None:
            self._send(tracker, message)
        self._send(tracker, lambda opened: opened.close())

    def _send(self, tracker: Tracker, message: Message) -> None:
        try:
            message(tracker)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            self._failed += 1
            if self._failed == 1:
                self._warn(f"tracker {self._name} failed: {describe_error(error)}; {_RUN_CONTINUES}")


class Trackers:
    """Experiment trackers of one run. Only :meth:`close` waits for them."""

    def __init__(
        self,
        telemetry: TelemetrySettings,
        run: RunDirectory | None,
        *,
        notify: Callable[[str], object],
        warn: Callable[[str], object],
    ) -> None:
        """Create the trackers of ``run``. On all ranks except 0, ``run`` is None."""
        self._telemetry, self._run, self._notify, self._warn = telemetry, run, notify, warn
        self._threads: list[TrackerThread] = []
        self._due_step: int | None = None  # step whose sample is sent next

    def start(self, settings: Mapping[str, object], *, step: int, resumed: bool) -> None:
        """Open the trackers after ``step`` completed steps. If ``resumed``, continue the existing tracker runs."""
        run = self._run
        if run is None:
            return
        for name in self._telemetry.trackers:
            opening = partial(self._open_tracker_of_run, name, run, dotted_keys(settings), step=step, resumed=resumed)
            self._threads.append(TrackerThread(name, opening, notify=self._notify, warn=self._warn))

    def log_metrics(self, row: Metrics) -> None:
        """Send a row of ``metrics.jsonl`` and, if due, a sample of the previous step's trajectories.

        The sample is sent one step later, because the trajectories of a step are written during the next step.
        """
        step = int(row["step"])
        numbers = {key: value for key, value in row.items() if key != "step"}
        every, trained = self._telemetry.tracker_tables_every, "policy/updates" in row
        if trained:
            self._send_due_table()  # before the metrics: wandb drops data of earlier steps
        self._send(lambda tracker: tracker.metrics(step, numbers))
        if trained and every and step % every == 0:
            self._due_step = step

    def log_samples(self, table: SampleTable) -> None:
        """Send a table of trajectories."""
        self._send(lambda tracker: tracker.trajectories(table))

    def log_plots(self) -> None:
        """Send the plots in the run directory."""
        if self._run is not None:
            files = sorted(self._run.plots.glob("*.png"))
            self._send(lambda tracker: tracker.plots(files))

    def close(self) -> None:
        """Wait until everything is sent, for at most ``telemetry.tracker_deadline`` seconds in total."""
        self._send_due_table()
        deadline = time.monotonic() + self._telemetry.tracker_deadline
        for thread in self._threads:
            thread.close(deadline)
        self._threads.clear()

    def _send(self, message: Callable[[Tracker], object]) -> None:
        for thread in self._threads:
            thread.put(message)

    def _send_due_table(self) -> None:
        step, run, self._due_step = self._due_step, self._run, None
        if step is not None and run is not None:
            self._send(lambda tracker: self._send_table(tracker, run, step))

    def _send_table(self, tracker: Tracker, run: RunDirectory, step: int) -> None:
        if run.trajectory_file(step).exists():
            first = itertools.islice(run.read_trajectories(step), self._telemetry.tracker_rows)
            tracker.trajectories(
                SampleTable(step=step, columns=SAMPLE_COLUMNS, rows=[format_sample_table_row(row) for row in first])
            )

    def _open_tracker_of_run(
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
                resume_id=known.read_text(encoding="utf-8") if resumed and known.exists() else None,
                step=step,
                open_deadline=self._telemetry.tracker_deadline / 2,
            )
        )
        atomic_write(known, lambda out: out.write(tracker.id.encode()))
        return tracker


def format_sample_table_row(record: JsonRecord) -> tuple[Cell, ...]:
    """Return the cells of a trajectory's record in the order of :data:`SAMPLE_COLUMNS`."""
    segments = record["segments"]
    model = [segment for segment in segments if segment["origin"] == "model"]
    parts = [
        ("problem", record["problem"]["statement"]),
        *((segment["origin"], segment["text"]) for segment in segments),
    ]
    conversation = "\n".join(f"--- {origin}\n{text}" for origin, text in parts)
    return (
        str(record["problem"]["id"]),
        record["group"],
        record["sample"],
        sum(segment["reward"] for segment in segments),
        record["ended"],
        record["verdict"],
        len(model),
        sum(len(segment["token_ids"]) for segment in model),
        conversation[:LONGEST_CONVERSATION],
    )
