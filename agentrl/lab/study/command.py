"""``agentrl study``: execute a grid of runs and report the results, or report a stored record."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

import agentrl
from agentrl.errors import SettingsError, require_package
from agentrl.lab.study.report import draw_study, study_markdown
from agentrl.lab.study.runs import StudyRun, count_by_status, list_study_runs, run_folder, run_overrides, run_study
from agentrl.lab.study.settings import StudySettings, read_study
from agentrl.lab.study.statistics import RunCurve, StudyRecord, read_curve
from agentrl.telemetry.files import atomic_write, os_errors_as_world_errors

RECORD = "study.json"
_FINAL_STATUSES = ("finished", "failed")
Check = Callable[[list[str], list[str], str], object]
"""``check(configs, overrides, env)`` raises SettingsError if ``agentrl train`` would reject the settings."""


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
    """Execute the missing runs of the study in ``file`` and report the results. For a record (``.json``), only report.

    Runs and report are stored in ``folder``, by default ``runs/NAME``. A run that has ended according to the stored
    record is not repeated, even if its directory was deleted. Raises SettingsError if the study is invalid or does not
    match the stored record, and WorldError if ``folder`` cannot be created or a run's files are damaged.
    """
    require_package("scipy", extra="lab", purpose="agentrl study")  # fail now, not after hours of runs
    if file.suffix == ".json":
        record = read_study_record(file)
        record = record.model_copy(update={"study": record.study.with_baseline(baseline)})
        _write_and_print_report(record, folder or file.parent, echo)
        return
    study = read_study(file).with_baseline(baseline)
    if jobs is not None:
        study = study.model_copy(update={"jobs": jobs})
    home = folder or Path("runs") / study.name
    runs = list_study_runs(study, home)
    before = read_study_record(home / RECORD) if (home / RECORD).is_file() else None
    kept: dict[Path, RunCurve] = {}
    if before is not None:
        check_same_study(study, before, home)
        check_no_run_lost(runs, before, home)
        kept = curves_of_deleted_runs(runs, before, retry=retry)
    missing = [run for run in runs if run.folder not in kept]
    if not report_only:
        check_variants(study, missing, check)
    with os_errors_as_world_errors(home, "create"):
        home.mkdir(parents=True, exist_ok=True)
    if not report_only:
        counts = [f"{len(kept)} stored in {home / RECORD}"] if kept else []
        counts += [f"{count} {status}" for status, count in count_by_status(missing).items() if count]
        echo(
            f"study {study.name}: {len(runs)} runs, {', '.join(counts)}; {study.jobs} at a time; logs: {home / 'logs'}"
        )
        # Write the record before the first run, so that an interrupted study can be identified by its settings.
        _write_record(_current_record(study, runs, kept), home)
    try:
        if not report_only:
            run_study(study, missing, retry=retry, report=lambda run, text: echo(f"{run.folder.name}: {text}"))
    finally:
        record = _current_record(study, runs, kept)
        _write_record(record, home)
    _write_and_print_report(record, home, echo)


def check_variants(study: StudySettings, runs: Sequence[StudyRun], check: Check) -> None:
    """Check the settings of every variant before the first run. Raises SettingsError with the variant's name."""
    first = {run.variant: run for run in reversed(runs)}
    for variant, run in first.items():
        try:
            check(study.config_names, run_overrides(study, run), study.env)
        except SettingsError as error:
            raise SettingsError(f"variant {variant!r}: {error}") from error


def check_same_study(study: StudySettings, before: StudyRecord, home: Path) -> None:
    """Raise SettingsError if the stored record has different settings, or a variant with different values."""
    for what in ("env", "config", "settings"):
        if getattr(before.study, what) != getattr(study, what):
            raise SettingsError(
                f"{home} contains a study {before.study.name!r} that differs in {what}: give this study another "
                "name, or use another --output"
            )
    now = study.all_variants()
    for variant, values in before.study.all_variants().items():
        if variant in now and now[variant] != values:
            raise SettingsError(f"{home} contains variant {variant!r} with different settings: rename this variant")


def check_no_run_lost(runs: Sequence[StudyRun], before: StudyRecord, home: Path) -> None:
    """Raise SettingsError if a new record would lose a run that exists only in the old record."""
    listed = {(run.variant, run.seed) for run in runs}
    for curve in before.runs:
        gone = curve.status in _FINAL_STATUSES and not run_folder(home, curve.variant, curve.seed).is_dir()
        if gone and (curve.variant, curve.seed) not in listed:
            raise SettingsError(
                f"{home / RECORD} is the only copy of variant {curve.variant!r} on seed {curve.seed}, but the study "
                "file does not list it: add it to the study file, or use another --output"
            )


def curves_of_deleted_runs(runs: Sequence[StudyRun], before: StudyRecord, *, retry: bool) -> dict[Path, RunCurve]:
    """Return the stored curves of ended runs whose directory is missing, keyed by directory.

    With ``retry``, only finished runs are included.
    """
    curves = {(curve.variant, curve.seed): curve for curve in before.runs}
    ended = {run.folder: curves.get((run.variant, run.seed)) for run in runs if run.status == "waiting"}
    wanted = ("finished",) if retry else _FINAL_STATUSES
    return {folder: curve for folder, curve in ended.items() if curve is not None and curve.status in wanted}


def read_study_record(path: Path) -> StudyRecord:
    """Read a ``study.json``. Raises SettingsError if it is not a record of a study."""
    try:
        return StudyRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise SettingsError(f"{path} is not a record of a study: {error}") from error


def _current_record(study: StudySettings, runs: Sequence[StudyRun], kept: Mapping[Path, RunCurve]) -> StudyRecord:
    curves = tuple(kept.get(run.folder) or read_curve(run) for run in runs)
    return StudyRecord(agentrl=agentrl.__version__, study=study, runs=curves)


def _write_record(record: StudyRecord, home: Path) -> None:
    text = json.dumps(record.model_dump(mode="json"), allow_nan=False, separators=(",", ":")) + "\n"
    atomic_write(home / RECORD, lambda out: out.write(text.encode()))


def _write_and_print_report(record: StudyRecord, folder: Path, echo: Callable[[str], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = study_markdown(record)
    atomic_write(folder / "report.md", lambda out: out.write(text.encode()))
    drawn = draw_study(record, folder)
    echo(text)
    echo(f"report: {folder / 'report.md'}" + "".join(f", {path}" for path in drawn))
