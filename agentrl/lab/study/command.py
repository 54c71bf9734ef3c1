"""``agentrl study``: work off a grid of runs, then write its report; or write the report of a stored record again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

import agentrl
from agentrl.errors import SettingsError
from agentrl.lab.study.curves import RunCurve, StudyRecord, read_curve
from agentrl.lab.study.figure import draw_study
from agentrl.lab.study.queue import work_off
from agentrl.lab.study.report import markdown
from agentrl.lab.study.runs import StudyRun, count_by_status, overrides_of, study_runs
from agentrl.lab.study.settings import StudySettings, read_study
from agentrl.telemetry.files import atomic_write, world_errors

RECORD = "study.json"
Check = Callable[[list[str], list[str], str], object]
"""``check(configs, overrides, env)`` raises SettingsError for what ``agentrl train`` would refuse."""


def study_command(
    file: Path,
    folder: Path | None,
    *,
    jobs: int | None,
    baseline: str | None,
    retry: bool,
    report_only: bool,
    check: Check,
    echo: Callable[[str], None],
) -> None:
    """Run what is missing of the study in ``file`` and report; a record (``.json``) is only reported.

    Runs and report lie in ``folder``, by default ``runs/NAME``. Runs that are finished in its record stay finished
    without their folders. Raises SettingsError or WorldError.
    """
    if file.suffix == ".json":
        record = read_record(file)
        record = record.model_copy(update={"study": record.study.with_baseline(baseline)})
        _report(record, folder or file.parent, echo, keep=False)
        return
    study = read_study(file).with_baseline(baseline)
    if jobs is not None:
        study = study.model_copy(update={"jobs": jobs})
    home = folder or Path("runs") / study.name
    runs = study_runs(study, home)
    check_same_study(study, home)
    kept = kept_curves(runs, home)
    missing = [run for run in runs if run.folder not in kept]
    if not report_only:
        check_variants(study, missing, check)
    with world_errors(home, "make"):
        home.mkdir(parents=True, exist_ok=True)
    if not report_only:
        stand = [f"{len(kept)} finished according to {home / RECORD}"] if kept else []
        stand += [f"{count} {status}" for status, count in count_by_status(missing).items() if count]
        echo(
            f"study {study.name}: {len(runs)} runs, {', '.join(stand)}; {study.jobs} at a time; logs in {home / 'logs'}"
        )
        work_off(study, missing, retry=retry, report=lambda run, said: echo(f"{run.folder.name}: {said}"))
    curves = tuple(kept.get(run.folder) or read_curve(run) for run in runs)
    record = StudyRecord(agentrl=agentrl.__version__, study=study, runs=curves)
    _report(record, home, echo, keep=True)


def check_variants(study: StudySettings, runs: Sequence[StudyRun], check: Check) -> None:
    """Check the settings of every variant before the first run. Raises SettingsError, which names the variant."""
    first = {run.variant: run for run in reversed(runs)}
    for variant, run in first.items():
        try:
            check(study.configs, overrides_of(study, run), study.env)
        except SettingsError as error:
            raise SettingsError(f"variant {variant!r}: {error}") from error


def check_same_study(study: StudySettings, home: Path) -> None:
    """Refuse to mix runs of other settings under one name. Raises SettingsError."""
    stored = home / RECORD
    if not stored.is_file():
        return
    before = read_record(stored).study
    for what in ("env", "config", "settings"):
        if getattr(before, what) != getattr(study, what):
            raise SettingsError(
                f"{home} holds a study {before.name!r} that differs in {what}: give this one another name, or --output"
            )
    now = study.all_variants()
    for variant, values in before.all_variants().items():
        if variant in now and now[variant] != values:
            raise SettingsError(f"{home}: variant {variant!r} had other settings; give it another name")


def kept_curves(runs: Sequence[StudyRun], home: Path) -> dict[Path, RunCurve]:
    """By folder, the finished runs that only the record in ``home`` still knows."""
    if not (home / RECORD).is_file():
        return {}
    curves = {(curve.variant, curve.seed): curve for curve in read_record(home / RECORD).runs}
    found = {run.folder: curves.get((run.variant, run.seed)) for run in runs if run.status == "waiting"}
    return {folder: curve for folder, curve in found.items() if curve is not None and curve.status == "finished"}


def read_record(path: Path) -> StudyRecord:
    """Read ``study.json``. Raises SettingsError."""
    try:
        return StudyRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise SettingsError(f"{path} is no record of a study: {error}") from error


def _report(record: StudyRecord, folder: Path, echo: Callable[[str], None], *, keep: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if keep:
        text = json.dumps(record.model_dump(mode="json"), allow_nan=False, separators=(",", ":")) + "\n"
        atomic_write(folder / RECORD, lambda out: out.write(text.encode()))
    said = markdown(record)
    atomic_write(folder / "report.md", lambda out: out.write(said.encode()))
    drawn = draw_study(record, folder)
    echo(said)
    echo(f"report: {folder / 'report.md'}" + "".join(f", {path}" for path in drawn))
