"""Callbacks of a run: user functions that receive its steps, evaluations and checkpoints.

The records are read from the run directory, so one reader serves a rank in this process and ranks in other processes
or on other machines.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.telemetry.records import Metrics
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.training.engine.checkpoint import newest_checkpoint_step


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A finished training step, passed to ``on_step``."""

    run: Path
    step: int
    metrics: Metrics
    """The step's row of ``metrics.jsonl``."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedStep:
    """An evaluation of the policy after ``step`` steps, passed to ``on_evaluation``."""

    run: Path
    step: int
    falsified: bool
    """True if the environment's observations were falsified."""
    score: float
    """avg@k over the held-out problems."""
    metrics: Metrics
    """The evaluation's row of ``metrics.jsonl``."""


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint, passed to ``on_checkpoint``."""

    run: Path
    step: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """The caller's callbacks. An exception in a callback ends the run and propagates to the caller of ``train``."""

    on_step: Callable[[TrainedStep], object] | None = None
    on_evaluation: Callable[[EvaluatedStep], object] | None = None
    on_checkpoint: Callable[[SavedCheckpoint], object] | None = None


class RunFollower:
    """Calls the callbacks for new steps, evaluations and checkpoints of a run directory at each :meth:`poll`."""

    def __init__(self, path: Path, callbacks: Callbacks) -> None:
        """Follow a run that is about to start or to resume.

        A resumed run repeats the steps after its newest checkpoint. It replaces ``metrics.jsonl`` with a new file, with
        a different inode and without the old rows of these steps. Only the new rows of these steps are reported.
        """
        self._run = RunDirectory(path)
        self._callbacks = callbacks
        self._checkpoint = newest_checkpoint_step(self._run.checkpoints)
        self._seen = {_kind_and_step(row) for row in self._run.metrics() if row["step"] <= self._checkpoint}
        self._inode, self._offset = self._state()

    def poll(self) -> None:
        """Call the callbacks for everything written since the last call."""
        for row in self._new_rows():
            kind, step = _kind_and_step(row)
            if (kind, step) in self._seen:
                continue
            self._seen.add((kind, step))
            on_step, on_evaluation = self._callbacks.on_step, self._callbacks.on_evaluation
            if kind == "step" and on_step is not None:
                on_step(TrainedStep(run=self._run.path, step=step, metrics=row))
            if kind != "step" and on_evaluation is not None:
                score, falsified = row[f"{kind}/avg_at_k"], kind == "eval_falsified"
                on_evaluation(
                    EvaluatedStep(run=self._run.path, step=step, falsified=falsified, score=score, metrics=row)
                )
        newest = newest_checkpoint_step(self._run.checkpoints)
        if newest > self._checkpoint:
            self._checkpoint = newest
            if self._callbacks.on_checkpoint is not None:
                path = self._run.checkpoints / f"step-{newest:06d}"
                self._callbacks.on_checkpoint(SavedCheckpoint(run=self._run.path, step=newest, path=path))

    def _new_rows(self) -> list[Metrics]:
        inode, size = self._state()
        if inode != self._inode or size < self._offset:
            self._inode, self._offset = inode, 0
        if size == self._offset:
            return []
        with self._run.metrics_file.open("rb") as file:
            file.seek(self._offset)
            lines = [line for line in file if line.endswith(b"\n")]  # skip an incomplete last line
        self._offset += sum(map(len, lines))
        return [json.loads(line) for line in lines]

    def _state(self) -> tuple[int, int]:
        status = self._run.metrics_file.stat()
        return status.st_ino, status.st_size


def _kind_and_step(row: Metrics) -> tuple[str, int]:
    """Return the kind of a row, ``step``, ``eval`` or ``eval_falsified``, and its step."""
    kinds = [name for name in ("eval", "eval_falsified") if f"{name}/avg_at_k" in row]
    return (*kinds, "step")[0], int(row["step"])
