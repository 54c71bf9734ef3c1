from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import SettingsError, WorldError
from agentrl.telemetry import run_directory, trajectory_file
from agentrl.telemetry.files import BackgroundWriter, atomic_write, repair_torn_line
from agentrl.telemetry.run_directory import RunDirectory

CONFIG = "name: x\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs" / "x", CONFIG)


def reopened(run: RunDirectory) -> RunDirectory:
    run.close()
    return RunDirectory.resume(run.path)


def test_a_new_run_holds_its_config_and_its_folders(run: RunDirectory) -> None:
    assert run.config.read_text() == CONFIG
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "lock",
        "metrics.jsonl",
        "plots",
        "trajectories",
    ]


def test_a_directory_that_holds_anything_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    with pytest.raises(
        SettingsError, match=r"x is not empty \(it contains thesis.txt\): continue that run with --resume"
    ):
        RunDirectory.create(folder, CONFIG)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_what_a_run_killed_at_birth_leaves_is_no_hindrance(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / ".config.yaml.77.partial").write_text("na")
    run = RunDirectory.create(folder, CONFIG)
    assert run.config.read_text() == CONFIG
    assert not list(folder.glob(".*"))


def test_a_run_that_never_wrote_a_row_gives_its_name_back(tmp_path: Path) -> None:
    with closing(RunDirectory.create(tmp_path / "x", "a: mistake\n")) as run:
        run.logs.mkdir()
        (run.logs / "here-rank-0.log").write_text("error: a mistake\n")
    with closing(RunDirectory.create(tmp_path / "x", CONFIG)) as run:
        assert run.config.read_text() == CONFIG
        run.append_metrics({"step": 0})
    with pytest.raises(SettingsError, match="is not empty"):
        RunDirectory.create(tmp_path / "x", CONFIG)


@pytest.mark.parametrize("left", ["checkpoints/step-000001", "plots/reward.png", "trajectories/1.zst", "notes.txt"])
def test_a_run_that_left_anything_else_keeps_its_directory(tmp_path: Path, left: str) -> None:
    RunDirectory.create(tmp_path / "x", CONFIG).close()
    (tmp_path / "x" / left).touch()
    with pytest.raises(SettingsError, match="is not empty"):
        RunDirectory.create(tmp_path / "x", CONFIG)


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(SettingsError, match="is a file: choose another name"):
        RunDirectory.create(tmp_path / "x", CONFIG)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()  # a file where a folder must be: refused for every user, root included
    with pytest.raises(SettingsError, match=r"cannot write to the run directory .*runs/x \(Not a directory\): choose"):
        RunDirectory.create(tmp_path / "runs" / "x", CONFIG)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="not a run directory"):
        RunDirectory.resume(tmp_path)


def test_one_process_at_a_time(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "LOCK_DEADLINE", 0.1)
    with pytest.raises(SettingsError, match="another process is using the run directory"):
        RunDirectory.resume(run.path)
    assert reopened(run).config.read_text() == CONFIG


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from agentrl.telemetry.run_directory import RunDirectory\n"
        f"run = RunDirectory.create({str(tmp_path / 'x')!r}, {CONFIG!r})\n"
        "run.append_metrics({'step': 1}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -9
    assert list(RunDirectory.resume(tmp_path / "x").metrics()) == [{"step": 1}]


def test_metrics_come_back_in_order(run: RunDirectory) -> None:
    rows = [{"step": 0, "eval/avg_at_k": 0.25}, {"step": 1, "reward/mean": 0.1}, {"step": 2, "note": "ü\n"}]
    for row in rows:
        run.append_metrics(row)
    assert list(run.metrics()) == rows
    assert len(run.metrics_file.read_text().splitlines()) == 3


