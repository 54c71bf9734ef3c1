"""Runs of a study, executed by a queue of workers. Each run is an `agentrl train` process with a run directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Literal

from agentrl.lab.study.settings import SettingValues, StudySettings, variant_folder_prefix
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
    def run_directory(self) -> RunDirectory:
        """Reader of the files in the run directory."""
        return RunDirectory(self.folder)

    @property
    def log_file(self) -> Path:
        """Log file with the output of the run."""
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    @property
    def failure_file(self) -> Path:
        """File that the queue writes if the run fails."""
        return self.folder.parent / "logs" / f"{self.folder.name}.failed"

    @property
    def status(self) -> Status:
        """Status of the run, derived from its files."""
        if self.run_directory.summary.is_file():
            return "finished"
        if self.failure_file.is_file():
            return "failed"
        return "interrupted" if self.run_directory.config.is_file() else "waiting"


def list_study_runs(study: StudySettings, folder: Path) -> list[StudyRun]:
    """List all runs, ordered by seed, so that a stopped study has similar numbers of seeds for every variant."""
    return [
        StudyRun(variant=variant, seed=seed, values=values, folder=run_folder(folder, variant, seed))
        for seed in study.seeds
        for variant, values in study.all_variants().items()
    ]


def run_folder(home: Path, variant: str, seed: int) -> Path:
    """Return the directory of a run in the study's directory ``home``."""
    return home / f"{variant_folder_prefix(variant)}-seed-{seed}"


def train_command(study: StudySettings, run: StudyRun) -> list[str]:
    """Build the command that starts or continues a run."""
    command = [sys.executable, "-m", "agentrl.cli", "train"]
    command += ["--resume"] if run.status == "interrupted" else ["--env", study.env]
    for name in study.config_names:
        command += ["--config", name]
    return command + run_overrides(study, run)


def run_overrides(study: StudySettings, run: StudyRun) -> list[str]:
    """Return the settings of a run as ``key=value`` with JSON values."""
    run_settings: SettingValues = {"seed": run.seed, "name": run.folder.name, "runs_dir": str(run.folder.parent)}
    return [f"{key}={json.dumps(value)}" for key, value in (study.settings | run.values | run_settings).items()]


def count_by_status(runs: Sequence[StudyRun]) -> dict[Status, int]:
    """Count the runs by status."""
    counts: dict[Status, int] = {"finished": 0, "failed": 0, "interrupted": 0, "waiting": 0}
    for run in runs:
        counts[run.status] += 1
    return counts


Report = Callable[[StudyRun, str], None]


def run_study(study: StudySettings, runs: Sequence[StudyRun], *, retry: bool, report: Report) -> None:
    """Start or continue every unfinished run, and with ``retry`` also every failed run.

    If a run fails, the failure is recorded and the next run starts. On KeyboardInterrupt, the active runs save a
    checkpoint and stop. The same call continues them later. Concurrent runs use disjoint CPU cores.
    """
    open_runs = [run for run in runs if run.status != "finished" and (retry or run.status != "failed")]
    stop = Event()
    running: set[subprocess.Popen[bytes]] = set()
    shares: SimpleQueue[set[int]] = SimpleQueue()
    at_a_time = max(1, min(study.jobs, len(open_runs)))
    for share in split_cores(os.sched_getaffinity(0), at_a_time):
        shares.put(share)
    # On Linux, each thread has its own CPU affinity, and child processes inherit the affinity of the starting thread.
    with ThreadPoolExecutor(at_a_time, initializer=lambda: os.sched_setaffinity(0, shares.get())) as pool:
        waiting = [pool.submit(_execute_run, study, run, stop, running, report) for run in open_runs]
        try:
            for future in waiting:
                future.result()
        except BaseException:
            stop.set()
            for process in list(running):
                process.terminate()
            raise


def split_cores(cores: Collection[int], jobs: int) -> list[set[int]]:
    """Split ``cores`` into disjoint sets for ``jobs`` concurrent runs. Runs share single cores if there are too few.

    >>> split_cores({0, 1, 2, 3, 4}, 2)
    [{0, 1}, {2, 3, 4}]
    >>> split_cores({0, 1}, 3)
    [{0}, {0}, {1}]
    """
    ordered, count = sorted(cores), len(cores)
    whole = [set(ordered[job * count // jobs : (job + 1) * count // jobs]) for job in range(jobs)]
    return [share or {ordered[job % count]} for job, share in enumerate(whole)]


def _execute_run(
    study: StudySettings, run: StudyRun, stop: Event, running: set[subprocess.Popen[bytes]], report: Report
) -> None:
    if stop.is_set():
        return
    run.log_file.parent.mkdir(parents=True, exist_ok=True)
    run.failure_file.unlink(missing_ok=True)
    report(run, "continues" if run.status == "interrupted" else "starts")
    with run.log_file.open("ab") as log:
        process = subprocess.Popen(train_command(study, run), stdout=log, stderr=subprocess.STDOUT)
        running.add(process)
        if stop.is_set():  # `stop` was set before the process was added to `running`
            process.terminate()
        code = process.wait()
        running.discard(process)
    if run.status == "finished":
        report(run, "finished")
    elif not stop.is_set() and code not in (130, -2):  # 130 and -2: the run was interrupted
        run.failure_file.write_text(f"exit status {code}\n{_last_line(run)}\n", encoding="utf-8")
        report(run, f"failed with exit status {code}: {_last_line(run)} ({run.log_file})")


def _last_line(run: StudyRun) -> str:
    lines = run.log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    lines = [line for line in lines if not line.startswith("help: ")]  # the error precedes the help line
    return lines[-1] if lines else "the log is empty"
