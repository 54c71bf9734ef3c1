"""``agentrl regrade RUN``: grade the stored answers again, without generating, and show what changes.

What was extracted as the answer stays; what the grader says of it may change. The evaluation's own files stay as they
are; ``regraded.json`` holds the new scores and every verdict that changed.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import SettingsError
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.provenance import grader_record
from agentrl.evaluation.results import make_results
from agentrl.evaluation.tables import Table, result_tables
from agentrl.evaluation.tally import Ledger
from agentrl.evaluation.transcript import Transcript
from agentrl.evaluation.voting import Grades
from agentrl.telemetry.console import Console
from agentrl_envs.grading import Grader
from agentrl_envs.types import Ended, Verdict

if TYPE_CHECKING:
    from agentrl.config import Settings

_SHOWN = 20
_AT_ONCE = 256


class FunctionGrader:
    """A user's ``function(answer, gold) -> bool`` (or a Verdict, or a coroutine of either) as a grader."""

    def __init__(self, path: str) -> None:
        """``path`` is ``module:name``. Raises SettingsError where that leads to no function."""
        module_name, _, name = path.partition(":")
        if not module_name or not name:
            raise SettingsError(f"--grader {path}: valid is MODULE:NAME, a function (answer, gold) -> bool")
        try:
            found = getattr(importlib.import_module(module_name), name, None)
        except ModuleNotFoundError as error:
            raise SettingsError(f"--grader {path}: there is no module {error.name!r}") from error
        if not callable(found):
            raise SettingsError(f"--grader {path}: module {module_name!r} has no function {name!r}")
        self._function: Callable[[str, str], Any] = found

    async def grade(self, answer: str | None, gold: str) -> Verdict:
        """The function's verdict; no answer is never shown to it."""
        if answer is None or not answer.strip():
            return Verdict.NO_ANSWER
        said = self._function(answer, gold)
        said = await said if inspect.isawaitable(said) else said
        if isinstance(said, Verdict):
            return said
        return Verdict.CORRECT if said else Verdict.INCORRECT

    async def close(self) -> None:
        """Nothing to release."""


def regrade_command(run: Path, settings: Settings, grader: str | None) -> dict[str, Any]:
    """Grade, show, and write ``regraded.json``; returns what stands in it."""
    directory = EvaluationDirectory.existing(run)
    before = directory.results()
    console = Console(settings.telemetry)
    changes, after = asyncio.run(_regrade(directory, before, settings, grader))
    kinds = Counter((change["before"], change["after"]) for change in changes)
    rows = tuple((f"{old} -> {new}", str(count)) for (old, new), count in kinds.most_common())
    if changes:
        console.table("Verdicts that changed", ("verdict", "rollouts"), rows)
        shown = _examples(changes)
        console.table(shown.title, shown.columns, shown.rows)
    else:
        console.note("no verdict changed")
    for name, one in after["benchmarks"].items():
        console.note(f"{name}: {before['benchmarks'][name]['avg']['mean']:.4f} -> {one['avg']['mean']:.4f}")
    scores = result_tables(after)[0]
    console.table("Scores, graded again", scores.columns, scores.rows)
    record = {**after, "changed": changes, "grader": grader or grader_record(settings)}
    directory.write_json(directory.path / "regraded.json", record)
    console.note(f"{len(changes)} changed verdicts and the new scores lie in {directory.path / 'regraded.json'}")
    return record


async def _regrade(
    directory: EvaluationDirectory, before: dict[str, Any], settings: Settings, path: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sets = directory.problem_sets()
    golds = {(one.name, problem.id): problem.answer for one in sets for problem in one.problems}
    grader: Grader | FunctionGrader = Grader(settings.grader) if path is None else FunctionGrader(path)
    ledger, changes = Ledger(), list[dict[str, Any]]()

    async def flush(batch: list[Transcript]) -> None:
        graded = await asyncio.gather(*(_graded(one, golds[one.benchmark, one.problem], grader) for one in batch))
        for old, new in zip(batch, graded, strict=True):
            ledger.add(new)
            if new.verdict is not old.verdict:
                changes.append(_change(old, new, golds[old.benchmark, old.problem]))

    try:
        batch: list[Transcript] = []
        for transcript in directory.transcripts():
            batch.append(replace(transcript, turns=()))  # conversations are not needed, thousands are not kept
            if len(batch) == _AT_ONCE:
                await flush(batch)
                batch = []
        await flush(batch)
        ks = sorted({int(k) for one in before["benchmarks"].values() for k in one["pass"]})
        return changes, await make_results(before["provenance"], sets, ledger, ks, grader)
    finally:
        await grader.close()


async def _graded(transcript: Transcript, gold: str, grader: Grades) -> Transcript:
    """With the verdict of today. What was not graded (no answer, a failed sandbox) is not graded now.

    A rollout whose grader failed has an answer and no verdict: it becomes data.
    """
    if transcript.answer is None or (transcript.verdict is None and not transcript.ended.is_no_data):
        return transcript
    verdict = await grader.grade(transcript.answer, gold)
    ended = Ended.ANSWERED if transcript.ended is Ended.INFRASTRUCTURE_FAILURE else transcript.ended
    return replace(transcript, verdict=verdict, ended=ended, reward=float(verdict is Verdict.CORRECT))


def _change(old: Transcript, new: Transcript, gold: str) -> dict[str, Any]:
    return {
        "benchmark": old.benchmark,
        "problem": old.problem,
        "sample": old.sample,
        "answer": old.answer,
        "gold": gold,
        "before": "none" if old.verdict is None else old.verdict.value,
        "after": "none" if new.verdict is None else new.verdict.value,
    }


def _examples(changes: list[dict[str, Any]]) -> Table:
    """The first of each different change of an answer."""
    different = {(one["benchmark"], one["problem"], one["answer"]): one for one in reversed(changes)}
    rows = tuple(
        (f"{one['benchmark']} {one['problem']}", one["answer"][:60], one["gold"][:60], one["before"], one["after"])
        for one in list(reversed(different.values()))[:_SHOWN]
    )
    more = len(different) - len(rows)
    title = "Answers whose verdict changed" + (f" (the first {_SHOWN} of {len(different)})" if more else "")
    return Table(title=title, columns=("problem", "answer", "gold", "before", "now"), rows=rows)
