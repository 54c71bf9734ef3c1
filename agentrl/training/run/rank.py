"""Entry point of a training rank: ``python -m agentrl.training.run.rank RUN_DIRECTORY [--resume] [KEY=VALUE]``.

Settings from the command line override the settings of the run directory.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

from agentrl.cluster.processes import PARENT_VARIABLE
from agentrl.config import load_settings
from agentrl.errors import EXIT_CRASHED, EXIT_PEER_LOST, EXIT_REPORTED_ERROR, reported_exit_code
from agentrl.evaluation.settings import quoted_override
from agentrl.rollout.environment import check_environment
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.training.run.start import run_rank
from agentrl.training.worker.service import WorkerLostError


def train_rank_from_environment() -> int:
    """Train as the rank set in the environment variables, with the run directory's settings. Returns the exit code."""
    exit_with_parent(int(os.environ[PARENT_VARIABLE]))
    path = Path(sys.argv[1]).absolute()
    rank = os.environ["RANK"]
    try:
        overrides = [quoted_override("name", path.name), quoted_override("runs_dir", str(path.parent))]
        overrides += [text for text in sys.argv[2:] if text != "--resume"]
        settings = load_settings(overrides=overrides, resume=True)
        check_environment(settings)  # first, because the environment's module may register an estimator or a loss
        run = RunDirectory.resume(path) if rank == "0" else None
        return run_rank(settings, run, resume="--resume" in sys.argv[2:])
    except Exception as error:
        code = reported_exit_code(error)
        if code is None:
            raise
        print(f"error{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, WorkerLostError):
            return EXIT_PEER_LOST
        return EXIT_REPORTED_ERROR if code == EXIT_CRASHED else code


def exit_with_parent(parent_pid: int) -> None:
    """Kill this process when its parent ``parent_pid`` exits, because nothing else would stop it."""
    watched = select.poll()
    try:
        watched.register(os.pidfd_open(parent_pid), select.POLLIN)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        watched.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="end-with-starter").start()


if __name__ == "__main__":
    sys.exit(train_rank_from_environment())
