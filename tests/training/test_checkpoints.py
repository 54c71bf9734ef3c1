from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed
from training.conftest import CommandLine

from agentrl.errors import WorldError
from agentrl.telemetry.files import checksum, describe_damaged_files
from agentrl.training.engine import checkpoint
from agentrl.training.engine.checkpoint import CheckpointWriter, RunState, open_newest_checkpoint
from agentrl.training.engine.parts import RankState, RankStateMetadata
from agentrl.training.settings import CheckpointSettings

MODEL, CRITIC = (f"{folder}/part-00000.safetensors" for folder in ("engine", "critic"))


class FakeEngine(SimpleNamespace):
    """An engine whose state is one parameter."""

    def copy_rank_state(self) -> RankState:
        facts = RankStateMetadata(starts={"a": 0}, shapes={"a": [1000]}, adam_steps=None, updates=0)
        return RankState(
            metadata=facts, tensors={"weight/a": torch.arange(1000.0), "random/cpu": torch.get_rng_state()}
        )


def save_checkpoint(root: Path, engine: Any, state: RunState, *, keep: int) -> None:
    writer = CheckpointWriter(root, CheckpointSettings(keep=keep), published=lambda state: None)
    writer.save({"engine": engine, "critic": engine}, state)


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


def opened(root: Path, *, keep: int = 3) -> tuple[str, int, list[str]]:
    said: list[str] = []
    found = open_newest_checkpoint(root, keep=keep, warn=said.append)
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
    assert opened(root) == ("step-000003", 3, [])
    assert open_newest_checkpoint(root / "none", keep=1, warn=pytest.fail) is None


