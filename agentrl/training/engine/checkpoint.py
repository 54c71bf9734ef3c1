"""Checkpoints: everything that a run needs to resume exactly, on the same or a different number of ranks.

::

    step-000050/        engine/ and critic/ with one part per rank, and state.json with the checksums of all files
    step-000100.damaged/   a checkpoint whose files had changed when a run tried to resume from it

A checkpoint is complete once it contains state.json, even before it is renamed. Therefore a complete checkpoint remains
if the run is killed at any time. Not covered: a power failure before the disk has written all data.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch.distributed
from torch import nn

from agentrl.errors import SettingsError, WorldError
from agentrl.models.settings import LoRASettings
from agentrl.rollout.work_queue import QueueState
from agentrl.telemetry.files import atomic_write, checksum, describe_damaged_files, os_errors_as_world_errors
from agentrl.telemetry.records import EvaluationRecord
from agentrl.training.engine.collectives import gather_from_ranks, run_on_every_rank, run_on_rank_zero
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.engine.parts import RankState
from agentrl.training.settings import CheckpointSettings

_Value = TypeVar("_Value")
_STATE = "state.json"
_LARGE = 1_000_000_000  # bytes; larger states take seconds to write and are written asynchronously by default
_DIRECTORY_NAME = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.partial")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run except its engines' state."""

    step: int
    updates: int  # number of optimizer updates
    ranks: int  # number of ranks that wrote the checkpoint
    worker: QueueState
    evaluations: list[EvaluationRecord]
    rows: int  # number of rows in metrics.jsonl
    trainer: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None  # the reference policy's path
    adapter: AdapterRecord | None = None
    files: dict[str, str] = field(default_factory=dict)  # checksums of all other files


@dataclass(frozen=True, kw_only=True)
class _PendingCheckpoint:
    """A checkpoint that is being written. ``files`` maps this rank's files to their checksums."""

    state: RunState
    folder: Path
    files: Future[dict[str, str]]


class CheckpointWriter:
    """Writes checkpoints, optionally in the background, from a copy of the state in memory.

    All methods are collective. If writing fails, every rank raises WorldError, at the latest in
    :meth:`publish_pending`. A checkpoint that was not completed because a process was killed is never used.
    """

    def __init__(self, root: Path, settings: CheckpointSettings, *, published: Callable[[RunState], None]) -> None:
        """Configure the writer. ``published`` is called with each checkpoint's state once a run can resume from it."""
        self._root = root
        self._rank = torch.distributed.get_rank()
        self._settings = settings
        self._published = published
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _PendingCheckpoint | None = None

    def save(self, engines: Mapping[str, TrainingEngine[nn.Module]], state: RunState) -> None:
        """Finish the last checkpoint, and write ``root/step-N`` atomically, with a folder for each engine."""
        self.publish_pending()
        folder = self._root / f".step-{state.step:06d}.partial"

        def prepare() -> None:
            if self._rank == 0:
                repair_checkpoints(self._root)
                folder.mkdir(parents=True)

        _write_on_all_ranks(folder, prepare)
        parts = {f"{name}/part-{self._rank:05d}.safetensors": item.copy_rank_state() for name, item in engines.items()}
        files = self._thread.submit(_write_parts, folder, parts)
        # Copy the state, because the run continues to change it. The copy is equal to the result of read_run_state.
        state = RunState(**json.loads(json.dumps(asdict(state))))
        self._pending = _PendingCheckpoint(state=state, folder=folder, files=files)
        asynchronous = self._settings.asynchronous
        if asynchronous is None:
            asynchronous = sum(gather_from_ranks(sum(part.size_in_bytes for part in parts.values()))) > _LARGE
        if not asynchronous:
            self.publish_pending()

    def publish_pending(self, *, wait: bool = True) -> None:
        """Publish the pending checkpoint if every rank has written its part. With ``wait``, wait for all parts."""
        if self._pending is None:
            return
        write = self._pending
        if not wait and not all(gather_from_ranks(write.files.done())):
            return
        self._pending = None
        try:
            parts = _write_on_all_ranks(write.folder, write.files.result)
            _write_on_all_ranks(write.folder, lambda: self._publish(write, parts))
        except WorldError:
            if self._rank == 0 and not (write.folder / _STATE).is_file():
                shutil.rmtree(write.folder, ignore_errors=True)  # frees space on a full disk
            raise
        self._published(write.state)

    def close(self) -> None:
        """Stop the thread once it has written this rank's part of the pending checkpoint, if there is one."""
        self._thread.shutdown()

    def _publish(self, write: _PendingCheckpoint, parts: list[dict[str, str]]) -> None:
        if self._rank == 0:
            files = {name: digest for part in parts for name, digest in part.items()}
            body = asdict(replace(write.state, files=files))
            text = json.dumps({"state": body, "sha256": _digest(body)})
            atomic_write(write.folder / _STATE, lambda out: out.write(text.encode()))
            repair_checkpoints(self._root)
            delete_old_checkpoints(self._root, self._settings.keep)


