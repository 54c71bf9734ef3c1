from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from training.conftest import CommandLine

from agentrl.errors import SettingsError, WorldError
from agentrl.training.engine.checkpoint import RunState, open_newest, save_checkpoint
from agentrl.training.engine.checksums import checksums, damaged


class FakeEngine(SimpleNamespace):
    """Writes two files; one rank of one."""

    rank = 0
    world_size = 1

    def save(self, directory: Path) -> None:
        (directory / "engine").mkdir()
        (directory / "engine" / "model.pt").write_bytes(b"weights" * 1000)
        (directory / "random-0.pt").write_bytes(b"random")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield FakeEngine()
    torch.distributed.destroy_process_group()


def state(step: int, *, ranks: int = 1) -> RunState:
    return RunState(step=step, updates=step, ranks=ranks, worker={"at": {2: (step, 1), 10: ()}}, evaluations=[], rows=0)


@pytest.fixture
def root(tmp_path: Path, alone: Any) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (1, 2, 3):
        save_checkpoint(folder, alone, state(step), keep=3)
    return folder


def opened(root: Path, engine: Any, *, keep: int = 3) -> tuple[str, int, list[str]]:
    said: list[str] = []
    found = open_newest(root, engine, keep=keep, warn=said.append)
    assert found is not None
    return found[0].name, found[1].step, said


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_the_newest_whole_checkpoint_is_opened(root: Path, alone: Any) -> None:
    assert opened(root, alone) == ("step-000003", 3, [])
    assert open_newest(root / "none", alone, keep=1, warn=pytest.fail) is None


@pytest.mark.parametrize("file", ["engine/model.pt", "random-0.pt", "state.json"])
@pytest.mark.parametrize("harm", [flip, cut, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    root: Path, alone: Any, file: str, harm: Callable[[Path], None]
) -> None:
    harm(root / "step-000003" / file)
    if file == "state.json" and harm is Path.unlink:
        assert opened(root, alone) == ("step-000002", 2, [])  # it was never complete
        return
    name, step, (line,) = opened(root, alone)
    assert (name, step) == ("step-000002", 2)
    assert line.startswith(f"the checkpoint {root / 'step-000003'} is damaged ({file}")
    assert line.endswith("renamed to step-000003.damaged; step-000002 is used instead")
    assert names(root) == ["step-000001", "step-000002", "step-000003.damaged"]
    assert opened(root, alone) == ("step-000002", 2, [])


def test_where_none_is_whole_nothing_is_touched(root: Path, alone: Any) -> None:
    for step in (1, 2, 3):
        flip(root / f"step-00000{step}" / "engine" / "model.pt")
    with pytest.raises(WorldError, match=r"no checkpoint .* is whole \(step-000003: engine/model.pt .*copy"):
        open_newest(root, alone, keep=1, warn=pytest.fail)
    assert names(root) == ["step-000001", "step-000002", "step-000003"]


def test_what_a_killed_process_had_still_to_prune_goes_at_the_next_start(root: Path, alone: Any) -> None:
    assert opened(root, alone, keep=1) == ("step-000003", 3, [])
    assert names(root) == ["step-000003"]


def test_the_newest_complete_checkpoint_is_found_whatever_a_kill_left(root: Path, alone: Any) -> None:
    (root / ".step-000004.partial" / "engine").mkdir(parents=True)
    # Complete, but killed before the rename, with one of the same step from before.
    shutil.copytree(root / "step-000003", root / ".step-000003.partial")
    flip(root / "step-000003" / "random-0.pt")
    assert opened(root, alone) == ("step-000003", 3, [])
    assert names(root) == ["step-000001", "step-000002", "step-000003"]


def test_a_checkpoint_of_other_ranks_is_refused(root: Path, alone: Any) -> None:
    save_checkpoint(root, alone, state(4, ranks=2), keep=3)
    with pytest.raises(SettingsError, match=r"written by 2 training ranks .* resume with training\.num_processes=2"):
        open_newest(root, alone, keep=3, warn=pytest.fail)


def test_ranks_check_every_file_between_them(root: Path) -> None:
    folder = root / "step-000003"
    whole = checksums(folder)
    parts = [checksums(folder, part=part, parts=2) for part in range(2)]
    assert parts[0] | parts[1] == whole
    assert not parts[0].keys() & parts[1].keys()
    for file in whole:
        flip(folder / file)
    found = [problem for part in range(2) for problem in damaged(folder, whole, part=part, parts=2)]
    assert sorted(found) == [f"{file} has changed since it was written" for file in sorted(whole)]


@pytest.mark.slow
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(command_line: CommandLine, random_policy: Path) -> None:
    command_line.run(*command_line.counting(random_policy, "name=hurt", "training.steps=3", "checkpoint.every=1"))
    checkpoints = command_line.folder / "runs" / "hurt" / "checkpoints"
    flip(checkpoints / "step-000003" / "engine" / "mp_rank_00_model_states.pt")
    said = command_line.run("train", "--resume", "name=hurt")
    assert said.count("is damaged") == 1
    assert "resumed after step 2" in said
    assert command_line.steps("hurt") == [1, 2, 3]
    for name in ("step-000002", "step-000003"):
        cut(checkpoints / name / "random-0.pt")
    before = command_line.metrics("hurt")
    said = command_line.run("train", "--resume", "name=hurt", code=1)
    assert "no checkpoint in runs/hurt/checkpoints is whole" in said
    assert "Traceback" not in said
    assert command_line.metrics("hurt") == before


# The policy's export has 158 kB; the optimizer's state, of which each of two ranks writes half, 360 kB.
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "most", "what"), [(1, 80_000, "the best policy"), (2, 170_000, "a checkpoint")])
def test_a_full_disk_ends_in_one_message_and_nothing_half_written_stays(
    command_line: CommandLine, random_policy: Path, ranks: int, most: int, what: str
) -> None:
    own = ["name=full", "training.steps=2", "checkpoint.every=1", f"training.num_processes={ranks}"]
    process = command_line.start(*command_line.counting(random_policy, *own))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))  # what a write meets on a full disk
    said = process.communicate(timeout=900)[0]
    assert process.returncode == 1, said
    assert f"cannot write {what} to " in said
    assert "Traceback" not in said
    checkpoints = command_line.folder / "runs" / "full" / "checkpoints"
    assert list(checkpoints.glob("*step-*")) == []
    command_line.run("train", "--resume", "name=full")
    assert command_line.steps("full") == [1, 2]
    assert json.loads((checkpoints / "step-000002" / "state.json").read_text())["state"]["step"] == 2
