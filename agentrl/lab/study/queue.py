"""Runs one after another, or a few at a time, until all are finished; a second start continues the first."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from agentrl.lab.study.runs import StudyRun, train_command
from agentrl.lab.study.settings import StudySettings

Report = Callable[[StudyRun, str], None]


def work_off(study: StudySettings, runs: Sequence[StudyRun], *, retry: bool, report: Report) -> None:
    """Start or continue every run that is not finished; ``retry`` also those that failed.

    A run that fails is noted and the next one starts. At KeyboardInterrupt the running ones are told to stop and save a
    checkpoint; the same call continues them.
    """
    open_runs = [run for run in runs if run.status != "finished" and (retry or run.status != "failed")]
    stop = Event()
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(study.jobs) as pool:
        waiting = [pool.submit(_work, study, run, stop, running, report) for run in open_runs]
        try:
            for future in waiting:
                future.result()
        except BaseException:
            stop.set()
            for process in list(running):
                process.terminate()
            raise


def _work(
    study: StudySettings, run: StudyRun, stop: Event, running: set[subprocess.Popen[bytes]], report: Report
) -> None:
    if stop.is_set():
        return
    run.log.parent.mkdir(parents=True, exist_ok=True)
    run.failure.unlink(missing_ok=True)
    report(run, "goes on" if run.status == "interrupted" else "starts")
    with run.log.open("ab") as log:
        command, environment = train_command(study, run), _environment(study.jobs)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        running.add(process)
        if stop.is_set():  # set before the process was known
            process.terminate()
        code = process.wait()
        running.discard(process)
    if run.status == "finished":
        report(run, "finished")
    elif not stop.is_set() and code not in (130, -2):
        run.failure.write_text(f"exit status {code}\n{_last_line(run)}\n", encoding="utf-8")
        report(run, f"failed with exit status {code}: {_last_line(run)} ({run.log})")


def _environment(jobs: int) -> dict[str, str]:
    """Runs at a time share the cores."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def _last_line(run: StudyRun) -> str:
    lines = run.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