@pytest.mark.parametrize("row", [{}, {"step": "1"}, {"step": 1, "x": float("nan")}, {"step": 1, "x": float("inf")}])
def test_a_row_that_json_cannot_say_is_refused_and_writes_nothing(run: RunDirectory, row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"step|JSON"):
        run.append_metrics(row)
    assert run.metrics_file.read_bytes() == b""


def test_a_torn_last_line_is_left_out_and_cut_on_resume(run: RunDirectory) -> None:
    run.append_metrics({"step": 1})
    with run.metrics_file.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert list(run.metrics()) == [{"step": 1}]
    run = reopened(run)
    run.append_metrics({"step": 2})
    assert list(run.metrics()) == [{"step": 1}, {"step": 2}]


def test_damage_elsewhere_is_named(run: RunDirectory) -> None:
    run.metrics_file.write_bytes(b'{"step": 1}\nrubbish\n{"step": 3}\n')
    with pytest.raises(WorldError, match=r"metrics.jsonl, line 2 is damaged: invalid JSON"):
        list(run.metrics())
    run.metrics_file.write_bytes(b"[1]\n")
    with pytest.raises(WorldError, match=r"line 1 is damaged: not a JSON object"):
        list(run.metrics())


@given(data=st.binary(max_size=200), blocks=st.integers(0, 2))
def test_repair_keeps_exactly_the_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, blocks: int
) -> None:
    file = tmp_path_factory.mktemp("torn") / "file"
    content = data + b"x" * (65_536 * blocks)
    file.write_bytes(content)
    whole = content[: content.rfind(b"\n") + 1]
    assert repair_torn_line(file) == len(content) - len(whole)
    assert file.read_bytes() == whole
    assert repair_torn_line(file) == 0


def test_trajectories_are_compressed_and_come_back(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_file, "_MIN_BLOCK_SIZE", 600)  # four blocks
    seen = {"origin": "observation", "token_ids": [3, 4], "log_probs": [], "text": "é"}
    rows = [
        {
            "id": f"p-{place}",
            "prompt_ids": list(range(place)),
            "segments": [{"origin": "model", "token_ids": [place] * 9, "log_probs": [-1 / (place + 3)] * 9}, seen],
            "numbers": [place, 0.5],
        }
        for place in range(40)
    ]
    path = run.write_trajectories(12, iter(rows))
    assert path.name == "00000012.parquet"
    assert list(run.read_trajectories(12)) == rows
    assert 1 < pq.ParquetFile(path).num_row_groups < 40
    assert run.steps_with_trajectories() == [12]
    found = run.select_trajectories(12, lambda place, line: place > 37 or b'"p-2"' in line)
    assert list(found) == [(place, rows[place]) for place in (2, 38, 39)]


def test_a_file_is_written_beside_the_caller_who_learns_of_an_error_with_the_next_one() -> None:
    writer, go, written = BackgroundWriter("test"), threading.Event(), list[str]()

    def slow() -> None:
        assert go.wait(60)
        written.append("slow")

    def full() -> None:
        raise WorldError("the disk is full")

    writer.submit(slow)
    assert not written  # submit has returned
    go.set()
    writer.submit(full)
    assert written == ["slow"]
    with pytest.raises(WorldError, match="the disk is full"):
        writer.submit(slow)
    writer.wait()
    writer.submit(slow)
    writer.close()
    assert written == ["slow", "slow"]


def test_no_trajectories_are_an_empty_file(run: RunDirectory) -> None:
    run.write_trajectories(1, [])
    assert list(run.read_trajectories(1)) == []


def test_unreadable_trajectories_are_named(run: RunDirectory) -> None:
    with pytest.raises(WorldError, match=r"00000003.parquet: .*No such file"):
        list(run.read_trajectories(3))
    run.trajectory_file(4).write_bytes(b"not compressed")
    with pytest.raises(WorldError, match=r"cannot read the trajectories .*00000004"):
        list(run.read_trajectories(4))


