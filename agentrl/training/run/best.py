"""The policy with a run's best evaluation, exported to ``checkpoints/best`` in the format of `transformers`.

An export waits in ``.best-STEP`` until a checkpoint with its evaluation is saved: a run that resumes from an older
checkpoint finds the best policy up to that one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.telemetry.files import world_errors
from agentrl.telemetry.records import BestRecord, EvaluationRecord

_RECORD = "best.json"


def best_evaluation(evaluations: Sequence[EvaluationRecord]) -> EvaluationRecord | None:
    """The evaluation with the highest avg@k; the earliest one on a tie. Falsified evaluations are ignored.

    >>> one, two = {"step": 0, "mean": 0.5, "falsified": False}, {"step": 9, "mean": 0.5, "falsified": False}
    >>> best_evaluation([one, two, {"step": 9, "mean": 0.9, "falsified": True}])["step"]
    0
    """
    held_out = [item for item in evaluations if not item["falsified"]]
    return max(held_out, key=lambda item: item["mean"], default=None)


class BestPolicy:
    """The exports in a run's directory; used by rank 0 alone."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._checkpoints = run / "checkpoints"
        self.path = self._checkpoints / "best"

    def write(self, evaluation: EvaluationRecord, export: Callable[[Path], None]) -> None:
        """Have ``export`` write the policy of ``evaluation``; :meth:`settle` puts it in place. Raises WorldError."""
        waiting = self._waiting(evaluation["step"])
        partial = self._checkpoints / f"{waiting.name}.partial"
        with world_errors(partial, "write the best policy to"):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            export(partial)
            (partial / _RECORD).write_text(json.dumps(evaluation, indent=1) + "\n")
            shutil.rmtree(waiting, ignore_errors=True)
            partial.rename(waiting)

    def settle(self, best: EvaluationRecord | None) -> None:
        """Keep the export of ``best``, the best saved evaluation, and remove all others."""
        with world_errors(self.path, "put the best policy in"):
            if best is not None and self._waiting(best["step"]).is_dir():
                shutil.rmtree(self.path, ignore_errors=True)
                self._waiting(best["step"]).rename(self.path)
            elif self.path.exists() and not self.holds(best):
                shutil.rmtree(self.path)
            for other in self._checkpoints.glob(".best-*"):
                shutil.rmtree(other)

    def holds(self, best: EvaluationRecord | None) -> bool:
        """Whether the current export belongs to ``best``."""
        record = self.path / _RECORD
        return best is not None and record.is_file() and bool(json.loads(record.read_text())["step"] == best["step"])

    def record(self, evaluations: Sequence[EvaluationRecord]) -> BestRecord | None:
        """The best evaluation and the path of its policy in the run directory."""
        best = best_evaluation(evaluations)
        if best is None:
            return None
        return {**best, "policy": self.path.relative_to(self._run).as_posix() if self.holds(best) else None}

    def line(self, record: BestRecord) -> str:
        """:meth:`record` as a line for the console."""
        score = f"best evaluation: step {record['step']}, avg@{record['k']} {record['mean']:.3f}"
        if record["policy"] is None:
            return f"{score}; its policy was not kept (checkpoint.best)"
        return f"{score}; its policy: agentrl eval --model {self.path}"

    def _waiting(self, step: int) -> Path:
        return self._checkpoints / f".best-{step:06d}"
