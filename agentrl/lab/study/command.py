"""``agentrl study``: work off a grid of runs, then write its report; or write the report of a stored record again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

import agentrl
from agentrl.errors import SettingsError
from agentrl.lab.study.curves import RunCurve, StudyRecord, read_curve
from agentrl.lab.study.figure import draw_study
from agentrl.lab.study.queue import work_off
from agentrl.lab.study.report import markdown
from agentrl.lab.study.runs import StudyRun, count_by_status, overrides_of, run_folder, study_runs
from agentrl.lab.study.settings import StudySettings, read_study
from agentrl.telemetry.files import atomic_write, world_errors

RECORD = "study.json"
_ENDED = ("finished", "failed")
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

    Runs and report lie in ``folder``, by default ``runs/NAME``. Runs that ended according to its record have ended,
    also without their folders. Raises SettingsError or WorldError.
    """
    if file.suffix == ".json":
        record = read_record(file)
        record = record.model_copy(update={"study": record.study.with_baseline(baseline)})
        _report(record, folder or file.parent, echo)
        return
    study = read_study(file).with_baseline(baseline)
    if jobs is not None:
        study = study.model_copy(update={"jobs": jobs})
    home = folder or Path("runs") / study.name
    runs = study_runs(study, home)
    before = read_record(home / RECORD) if (home / RECORD).is_file() else None
    kept: dict[Path, RunCurve] = {}
    if before is not None:
        check_same_study(study, before, home)
        check_none_lost(runs, before, home)
        kept = kept_curves(runs, before, retry=retry)
    missing = [run for run in runs if run.folder not in kept]
    if not report_only:
        check_variants(study, missing, check)
    with world_errors(home, "make"):
        home.mkdir(parents=True, exist_ok=True)
    if not report_only:
        stand = [f"{len(kept)} ended according to {home / RECORD}"] if kept else []
        stand += [f"{count} {status}" for status, count in count_by_status(missing).items() if count]
        echo(
            f"study {study.name}: {len(runs)} runs, {', '.join(stand)}; {study.jobs} at a time; logs in {home / 'logs'}"
        )
        _keep(_record_now(study, runs, kept), home)  # so that a study which is killed is known by its settings
    try:
        if not report_only:
            work_off(study, missing, retry=retry, report=lambda run, said: echo(f"{run.folder.name}: {said}"))
    finally:
        record = _record_now(study, runs, kept)
        _keep(record, home)
    _report(record, home, echo)


def check_variants(study: StudySettings, runs: Sequence[StudyRun], check: Check) -> None:
    """Check the settings of every variant before the first run. Raises SettingsError, which names the variant."""
    first = {run.variant: run for run in reversed(runs)}
    for variant, run in first.items():
        try:
            check(study.configs, overrides_of(study, run), study.env)
        except SettingsError as error:
            raise SettingsError(f"variant {variant!r}: {error}") from error


def check_same_study(study: StudySettings, before: StudyRecord, home: Path) -> None:
    """Refuse to mix runs of other settings under one name. Raises SettingsError."""
    for what in ("env", "config", "settings"):
        if getattr(before.study, what) != getattr(study, what):
            raise SettingsError(
                f"{home} holds a study {before.study.name!r} that differs in {what}: give this one another name, or "
                "--output"
            )
    now = study.all_variants()
    for variant, values in before.study.all_variants().items():
        if variant in now and now[variant] != values:
            raise SettingsError(f"{home}: variant {variant!r} had other settings; give it another name")


def check_none_lost(runs: Sequence[StudyRun], before: StudyRecord, home: Path) -> None:
    """Refuse to write a record without runs that only the present one still knows. Raises SettingsError."""
    listed = {(run.variant, run.seed) for run in runs}
    for curve in before.runs:
        gone = curve.status in _ENDED and not run_folder(home, curve.variant, curve.seed).is_dir()
        if gone and (curve.variant, curve.seed) not in listed:
            raise SettingsError(
                f"{home / RECORD} is all that is left of variant {curve.variant!r} on seed {curve.seed}, which the "
                "study file does not list: list it there, or give --output another folder"
            )


def kept_curves(runs: Sequence[StudyRun], before: StudyRecord, *, retry: bool) -> dict[Path, RunCurve]:
    """By folder, the runs without one that ended according to the record; with ``retry`` those that finished."""
    curves = {(curve.variant, curve.seed): curve for curve in before.runs}
    found = {run.folder: curves.get((run.variant, run.seed)) for run in runs if run.status == "waiting"}
    wanted = ("finished",) if retry else _ENDED
    return {folder: curve for folder, curve in found.items() if curve is not None and curve.status in wanted}


def read_record(path: Path) -> StudyRecord:
    """Read ``study.json``. Raises SettingsError."""
    try:
        return StudyRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise SettingsError(f"{path} is no record of a study: {error}") from error


def _record_now(study: StudySettings, runs: Sequence[StudyRun], kept: Mapping[Path, RunCurve]) -> StudyRecord:
    curves = tuple(kept.get(run.folder) or read_curve(run) for run in runs)
    return StudyRecord(agentrl=agentrl.__version__, study=study, runs=curves)


def _keep(record: StudyRecord, home: Path) -> None:
    text = json.dumps(record.model_dump(mode="json"), allow_nan=False, separators=(",", ":")) + "\n"
    atomic_write(home / RECORD, lambda out: out.write(text.encode()))


def _report(record: StudyRecord, folder: Path, echo: Callable[[str], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    said = markdown(record)
    atomic_write(folder / "report.md", lambda out: out.write(said.encode()))
    drawn = draw_study(record, folder)
    echo(said)
    echo(f"report: {folder / 'report.md'}" + "".join(f", {path}" for path in drawn))