@pytest.mark.parametrize("numbers", [{"token_ids": [1 << 31]}, {"log_probs": [None]}])
def test_numbers_that_cannot_be_stored_are_refused(run: RunDirectory, numbers: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a token id or log-probability cannot be stored: "):
        run.write_trajectories(1, [numbers])


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (pa.array(["{}"]), "damaged: its columns are "),
        (pa.array([None], pa.binary()), "line 1 is damaged: the record is missing"),
        (pa.array([b'{"prompt_ids": 2, "token_ids": -1}']), "line 1 is damaged "),
    ],
)
def test_trajectories_of_another_shape_are_named(run: RunDirectory, record: pa.Array, said: str) -> None:
    numbers = {"token_ids": pa.array([[7]], pa.list_(pa.int32())), "log_probs": pa.array([[]], pa.list_(pa.float64()))}
    run.trajectories.mkdir(exist_ok=True)
    pq.write_table(pa.table({"record": record, **numbers}), run.trajectory_file(1))
    with pytest.raises(WorldError, match=said):
        list(run.select_trajectories(1, lambda _number, line: b"x" not in line))


def test_a_failing_source_of_rows_leaves_no_file(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="JSON"):
        run.write_trajectories(1, [{"a": 1}, {"a": float("nan")}])
    assert list(run.trajectories.iterdir()) == []


def test_truncation_keeps_as_many_rows_as_a_checkpoint_knew_and_trajectories_up_to_its_step(run: RunDirectory) -> None:
    rows = [{"step": 0, "eval/k": 8}, {"step": 1}, {"step": 2}, {"step": 2, "eval/k": 8}, {"step": 3}]
    for row in rows:
        run.append_metrics(row)
    for step in (1, 2, 3, 10):
        run.write_trajectories(step, [{"step": step}])
    before = run.metrics_file.read_bytes().splitlines(keepends=True)
    run.truncate_after(2, rows=3)  # the evaluation at step 2 was played after the checkpoint
    assert run.metrics_file.read_bytes() == b"".join(before[:3])
    assert run.steps_with_trajectories() == [1, 2]
    run.truncate_after(2, rows=3)
    assert list(run.metrics()) == rows[:3]


def test_whole_files_are_replaced_or_kept(run: RunDirectory) -> None:
    run.write_summary({"eval": 0.5})
    with pytest.raises(ValueError, match="JSON"):
        run.write_summary({"eval": float("nan")})
    assert json.loads(run.summary.read_text()) == {"eval": 0.5}

    def fails(out: object) -> None:
        raise KeyError("half way")

    with pytest.raises(KeyError):
        atomic_write(run.summary, fails)
    assert json.loads(run.summary.read_text()) == {"eval": 0.5}
    assert not list(run.path.glob(".*"))


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    """A device is also written in place: ``--output /dev/null`` of a root user must not replace the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as end:
        atomic_write(pipe, lambda out: out.write(b"text"))
        assert end.read() == b"text"
    assert pipe.is_fifo()


def test_a_disk_that_fails_is_the_worlds_fault(run: RunDirectory) -> None:
    os.rmdir(run.plots)
    with pytest.raises(WorldError, match=r"cannot write .*plots/x: No such file or directory"):
        run.write_text("plots/x", "text")


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=40), max_size=3), max_size=30),
    repeated=st.integers(1, 4000),
    share=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=60, deadline=None)
def test_a_trajectory_file_that_is_cut_off_anywhere_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], repeated: int, share: float
) -> None:
    made = RunDirectory(tmp_path_factory.mktemp("run"))
    made.trajectories.mkdir()
    path = made.write_trajectories(3, rows * repeated)
    assert made.truncated_trajectory_files() == []
    assert list(made.read_trajectories(3)) == rows * repeated
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert made.truncated_trajectory_files() == [path]
    with pytest.raises(WorldError, match="cannot read the trajectories"):
        list(made.read_trajectories(3))
    path.write_bytes(whole + b"x")
    assert made.truncated_trajectory_files() == [path]
