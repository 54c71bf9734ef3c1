"""Directory of one evaluation.

::

    evaluations/NAME/
      provenance.json        provenance of the results; only the same command can continue the evaluation
      problems.jsonl         statements, reference answers and prompts
      rollouts.jsonl.zst     every rollout, appended as it ends
      results.json  table.md  plots/  report.html
      logs/                  logs of the vLLM servers that the evaluation started
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import cast

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.benchmarks import ProblemSet
from agentrl.evaluation.formats import JSONObject, ProblemRow, Provenance, Results
from agentrl.evaluation.provenance import list_differences
from agentrl.evaluation.transcripts import Transcript, read_rollouts
from agentrl.telemetry.files import (
    LOCK_DEADLINE,
    acquire_lock,
    atomic_write,
    encode_json_line,
    os_errors_as_world_errors,
    resolve_path_inside,
)
from agentrl_envs.types import Problem

_LOGS = "logs"
_FIELDS = tuple(field.name for field in fields(Problem))


class EvaluationDirectory:
    """Files of one evaluation. Use :meth:`create_or_resume` to write; the constructor suffices for reading."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rollouts = self.path / "rollouts.jsonl.zst"
        self.results_file = self.path / "results.json"
        self.report = self.path / "report.html"
        self.plots = self.path / "plots"
        self._provenance = self.path / "provenance.json"
        self._problems = self.path / "problems.jsonl"
        self._lock = -1

    @classmethod
    def open_existing(cls, path: str | Path) -> EvaluationDirectory:
        """Open an existing evaluation. Raises SettingsError if ``path`` is not an evaluation."""
        directory = cls(path)
        if not directory._provenance.is_file():
            raise SettingsError(f"{path} is not an evaluation, because it has no {directory._provenance.name}")
        return directory

    @classmethod
    def create_or_resume(
        cls, path: Path, provenance: Provenance, problems: Sequence[ProblemRow]
    ) -> EvaluationDirectory:
        """Start an evaluation, or continue an evaluation with the same provenance. Locks the directory until closed.

        Raises SettingsError if the provenance differs (listing every difference), or if the directory contains other
        files, cannot be written or is in use.
        """
        directory = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            directory._lock = acquire_lock(path / "lock", f"another process is using {path}", deadline=LOCK_DEADLINE)
        except OSError as error:
            raise SettingsError(f"cannot write to {path} ({error.strerror}): choose another --output") from error
        try:
            directory._prepare(provenance, problems)
        except BaseException:
            directory.close()
            raise
        return directory

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def provenance(self) -> Provenance:
        return cast(Provenance, self._read_json(self._provenance))

    @property
    def is_finished(self) -> bool:
        return self.results_file.is_file()

    def results(self) -> Results:
        """Return ``results.json``. Raises SettingsError if the evaluation is not finished."""
        if not self.is_finished:
            raise SettingsError(f"{self.path} is not finished: repeat the command that started it")
        return cast(Results, self._read_json(self.results_file))

    def problem_sets(self) -> list[ProblemSet]:
        """Return the problems stored in the directory, without reading the original data files."""
        problems_of: dict[tuple[str, bool], list[Problem]] = {}
        for row in self.problem_rows():
            problem = Problem(**{name: row[name] for name in _FIELDS})  # type: ignore[literal-required]
            problems_of.setdefault((row["benchmark"], row["falsified"]), []).append(problem)
        revisions = self.provenance()["benchmarks"]
        return [
            ProblemSet(name=name, problems=tuple(part), falsified=falsified, revision=revisions[name]["revision"])
            for (name, falsified), part in problems_of.items()
        ]

    def problem_rows(self) -> Iterator[ProblemRow]:
        """Yield the rows of ``problems.jsonl``."""
        path = resolve_path_inside(self._problems, self.path)
        with os_errors_as_world_errors(path, "read"), path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield cast(ProblemRow, _parse_object(line, f"{path}, line {number}"))

    def transcripts(self) -> Iterator[Transcript]:
        """Yield every rollout in the order written. A failed attempt precedes the attempt that replaced it."""
        return read_rollouts(self.rollouts)

    def write_text(self, name: str, text: str) -> None:
        """Write the file ``name`` atomically."""
        atomic_write(self.path / name, lambda out: out.write(text.encode()))

    def write_json(self, name: str, value: Mapping[str, object]) -> None:
        """Write the JSON file ``name`` atomically."""
        self.write_text(name, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def _prepare(self, provenance: Provenance, problems: Sequence[ProblemRow]) -> None:
        if self._provenance.is_file():
            self._check_same(provenance)
            return
        foreign = sorted(entry.name for entry in self.path.iterdir() if not _is_left_by_killed_evaluation(entry.name))
        if foreign:
            raise SettingsError(f"{self.path} contains other files ({', '.join(foreign[:5])}): choose another --output")
        atomic_write(self._problems, lambda out: out.writelines(encode_json_line(row) for row in problems))
        # Write this file last, because it marks the directory as an evaluation that can be continued.
        self.write_json(self._provenance.name, provenance)

    def _check_same(self, provenance: Provenance) -> None:
        changed = list_differences(self.provenance(), json.loads(json.dumps(provenance)))
        if changed:
            lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, before, after in changed)
            raise SettingsError(
                f"{self.path} was started with different settings (then -> now):\n{lines}\n"
                "use the same settings to continue it, or another --output to start a new evaluation"
            )

    def _read_json(self, path: Path) -> JSONObject:
        with os_errors_as_world_errors(path, "read"):
            return _parse_object(resolve_path_inside(path, self.path).read_text(encoding="utf-8"), str(path))


def _parse_object(text: str, location: str) -> JSONObject:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorldError(f"{location} is damaged: invalid JSON ({error})") from error
    if not isinstance(value, dict):
        raise WorldError(f"{location} is damaged: not a JSON object")
    return value


def _is_left_by_killed_evaluation(name: str) -> bool:
    """Return True for a file that an evaluation leaves if it is killed before it writes its provenance."""
    return name in ("lock", "problems.jsonl", _LOGS) or (name.startswith(".") and name.endswith(".partial"))
