"""Runs of a study. Each is an ordinary run directory, written by an `agentrl train` process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.lab.study.settings import SettingValues, StudySettings, file_name
from agentrl.telemetry.run_directory import RunDirectory

Status = Literal["finished", "failed", "interrupted", "waiting"]


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run: a variant with a seed."""

    variant: str
    seed: int
    values: SettingValues
    folder: Path

    @property
    def files(self) -> RunDirectory:
        """The run directory, for reading."""
        return RunDirectory(self.folder)

    @property
    def log(self) -> Path:
        """Log file with the output of the run."""
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    @property
    def failure(self) -> Path:
        """File that the queue writes if the run fails."""
        return self.folder.parent / "logs" / f"{self.folder.name}.failed"

    @property
    def status(self) -> Status:
        """Status of the run, derived from its files."""
        if self.files.summary.is_file():
            return "finished"
        if self.failure.is_file():
            return "failed"
        return "interrupted" if self.files.config.is_file() else "waiting"


def study_runs(study: StudySettings, folder: Path) -> list[StudyRun]:
    """All runs, ordered by seed, so that a stopped study has about as many finished seeds of every variant."""
    return [
        StudyRun(variant=variant, seed=seed, values=values, folder=run_folder(folder, variant, seed))
        for seed in study.seeds
        for variant, values in study.all_variants().items()
    ]


def run_folder(home: Path, variant: str, seed: int) -> Path:
    """Directory of a run in the directory ``home`` of its study."""
    return home / f"{file_name(variant)}-seed-{seed}"


def train_command(study: StudySettings, run: StudyRun) -> list[str]:
    """Command that starts or continues a run."""
    command = [sys.executable, "-m", "agentrl.cli", "train"]
    command += ["--resume"] if run.status == "interrupted" else ["--env", study.env]
    for name in study.configs:
        command += ["--config", name]
    return command + overrides_of(study, run)


def overrides_of(study: StudySettings, run: StudyRun) -> list[str]:
    """Settings of a run as ``key=value`` with JSON values."""
    run_settings: SettingValues = {"seed": run.seed, "name": run.folder.name, "runs_dir": str(run.folder.parent)}
    return [f"{key}={json.dumps(value)}" for key, value in (study.settings | run.values | run_settings).items()]


def count_by_status(runs: Sequence[StudyRun]) -> dict[Status, int]:
    """Number of runs by status."""
    counts: dict[Status, int] = {"finished": 0, "failed": 0, "interrupted": 0, "waiting": 0}
    for run in runs:
        counts[run.status] += 1
    return counts