def _write_parts(folder: Path, parts: Mapping[str, RankState]) -> dict[str, str]:
    for name, part in parts.items():
        part.write(folder / name)
    return {name: checksum(folder / name) for name in parts}


def open_newest_checkpoint(root: Path, *, keep: int, warn: Callable[[str], None]) -> tuple[Path, RunState] | None:
    """Return the newest undamaged checkpoint and its state, or None if there are no checkpoints. Collective.

    Renames newer checkpoints that are damaged, with a warning, and deletes all but the newest ``keep`` undamaged ones.
    Raises WorldError if every checkpoint is damaged.
    """

    def names_newest_first() -> list[str]:
        with os_errors_as_world_errors(root, "tidy"):
            repair_checkpoints(root)
        return [path.name for path in reversed(_complete_checkpoints(root))]

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    damaged: dict[str, str] = {}
    for name in run_on_rank_zero(names_newest_first):
        found = run_on_every_rank(partial(_find_damage, root / name, part=rank, parts=ranks))
        problems = [problem for part in found for problem in part]
        if problems:
            damaged[name] = problems[0]
            continue
        state = read_run_state(root / name)
        if rank == 0:
            with os_errors_as_world_errors(root, "tidy"):
                _rename_damaged(root, damaged, used=name, warn=warn)
                delete_old_checkpoints(root, keep)
        return root / name, state
    if damaged:
        listed = "; ".join(f"{name}: {problem}" for name, problem in damaged.items())
        raise WorldError(
            f"every checkpoint in {root} is damaged ({listed}): restore one from a copy, or start a new run with a "
            "different name=..."
        )
    return None


