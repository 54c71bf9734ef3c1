"""The runs of a study: each an ordinary run directory, made by `agentrl train` in a process of its own."""

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
    """One run: a variant on a seed."""

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
        """What the run printed."""
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    @property
    def failure(self) -> Path:
        """Where the queue notes that the run ended with an error."""
        return self.folder.parent / "logs" / f"{self.folder.name}.failed"

    @property
    def status(self) -> Status:
        """What its files say."""
        if self.files.summary.is_file():
            return "finished"
        if self.failure.is_file():
            return "failed"
        return "interrupted" if self.files.config.is_file() else "waiting"


def study_runs(study: StudySettings, folder: Path) -> list[StudyRun]:
    """All runs, seed by seed, so that every variant has as many finished seeds as the others if a study is stopped."""
    return [
        StudyRun(variant=variant, seed=seed, values=values, folder=run_folder(folder, variant, seed))
        for seed in study.seeds
        for variant, values in study.all_variants().items()
    ]


def run_folder(home: Path, variant: str, seed: int) -> Path:
    """Where a run lies in the folder of its study."""
    return home / f"{file_name(variant)}-seed-{seed}"


def train_command(study: StudySettings, run: StudyRun) -> list[str]:
    """The command that starts or continues a run."""
    command = [sys.executable, "-m", "agentrl.cli", "train"]
    command += ["--resume"] if run.status == "interrupted" else ["--env", study.env]
    for name in study.configs:
        command += ["--config", name]
    return command + overrides_of(study, run)


def overrides_of(study: StudySettings, run: StudyRun) -> list[str]:
    """The settings of a run as ``key=value``, the value in JSON."""
    own: SettingValues = {"seed": run.seed, "name": run.folder.name, "runs_dir": str(run.folder.parent)}
    return [f"{key}={json.dumps(value)}" for key, value in (study.settings | run.values | own).items()]


def count_by_status(runs: Sequence[StudyRun]) -> dict[Status, int]:
    """How many runs stand where."""
    found: dict[Status, int] = {"finished": 0, "failed": 0, "interrupted": 0, "waiting": 0}
    for run in runs:
        found[run.status] += 1
    return found
