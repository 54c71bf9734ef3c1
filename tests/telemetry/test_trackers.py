"""Trackers: the real packages without a network, and trackers that raise, block or are slow."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from warm import run_warm

from agentrl.errors import SettingsError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.telemetry.tracker_threads import SAMPLE_COLUMNS, Trackers, TrackerThread
from agentrl.telemetry.trackers import TRACKERS, SampleTable, TrackedRun, check_trackers, register_tracker

SCRIPT = Path(__file__).with_name("tracked_run.py")
DEADLINE = 60.0


class Recorded:
    """Tracker that records its calls."""

    location = "nowhere"

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.id = run.resume_id or "first"
        self.told: list[object] = []

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self.told.append((step, dict(row)))

    def trajectories(self, table: SampleTable) -> None:
        self.told.append(table)

    def plots(self, files: Sequence[Path]) -> None:
        self.told.append([file.name for file in files])

    def close(self) -> None:
        self.told.append("closed")


@pytest.fixture
def opened() -> Iterator[list[Recorded]]:
    """Register the tracker ``recorded``, and return its runs in order."""
    made: list[Recorded] = []

    @register_tracker("recorded")
    def recorded(run: TrackedRun) -> Recorded:
        made.append(Recorded(run))
        return made[-1]

    yield made
    TRACKERS._entries.clear()


def trackers_of(run: RunDirectory | None, said: list[str], *names: str, **settings: Any) -> Trackers:
    telemetry = TelemetrySettings(trackers=names, **settings)
    return Trackers(telemetry, run, notify=said.append, warn=said.append)


def thread_of(said: list[str], tracker: Recorded, **settings: Any) -> TrackerThread:
    return TrackerThread("mine", lambda: tracker, notify=said.append, warn=said.append, **settings)


def soon() -> float:
    return time.monotonic() + DEADLINE


def test_a_tracker_of_ones_own_is_told_everything_in_order(tmp_path: Path, opened: list[Recorded]) -> None:
    run, said = RunDirectory.create(tmp_path / "x", "seed: 1\n"), []
    trackers = trackers_of(run, said, "recorded", tracker_tables_every=2, tracker_project="p")
    trackers.start({"seed": 1, "model": {"path": None}}, step=0, resumed=False)
    trackers.log_metrics({"step": 0, "eval/avg_at_k": 0.5})
    trackers.log_metrics({"step": 1, "policy/updates": 1})
    trackers.log_metrics({"step": 2, "policy/updates": 1})  # its trajectories were not recorded
    (run.plots / "reward.png").touch()
    trackers.log_plots()
    trackers.close()
    (tracker,) = opened
    assert (tracker.run.name, tracker.run.project, tracker.run.step) == ("x", "p", 0)
    assert tracker.run.settings == {"seed": 1, "model.path": None}
    rows = [(0, {"eval/avg_at_k": 0.5}), (1, {"policy/updates": 1}), (2, {"policy/updates": 1})]
    assert tracker.told == [*rows, ["reward.png"], "closed"]
    assert said == ["tracker recorded: nowhere"]


def test_a_resumed_run_continues_and_a_new_one_does_not(tmp_path: Path, opened: list[Recorded]) -> None:
    run = RunDirectory.create(tmp_path / "x", "seed: 1\n")
    for resumed in (False, True, False):
        trackers = trackers_of(run, [], "recorded")
        trackers.start({}, step=3, resumed=resumed)
        trackers.close()
    assert [(one.run.resume_id, one.run.step) for one in opened] == [(None, 3), ("first", 3), (None, 3)]


def test_ranks_without_a_run_directory_have_no_tracker(opened: list[Recorded]) -> None:
    trackers = trackers_of(None, [], "recorded")
    trackers.start({}, step=0, resumed=False)
    trackers.log_metrics({"step": 1})
    trackers.log_plots()
    trackers.close()
    assert opened == []


def test_a_tracker_that_cannot_be_opened_is_said_once() -> None:
    said: list[str] = []

    def opening() -> Recorded:
        raise ConnectionError("no route")

    thread = TrackerThread("mine", opening, notify=said.append, warn=said.append)
    for _ in range(5):
        thread.put(lambda tracker: tracker.metrics(1, {}))
    thread.close(soon())
    assert len(said) == 1
    assert said[0].startswith("tracker mine could not be opened: ConnectionError: no route (")
    assert said[0].endswith("; the run continues, and its directory contains all data")


def test_the_end_does_not_wait_for_a_tracker_that_cannot_be_opened() -> None:
    full = threading.Event()

    def opening() -> Recorded:
        assert full.wait(DEADLINE)
        time.sleep(0.1)  # until `close` waits for room in the queue
        raise ConnectionError("no route")

    thread = TrackerThread("mine", opening, notify=print, warn=print, longest_queue=1)
    thread.put(lambda tracker: tracker.metrics(1, {}))
    full.set()
    began = time.monotonic()
    thread.close(began + 10)
    assert time.monotonic() - began < 5


def test_a_tracker_that_raises_is_said_once_and_told_the_rest() -> None:
    said: list[str] = []
    tracker = Recorded(
        TrackedRun(name="x", project="p", settings={}, folder=Path(), resume_id=None, step=0, open_deadline=1)
    )
    thread = thread_of(said, tracker)
    thread.put(lambda one: 1 / 0)
    thread.put(lambda one: 1 / 0)
    thread.put(lambda one: one.metrics(3, {}))
    thread.close(soon())
    assert tracker.told == [(3, {}), "closed"]
    assert said[1].startswith("tracker mine failed: ZeroDivisionError")
    assert said[2:] == ["tracker mine: 0 messages were dropped and 2 failed"]


def test_a_tracker_that_blocks_for_ever_costs_nothing_and_ends_with_the_deadline() -> None:
    said: list[str] = []
    held, reached = threading.Event(), threading.Event()
    tracker = Recorded(
        TrackedRun(name="x", project="p", settings={}, folder=Path(), resume_id=None, step=0, open_deadline=1)
    )
    thread = thread_of(said, tracker, longest_queue=10)
    thread.put(lambda one: (reached.set(), held.wait()))
    assert reached.wait(DEADLINE)
    for step in range(100):
        thread.put(lambda one, step=step: one.metrics(step, {}))
    thread.close(time.monotonic())
    assert said == [
        "tracker mine: nowhere",
        "tracker mine is too slow, so messages are dropped; the run continues, and its directory contains all data",
        "tracker mine did not finish within telemetry.tracker_deadline: 100 messages were lost",
    ]
    held.set()
    thread._thread.join(DEADLINE)
    assert tracker.told in ([], ["closed"])  # what waited is not sent after the end


def test_a_slow_tracker_gets_everything_that_fits_before_the_end() -> None:
    said: list[str] = []
    go = threading.Event()
    tracker = Recorded(
        TrackedRun(name="x", project="p", settings={}, folder=Path(), resume_id=None, step=0, open_deadline=1)
    )
    thread = thread_of(said, tracker, longest_queue=4)
    thread.put(lambda one: go.wait(DEADLINE))
    for step in range(3):
        thread.put(lambda one, step=step: one.metrics(step, {}))
    go.set()
    thread.close(soon())
    assert tracker.told == [(0, {}), (1, {}), (2, {}), "closed"]
    assert said == ["tracker mine: nowhere"]


def test_a_name_that_is_none_and_a_package_that_is_missing_end_with_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"unknown tracker 'wandbb'; did you mean 'wandb'\? \(valid: mlflow, tensor"):
        TelemetrySettings(trackers=("wandbb",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"wandb is not installed: run pip install 'agentrl-trainer\[wandb\]'"):
        check_trackers(["wandb"])
    check_trackers([])


# -- the real packages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the trackers' data of a run of three steps that was stopped after its checkpoint at step 2 and resumed."""
    folder = tmp_path_factory.mktemp("tracked")
    places = {"HOME": str(folder), "TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline"}
    switches = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "OMP_NUM_THREADS": "1"}

    def play(*arguments: str) -> str:
        environment = {**os.environ, **places, **switches, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, str(SCRIPT), *arguments]
        done = run_warm(command, env=environment, cwd=folder, timeout=600)
        assert done.returncode == 0, done.stdout
        assert "WARNING tracker" not in done.stdout
        return str(done.stdout)

    play("tell", str(folder), "0", "3")
    play("tell", str(folder), "2", "4")
    (line,) = (line for line in play("read", str(folder)).splitlines() if line.startswith('{"wandb"'))
    return dict(json.loads(line))


