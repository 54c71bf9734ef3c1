"""Start several training ranks on this machine with the single-machine part of DeepSpeed's launcher.

The launcher kills ranks 30 s after SIGTERM, saved or not: signals therefore go directly to the ranks.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from agentrl.errors import SettingsError, WorldError
from agentrl.rollout.engines.vllm.server import ALL_GPUS, free_port, visible_gpus
from agentrl.training.run.signals import INTERRUPTED, stop_requests

if TYPE_CHECKING:
    from agentrl.config import Settings

WATCHED = "AGENTRL_LAUNCHED_BY"
"""Environment variable with the id of a process. When that process ends, the ranks end."""


def launch(settings: Settings, run_path: Path, *, resume: bool) -> int:
    """Run ``training.num_processes`` ranks on the run directory until they end, and return the exit code.

    Raises WorldError if a rank was killed.
    """
    process = _start(settings, run_path, resume)
    asked = threading.Event()
    insisted = threading.Event()

    def ask() -> None:
        asked.set()
        ranks = _children(process.pid)
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        if not ranks:
            process.terminate()

    def insist() -> None:
        insisted.set()
        for rank in _children(process.pid):
            rank.kill()  # the launcher ends after them
        process.terminate()

    with stop_requests(ask, insist):
        code = process.wait()
    killed = _signal_of(code)
    if insisted.is_set() or (asked.is_set() and (killed is not None or code == 0)):
        return INTERRUPTED  # forced, or before the ranks could catch the signal
    if killed is not None:
        raise WorldError(
            f"a training rank or its launcher was ended by {killed}; continue from the last checkpoint with --resume"
        )
    return code


def _start(settings: Settings, run_path: Path, resume: bool) -> subprocess.Popen[bytes]:
    devices = _devices(settings.training.num_processes)
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    command = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    command += [f"--master_port={free_port('127.0.0.1')}", "--no_local_rank", "--log_level=critical"]
    command += ["--module", "agentrl.training.run.rank", str(run_path)] + (["--resume"] if resume else [])
    environment = {**os.environ, WATCHED: str(os.getpid())}
    if torch.cuda.is_available():
        environment[ALL_GPUS] = ",".join(visible_gpus(torch.cuda.device_count()))
    else:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    # In a session of its own: only this process receives Ctrl-C, and it passes it on.
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _devices(count: int) -> list[int | str]:
    """The device of each rank: the first visible GPUs. On CPUs they are mere numbers."""
    if not torch.cuda.is_available():
        return list(range(count))
    found = torch.cuda.device_count()
    if count > found:
        raise SettingsError(f"training.num_processes={count}: only {found} GPUs are visible, and every rank needs one")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(visible.split(",")[:count]) if visible else list(range(count))


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _signal_of(code: int) -> str | None:
    """The signal that ended a rank or the launcher. The launcher exits with the code of the first rank that failed.

    >>> _signal_of(-9), _signal_of(256 - 9), _signal_of(1), _signal_of(130)
    ('SIGKILL', 'SIGKILL', None, None)
    """
    number = -code if code < 0 else 256 - code
    return signal.Signals(number).name if number in signal.valid_signals() else None
