"""Checkpoints: everything a run needs to go on as if it had never stopped.

::

    checkpoints/step-000050/
      engine/           parameters, optimizer, schedule (DeepSpeed)
      random-RANK.pt    the random state of each rank
      critic/           the same of the critic, where there is one
      state.json        the run's and the rollout worker's position; written last: where it is, all is
    checkpoints/best/   the policy of the best evaluation (:mod:`agentrl.training.best`)

A kill at any moment leaves a complete newest checkpoint: one is written beside the others under a hidden name and is
complete, and found, before it is renamed. Not guarded: a machine that loses power before its disk has all.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import SettingsError, WorldError
from agentrl.telemetry.files import atomic_write, world_errors
from agentrl.training.deepspeed_engine import TrainingEngine

_STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.partial")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """``step`` steps with ``updates`` optimizer updates are done by ``ranks`` ranks; ``worker`` is the worker's
    position and ledger, ``evaluations`` the scores so far as they stand in ``summary.json``, ``trainer`` what the
    trainer adapts, ``reference`` where the reference policy lies."""

    step: int
    updates: int
    ranks: int
    worker: dict[str, Any]
    evaluations: list[dict[str, Any]]
    trainer: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None


class Saved(Protocol):
    """What writes itself into a directory that exists, on all ranks at once."""

    def save(self, directory: Path) -> None: ...


def save_checkpoint(
    root: Path, engine: TrainingEngine[Any], state: RunState, *, keep: int, also: Sequence[Saved] = ()
) -> Path:
    """Write ``root/step-N``, complete or not at all, and delete all but the newest ``keep``. Collective."""
    final = root / f"step-{state.step:06d}"
    partial = root / f".{final.name}.partial"
    if engine.rank == 0:
        with world_errors(root, "write a checkpoint to"):
            settle(root)
            partial.mkdir(parents=True)
    engine.barrier()
    with world_errors(partial, "write a checkpoint to"):
        engine.save(partial)
        for other in also:
            other.save(partial)
    engine.barrier()
    if engine.rank == 0:
        atomic_write(partial / _STATE, lambda out: out.writelines([json.dumps(vars(state)).encode()]))
        with world_errors(root, "write a checkpoint to"):
            settle(root)
            for old in _complete(root)[:-keep]:
                shutil.rmtree(old)
    engine.barrier()
    return final


def settle(root: Path) -> None:
    """Give complete checkpoints their names and remove what a killed process left half written."""
    for partial in root.glob(".step-*.partial"):
        if not (partial / _STATE).is_file():
            shutil.rmtree(partial)
            continue
        final = root / partial.name.removeprefix(".").removesuffix(".partial")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint under ``root``."""
    found = _complete(root)
    return found[-1] if found else None


def read_state(checkpoint: Path, *, ranks: int) -> RunState:
    """The run's state beside the engine's. Raises SettingsError if other than ``ranks`` ranks wrote it."""
    try:
        state = RunState(**json.loads((checkpoint / _STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
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


def _step(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1] or found[2]) if found else -1


def _complete(root: Path) -> list[Path]:
    """Complete checkpoints in the order of their steps."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _step(path) >= 0 and (path / _STATE).is_file()]
    return sorted(found, key=lambda path: (_step(path), path.name.startswith(".")))
