"""Checkpoints: everything a run needs to go on as if it had never stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import WorldError
from agentrl.training.deepspeed_engine import TrainingEngine

_STATE = "state.json"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """``step`` steps with ``updates`` optimizer updates are done; ``worker`` is the worker's position and ledger."""

    step: int
    updates: int
    worker: dict[str, Any]


def save_checkpoint(root: Path, engine: TrainingEngine, state: RunState, *, keep: int) -> Path:
    """Write ``root/step-N``, complete or not at all, and delete all but the newest ``keep``. Collective."""
    final = root / f"step-{state.step:06d}"
    partial = root / f".{final.name}.partial"
    if engine.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    engine.barrier()
    engine.save(partial)
    engine.barrier()
    if engine.rank == 0:
        (partial / _STATE).write_text(json.dumps(vars(state)))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in _complete(root)[:-keep]:
            shutil.rmtree(old)
    engine.barrier()
    return final


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint under ``root``."""
    return max(_complete(root), default=None)


def read_state(checkpoint: Path) -> RunState:
    """The run's state beside the engine's."""
    try:
        return RunState(**json.loads((checkpoint / _STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise WorldError(f"the checkpoint {checkpoint} cannot be read: {error}") from error


def _complete(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("step-*") if (path / _STATE).is_file())