REWARDS = [0.125, 0.25, 0.375, 0.5]


@pytest.mark.slow
def test_wandb_offline_holds_rows_settings_tables_and_one_run(found: dict[str, Any]) -> None:
    wandb = found["wandb"]
    assert [one[1:] for one in wandb["ids"]] == [["tests", "tracked"]]
    assert wandb["rank"] == 4
    rows = [row for row in wandb["rows"] if "reward/mean" in row]
    assert [(row["_step"], row["reward/mean"]) for row in rows] == [(step, step / 8) for step in (1, 2, 3, 3, 4)]
    assert [row["_step"] for row in wandb["rows"] if row.get("eval/avg_at_k") == 0.5] == [3, 4]
    assert any("plots/reward/path" in row for row in wandb["rows"])
    check_table(wandb["tables"][0])


@pytest.mark.slow
def test_trackio_continues_its_run(found: dict[str, Any]) -> None:
    trackio = found["trackio"]
    assert trackio["ids"] == [trackio["own"]]
    rewards = {row["step"]: row["reward/mean"] for row in trackio["rows"] if "reward/mean" in row}
    assert rewards == dict(enumerate(REWARDS, start=1))
    assert {row["step"] for row in trackio["rows"] if row.get("eval/avg_at_k") == 0.5} == {3, 4}
    (table, *_) = (row["trajectories"] for row in trackio["rows"] if "trajectories" in row)
    assert [row["problem"] for row in table["_value"]] == ["p0", "p1"]
    assert any("plots/reward" in row for row in trackio["rows"])