def newest_checkpoint_step(root: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0 if there is none. Reads no weights."""
    return max((_step_of(path) for path in _complete_checkpoints(root)), default=0)


def delete_old_checkpoints(root: Path, keep: int) -> None:
    """Delete all checkpoints except the newest ``keep``."""
    for old in _complete_checkpoints(root)[:-keep]:
        shutil.rmtree(old)


def repair_checkpoints(root: Path) -> None:
    """Rename complete checkpoints to their final names, and delete incomplete checkpoints left by a killed process."""
    for partial_folder in root.glob(".step-*.partial"):
        if not (partial_folder / _STATE).is_file():
            shutil.rmtree(partial_folder)
            continue
        final = root / partial_folder.name.removeprefix(".").removesuffix(".partial")
        if final.exists():
            shutil.rmtree(final)
        partial_folder.rename(final)


def read_run_state(checkpoint: Path) -> RunState:
    """Read the :class:`RunState` of a checkpoint. Raises WorldError if the file is missing or damaged."""
    try:
        return RunState(**json.loads((checkpoint / _STATE).read_text())["state"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise WorldError(f"the checkpoint {checkpoint} cannot be read: {error}") from error


def check_reference_matches(checkpoint: Path, state: RunState, path: str | None) -> None:
    """Raise SettingsError unless ``path`` is the reference policy of the run so far."""
    if state.reference != path:
        raise SettingsError(
            f"the policy in the checkpoint {checkpoint} was trained with the reference policy {state.reference}, but "
            f"the settings now select {path}: move the policy back, or set kl.reference"
        )


def _write_on_all_ranks(folder: Path, work: Callable[[], _Value]) -> list[_Value]:
    """Call ``work`` and return every rank's result. All ranks raise WorldError if one fails to write. Collective."""

    def guarded() -> _Value:
        with os_errors_as_world_errors(folder, "write a checkpoint to"):
            return work()

    return run_on_every_rank(guarded)


def _find_damage(checkpoint: Path, *, part: int, parts: int) -> list[str]:
    """Describe the damage to this rank's part of a checkpoint's files, or to the list of files."""
    try:
        written = json.loads((checkpoint / _STATE).read_bytes())
        body, digest = written["state"], written["sha256"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [f"{_STATE} cannot be read ({type(error).__name__})"]
    if _digest(body) != digest:
        return [f"{_STATE} has changed since it was written"]
    return describe_damaged_files(checkpoint, body["files"], part=part, parts=parts)


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _rename_damaged(root: Path, damaged: Mapping[str, str], *, used: str, warn: Callable[[str], None]) -> None:
    for name, problem in damaged.items():
        renamed = root / f"{name.removeprefix('.').removesuffix('.partial')}.damaged"
        shutil.rmtree(renamed, ignore_errors=True)
        (root / name).rename(renamed)
        warn(f"the checkpoint {root / name} is damaged ({problem}): renamed to {renamed.name}; resuming from {used}")


def _step_of(path: Path) -> int:
    found = _DIRECTORY_NAME.fullmatch(path.name)
    return int(found[1] or found[2]) if found else -1


def _complete_checkpoints(root: Path) -> list[Path]:
    """Return complete checkpoints in the order of their steps."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _step_of(path) >= 0 and (path / _STATE).is_file()]
    return sorted(found, key=lambda path: (_step_of(path), path.name.startswith(".")))


class AdapterRecord(TypedDict):
    """The adapters in a checkpoint, and their base model, which the checkpoint does not contain."""

    rank: int
    alpha: int
    targets: list[str]
    base: str


def adapter_record(settings: LoRASettings, *, base: str) -> AdapterRecord | None:
    """Return the record of a run's adapters on the model ``base``, or None without adapters."""
    if settings.rank == 0:
        return None
    return {"rank": settings.rank, "alpha": settings.alpha, "targets": sorted(settings.targets), "base": base}


def check_adapter_matches(checkpoint: Path, written: AdapterRecord | None, now: AdapterRecord | None) -> None:
    """Raise SettingsError unless the adapters of a checkpoint and a run match, or both have no adapters."""
    if written == now:
        return
    if written is None:
        raise SettingsError(
            f"the checkpoint {checkpoint} contains a full model without adapters: set model.lora.rank=0 to resume, "
            "or start a new run (a different name=...) with model.path=POLICY"
        )
    adapters = f"the checkpoint {checkpoint} contains adapters with model.lora.rank={written['rank']}"
    if now is None:
        raise SettingsError(f"{adapters} and no full model: set model.lora.rank={written['rank']} to resume")
    if written["base"] != now["base"]:
        raise SettingsError(
            f"{adapters} on the model {written['base']}, but model.path is now {now['base']}: set model.path to the "
            "former model to resume"
        )
    others = f"model.lora.alpha={written['alpha']} and model.lora.targets=[{', '.join(written['targets'])}]"
    raise SettingsError(f"{adapters}, {others}: set the same values to resume")