@pytest.mark.parametrize("file", [MODEL, CRITIC, "state.json"])
@pytest.mark.parametrize("harm", [flip, cut, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    root: Path, alone: Any, file: str, harm: Callable[[Path], None]
) -> None:
    harm(root / "step-000003" / file)
    if file == "state.json" and harm is Path.unlink:
        assert opened(root) == ("step-000002", 2, [])  # it was never complete
        return
    name, step, (line,) = opened(root)
    assert (name, step) == ("step-000002", 2)
    assert line.startswith(f"the checkpoint {root / 'step-000003'} is damaged ({file}")
    assert line.endswith("renamed to step-000003.damaged; resuming from step-000002")
    assert names(root) == ["step-000001", "step-000002", "step-000003.damaged"]
    assert opened(root) == ("step-000002", 2, [])


def test_where_none_is_whole_nothing_is_touched(root: Path, alone: Any) -> None:
    for step in (1, 2, 3):
        flip(root / f"step-00000{step}" / MODEL)
    with pytest.raises(WorldError, match=r"every checkpoint .* is damaged \(step-000003: engine/part-00000.*copy"):
        open_newest_checkpoint(root, keep=1, warn=pytest.fail)
    assert names(root) == ["step-000001", "step-000002", "step-000003"]


def test_what_a_killed_process_had_still_to_prune_goes_at_the_next_start(root: Path, alone: Any) -> None:
    assert opened(root, keep=1) == ("step-000003", 3, [])
    assert names(root) == ["step-000003"]


def test_the_newest_complete_checkpoint_is_found_whatever_a_kill_left(root: Path, alone: Any) -> None:
    (root / ".step-000004.partial" / "engine").mkdir(parents=True)
    # Complete, but killed before the rename, with one of the same step from before.
    shutil.copytree(root / "step-000003", root / ".step-000003.partial")
    flip(root / "step-000003" / CRITIC)
    assert opened(root) == ("step-000003", 3, [])
    assert names(root) == ["step-000001", "step-000002", "step-000003"]


class HeldUp(FakeEngine):
    """Its files are not written before ``go``; then with an error if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.go, self.error = Event(), error

    def copy_rank_state(self) -> RankState:
        part = super().copy_rank_state()

        def write(path: Path) -> None:
            assert self.go.wait(60)
            if self.error is not None:
                raise self.error
            part.write(path)

        return cast(RankState, SimpleNamespace(write=write))


def beside_training(
    root: Path, *, keep: int = 3, asynchronous: bool | None = True
) -> tuple[CheckpointWriter, list[int]]:
    published: list[int] = []
    settings = CheckpointSettings(keep=keep, asynchronous=asynchronous)
    return CheckpointWriter(root, settings, published=lambda state: published.append(state.step)), published


def test_a_checkpoint_written_beside_training_has_the_same_bytes(root: Path, alone: Any, tmp_path: Path) -> None:
    writer, published = beside_training(tmp_path / "beside")
    changing = state(3)
    writer.save({"engine": alone, "critic": alone}, changing)
    changing.evaluations.append({})  # type: ignore[typeddict-item]
    writer.publish_pending()
    assert published == [3]
    folders = root / "step-000003", tmp_path / "beside" / "step-000003"
    for name in (MODEL, CRITIC, "state.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_a_large_checkpoint_is_written_beside_training(root: Path, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, published = beside_training(root, asynchronous=None)
    writer.save({"engine": alone}, state(4))
    assert published == [4]
    monkeypatch.setattr(checkpoint, "_LARGE", alone.copy_rank_state().size_in_bytes - 1)
    writer.save({"engine": alone}, state(5))
    assert published == [4]
    writer.publish_pending()
    assert published == [4, 5]


def test_a_checkpoint_counts_only_when_all_of_it_is_written(root: Path, alone: Any, tmp_path: Path) -> None:
    held = HeldUp()
    writer, published = beside_training(root)
    writer.save({"engine": held}, state(4))
    writer.publish_pending(wait=False)
    assert published == []
    killed = Path(shutil.copytree(root, tmp_path / "killed"))  # what a kill at this moment leaves
    assert opened(killed) == ("step-000003", 3, [])
    assert names(killed) == ["step-000001", "step-000002", "step-000003"]
    held.go.set()
    writer.save({"engine": alone}, state(5))  # ends the one before
    writer.publish_pending()
    assert published == [4, 5]
    assert names(root) == ["step-000003", "step-000004", "step-000005"]


def test_a_failure_beside_training_is_reported_and_leaves_nothing(root: Path, alone: Any) -> None:
    held = HeldUp(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    writer, published = beside_training(root)
    writer.save({"engine": held}, state(4))
    held.go.set()
    with pytest.raises(WorldError, match=r"cannot write a checkpoint to .*step-000004.*No space left on device"):
        writer.publish_pending()
    assert published == []
    assert names(root) == ["step-000001", "step-000002", "step-000003"]
    writer.publish_pending()  # there is none any more


def test_ranks_check_every_file_between_them(root: Path) -> None:
    folder = root / "step-000003"
    whole = {name: checksum(folder / name) for name in (MODEL, CRITIC)}
    for file in whole:
        flip(folder / file)
    found = [problem for part in range(2) for problem in describe_damaged_files(folder, whole, part=part, parts=2)]
    assert found == [f"{file} has changed since it was written" for file in sorted(whole)]


@pytest.mark.slow
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(command_line: CommandLine, random_policy: Path) -> None:
    command_line.run(*command_line.counting(random_policy, "name=hurt", "training.steps=3", "checkpoint.every=1"))
    checkpoints = command_line.folder / "runs" / "hurt" / "checkpoints"
    flip(checkpoints / "step-000003" / MODEL)
    said = command_line.run("train", "--resume", "name=hurt")
    assert said.count("is damaged") == 1
    assert "resumed after step 2" in said
    assert command_line.steps("hurt") == [1, 2, 3]
    for name in ("step-000002", "step-000003"):
        cut(checkpoints / name / MODEL)
    before = command_line.metrics("hurt")
    said = command_line.run("train", "--resume", "name=hurt", code=1)
    assert "every checkpoint in runs/hurt/checkpoints is damaged" in said
    assert "Traceback" not in said
    assert command_line.metrics("hurt") == before


# The policy's export has 112 kB; the state, of which each of two ranks writes half, 353 kB.
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "most", "what"), [(1, 80_000, "the best policy"), (2, 170_000, "a checkpoint")])
def test_a_full_disk_ends_in_one_message_and_nothing_half_written_stays(
    command_line: CommandLine, random_policy: Path, ranks: int, most: int, what: str
) -> None:
    own = ["name=full", "training.steps=2", "checkpoint.every=1", f"training.num_processes={ranks}"]
    # A process forked for a rank may begin before the limit does.
    process = command_line.start(*command_line.counting(random_policy, *own), fresh=ranks > 1)
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