@pytest.mark.slow
def test_tensorboard_files_replace_what_is_told_again(found: dict[str, Any]) -> None:
    board = found["tensorboard"]
    assert board["scalars"]["reward/mean"] == [[step, step / 8] for step in (1, 2, 3, 4)]
    assert board["scalars"]["eval/avg_at_k"] == [[4, 0.5]]
    assert "model.lora.rank: 4" in board["texts"]["settings/text_summary"]
    table = board["texts"]["trajectories/text_summary"]
    assert table.startswith("|".join(SAMPLE_COLUMNS))
    assert "print(0) &#124; &lt;b><br>" in table
    assert board["images"] == ["plots/reward"]


@pytest.mark.slow
def test_mlflow_holds_one_finished_run(found: dict[str, Any]) -> None:
    mlflow = found["mlflow"]
    assert (mlflow["runs"], mlflow["name"], mlflow["status"], mlflow["rank"]) == (1, "tracked", "FINISHED", "4")
    assert mlflow["history"]["reward/mean"] == [[step, step / 8] for step in (1, 2, 3, 3, 4)]
    check_table(mlflow["tables"][0])
    assert mlflow["plots"] == ["plots/reward.png"]


def check_table(table: dict[str, Any]) -> None:
    assert table["columns"] == list(SAMPLE_COLUMNS)
    first, second = table["data"]
    assert first[:8] == ["p0", 0, 0, 0.75, "answered", None, 2, 3]
    assert first[8].startswith("--- problem\nWhat?\n--- model\nprint(0)")
    assert second[0] == "p1"
