"""Checkpoints: everything a run needs to resume as if it had never stopped.

::

    step-000050/        engine/ (DeepSpeed), critic/, random-RANK.pt, and state.json with every file's checksum
    step-000100.damaged/   its files had changed when a run tried to resume from it

A checkpoint is complete once it has state.json, even before it is renamed: a kill at any moment leaves a complete one.
Not covered: a machine that loses power before its disk has written all data.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn

from agentrl.errors import SettingsError, WorldError
from agentrl.rollout.work_queue import QueueState
from agentrl.telemetry.files import atomic_write, world_errors
from agentrl.telemetry.records import EvaluationRecord
from agentrl.training.engine.adapter import AdapterRecord
from agentrl.training.engine.checksums import checksums, damaged
from agentrl.training.engine.deepspeed_engine import TrainingEngine, from_rank_zero, on_every_rank

_Value = TypeVar("_Value")
_STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.partial")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run beside its engines."""

    step: int
    updates: int  # of the optimizer
    ranks: int
    worker: QueueState
    evaluations: list[EvaluationRecord]
    rows: int  # of metrics.jsonl
    trainer: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None  # the reference policy's path
    adapter: AdapterRecord | None = None
    files: dict[str, str] = field(default_factory=dict)  # checksums of all other files


class Saved(Protocol):
    """An object that writes itself into an existing directory, on all ranks at once."""

    def save(self, directory: Path) -> None: ...


def save_checkpoint(
    root: Path, engine: TrainingEngine[nn.Module], state: RunState, *, keep: int, also: Sequence[Saved] = ()
) -> Path:
    """Write ``root/step-N``, complete or not at all, and delete all but the newest ``keep``. Collective.

    Raises WorldError on every rank where one of them cannot write.
    """
    final = root / f"step-{state.step:06d}"
    unfinished = root / f".{final.name}.partial"

    def prepare() -> None:
        if engine.rank == 0:
            settle(root)
            unfinished.mkdir(parents=True)

    def publish(files: Mapping[str, str]) -> None:
        if engine.rank == 0:
            _write_state(unfinished / _STATE, replace(state, files=dict(files)))
            settle(root)
            prune(root, keep)

    try:
        _writing(root, prepare)
        with world_errors(unfinished, "write a checkpoint to"):
            engine.save(unfinished)
            for other in also:
                other.save(unfinished)
        parts = _writing(root, lambda: checksums(unfinished, part=engine.rank, parts=engine.world_size))
        _writing(root, lambda: publish({name: digest for part in parts for name, digest in part.items()}))
    except WorldError:
        if engine.rank == 0 and not (unfinished / _STATE).is_file():
            shutil.rmtree(unfinished, ignore_errors=True)  # a full disk needs the room
        raise
    return final


def open_newest(
    root: Path, engine: TrainingEngine[nn.Module], *, keep: int, warn: Callable[[str], None]
) -> tuple[Path, RunState] | None:
    """The newest checkpoint whose files are as they were written, and its state; None where there is none. Collective.

    Newer ones that are damaged get another name and a warning; of older ones ``keep`` in all stay. Raises WorldError
    if none is whole, SettingsError if other ranks wrote it.
    """

    def tidied() -> list[str]:
        with world_errors(root, "tidy"):
            settle(root)
        return [path.name for path in reversed(_complete(root))]

    spoiled: dict[str, str] = {}
    for name in from_rank_zero(tidied):
        found = on_every_rank(partial(_damage, root / name, engine.rank, engine.world_size))
        problems = [problem for part in found for problem in part]
        if problems:
            spoiled[name] = problems[0]
            continue
        state = read_state(root / name, ranks=engine.world_size)
        if engine.rank == 0:
            with world_errors(root, "tidy"):
                _set_aside(root, spoiled, used=name, warn=warn)
                prune(root, keep)
        return root / name, state
    if spoiled:
        listed = "; ".join(f"{name}: {problem}" for name, problem in spoiled.items())
        raise WorldError(
            f"no checkpoint in {root} is whole ({listed}): put back a copy of one, or start again with another name=..."
        )
    return None


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest ``keep``."""
    for old in _complete(root)[:-keep]:
        shutil.rmtree(old)


def settle(root: Path) -> None:
    """Give complete checkpoints their names and remove what a killed process left half written."""
    for left in root.glob(".step-*.partial"):
        if not (left / _STATE).is_file():
            shutil.rmtree(left)
            continue
        final = root / left.name.removeprefix(".").removesuffix(".partial")
        if final.exists():
            shutil.rmtree(final)
        left.rename(final)


def read_state(checkpoint: Path, *, ranks: int) -> RunState:
    """The run's state beside the engine's. Raises SettingsError if other than ``ranks`` ranks wrote it."""
    try:
        state = RunState(**json.loads((checkpoint / _STATE).read_text())["state"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise WorldError(f"the checkpoint {checkpoint} cannot be read: {error}") from error
    if state.ranks != ranks:
        raise SettingsError(
            f"the checkpoint {checkpoint} was written by {state.ranks} training ranks and cannot be read by {ranks}: "
            f"resume with training.num_processes={state.ranks}"
        )
    return state


def check_reference(checkpoint: Path, state: RunState, path: str | None) -> None:
    """Raise SettingsError unless ``path`` is the reference policy that the run has had so far."""
    if state.reference != path:
        raise SettingsError(
            f"the checkpoint {checkpoint} was trained against the reference policy {state.reference}, which would now "
            f"be {path}: it must stay where it was (kl.reference)"
        )


def _writing(root: Path, work: Callable[[], _Value]) -> list[_Value]:
    """The results of ``work`` on every rank; an OSError on one rank is a WorldError on all."""

    def guarded() -> _Value:
        with world_errors(root, "write a checkpoint to"):
            return work()

    return on_every_rank(guarded)


def _write_state(path: Path, state: RunState) -> None:
    body = json.loads(json.dumps(asdict(state)))  # as it will be read
    text = json.dumps({"state": body, "sha256": _digest(body)})
    atomic_write(path, lambda out: out.write(text.encode()))


def _damage(checkpoint: Path, part: int, parts: int) -> list[str]:
    """What is wrong with this rank's part of a checkpoint's files, or with the list of them."""
    try:
        written = json.loads((checkpoint / _STATE).read_bytes())
        body, digest = written["state"], written["sha256"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [f"{_STATE} cannot be read ({type(error).__name__})"]
    if _digest(body) != digest:
        return [f"{_STATE} has changed since it was written"]
    return damaged(checkpoint, body["files"], part=part, parts=parts)


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _set_aside(root: Path, spoiled: Mapping[str, str], *, used: str, warn: Callable[[str], None]) -> None:
    for name, problem in spoiled.items():
        aside = root / f"{name.removeprefix('.').removesuffix('.partial')}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        (root / name).rename(aside)
        warn(f"the checkpoint {root / name} is damaged ({problem}): renamed to {aside.name}; {used} is used instead")


def _step(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1] or found[2]) if found else -1


def _complete(root: Path) -> list[Path]:
    """Complete checkpoints in the order of their steps."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _step(path) >= 0 and (path / _STATE).is_file()]
    return sorted(found, key=lambda path: (_step(path), path.name.startswith(".")))
