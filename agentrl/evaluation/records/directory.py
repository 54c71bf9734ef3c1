"""The directory of one evaluation.

::

    evaluations/NAME/
      provenance.json        what the results came from; the same command continues, another is refused
      problems.jsonl         statements, gold answers and prompts
      rollouts.jsonl.zst     every rollout, appended as it ended
      results.json  table.md  plots/  report.html
      servers/               logs of vLLM servers that were started for it
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.data.problem_sets import ProblemSet
from agentrl.evaluation.formats import JSONObject, ProblemRow, Provenance, Results
from agentrl.evaluation.records.provenance import differences
from agentrl.evaluation.records.rollout_log import read_rollouts
from agentrl.evaluation.records.transcript import Transcript
from agentrl.telemetry.files import LOCK_DEADLINE, atomic_write, json_line, take_lock, world_errors
from agentrl_envs.types import Problem

SERVERS = "servers"


class EvaluationDirectory:
    """Reads one evaluation. To write, enter :meth:`begin`."""

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
    def existing(cls, path: str | Path) -> EvaluationDirectory:
        """An evaluation that was begun. Raises SettingsError where there is none."""
        found = cls(path)
        if not found._provenance.is_file():
            raise SettingsError(f"{path} is no evaluation (it holds no {found._provenance.name})")
        return found

    @classmethod
    def begin(cls, path: Path, provenance: Provenance, problems: Sequence[ProblemRow]) -> EvaluationDirectory:
        """Start an evaluation here, or go on with the one that was begun by the same command; locked until closed.

        Raises SettingsError that names every setting that differs, where the directory holds something else, cannot be
        written, or is being used.
        """
        directory = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            directory._lock = take_lock(path / "lock", f"another process is using {path}", deadline=LOCK_DEADLINE)
        except OSError as error:
            raise SettingsError(f"cannot write to {path}: {error.strerror}; choose another --output") from error
        try:
            directory._prepare(provenance, problems)
        except BaseException:
            directory.close()
            raise
        return directory

    def close(self) -> None:
        """Give the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> EvaluationDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def provenance(self) -> Provenance:
        """What the results came from."""
        return cast(Provenance, self._json(self._provenance))

    def results(self) -> Results:
        """``results.json``. SettingsError while the evaluation is not finished."""
        if not self.results_file.is_file():
            raise SettingsError(f"{self.path} is not finished: the command that began it continues it")
        return cast(Results, self._json(self.results_file))

    def problem_sets(self) -> list[ProblemSet]:
        """The problems that were asked, without their data files."""
        found: dict[tuple[str, bool], list[Problem]] = {}
        for row in self._rows():
            problem = _problem(row)
            found.setdefault((row["benchmark"], row["falsified"]), []).append(problem)
        revisions = self.provenance()["benchmarks"]
        return [
            ProblemSet(name=name, problems=tuple(part), falsified=falsified, revision=revisions[name]["revision"])
            for (name, falsified), part in found.items()
        ]

    def prompts(self) -> dict[tuple[str, str], str]:
        """What the model was shown first, by benchmark and problem."""
        return {(row["benchmark"], row["id"]): row["prompt"] for row in self._rows()}

    def transcripts(self) -> Iterator[Transcript]:
        """Every rollout as it was written: an attempt that failed comes before the one that took its place."""
        return read_rollouts(self.rollouts)

    def rollouts_bytes(self) -> int:
        """The size of the compressed rollouts."""
        return self.rollouts.stat().st_size if self.rollouts.is_file() else 0

    def write_text(self, name: str, text: str) -> None:
        """Write the file ``name`` whole."""
        data = text.encode()
        self._write(self.path / name, lambda out: out.writelines([data]))

    def write_json(self, path: Path, value: Mapping[str, object]) -> None:
        """Write an object whole."""
        self.write_text(path.name, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def _prepare(self, provenance: Provenance, problems: Sequence[ProblemRow]) -> None:
        if self._provenance.is_file():
            self._refuse_other(provenance)
            return
        foreign = sorted(entry.name for entry in self.path.iterdir() if not _is_debris(entry.name))
        if foreign:
            raise SettingsError(f"{self.path} holds something else ({', '.join(foreign[:5])}); choose another --output")
        self._write(self._problems, lambda out: out.writelines(json_line(row) for row in problems))
        self.write_json(self._provenance, provenance)  # last: from here on it can be continued

    def _write(self, path: Path, write: Callable[[IO[bytes]], None]) -> None:
        with world_errors(path, "write"):
            path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, write)

    def _refuse_other(self, provenance: Provenance) -> None:
        changed = differences(self.provenance(), json.loads(json.dumps(provenance)))
        if changed:
            lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, before, after in changed)
            raise SettingsError(
                f"{self.path} was begun with other settings (then -> now):\n{lines}\n"
                "give the same command to continue it, or another --output to start afresh"
            )

    def _rows(self) -> Iterator[ProblemRow]:
        with world_errors(self._problems, "read"), self._problems.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield cast(ProblemRow, _object(line, f"{self._problems}, line {number}"))

    def _json(self, path: Path) -> JSONObject:
        with world_errors(path, "read"):
            return _object(path.read_text(encoding="utf-8"), str(path))


def _problem(row: ProblemRow) -> Problem:
    return Problem(
        id=row["id"],
        statement=row["statement"],
        answer=row["answer"],
        source=row["source"],
        family=row["family"],
        setup=row["setup"],
    )


def _object(text: str, place: str) -> JSONObject:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise WorldError(f"{place}: damaged, no JSON ({error})") from error
    if not isinstance(value, dict):
        raise WorldError(f"{place}: damaged, not an object")
    return value


def _is_debris(name: str) -> bool:
    """True for what an evaluation that was killed before it began may leave."""
    return name in ("lock", "problems.jsonl", SERVERS) or (name.startswith(".") and name.endswith(".partial"))
