"""Process-wide state that affects results: deterministic algorithms, random number generators and CPU threads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.errors import SettingsError
from agentrl.rollout.engines.base import engine_facts
from agentrl.telemetry.machine import count_usable_cores
from agentrl.training.settings import TrainingSettings

if TYPE_CHECKING:
    from agentrl.config import Settings

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC = (":4096:8", ":16:8")


def set_determinism(settings: TrainingSettings) -> None:
    """Make torch use deterministic algorithms if ``training.deterministic`` is true.

    Call this before CUDA is initialized. Child processes inherit the cuBLAS workspace. Raises SettingsError if the
    environment selects a nondeterministic workspace.
    """
    if not settings.deterministic:
        return
    workspace = os.environ.setdefault(_WORKSPACE, _DETERMINISTIC[0])
    if workspace not in _DETERMINISTIC:
        raise SettingsError(
            f"training.deterministic=true, but {_WORKSPACE}={workspace} in the environment makes cuBLAS "
            f"nondeterministic: set it to {' or '.join(_DETERMINISTIC)}, or unset it"
        )
    torch.use_deterministic_algorithms(True)


def get_random_state() -> dict[str, Tensor]:
    """Return the state of torch's random number generators by device."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Tensor]) -> None:
    """Restore a state from :func:`get_random_state` on the available devices."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def count_computing_processes(settings: Settings, *, ranks: int) -> int:
    """Return the number of processes of a run that compute on this machine's cores at the same time."""
    engine_process = settings.rollout.schedule != "synchronous" and engine_facts(settings.rollout).in_process
    return ranks + engine_process


def set_threads(settings: Settings, *, processes: int) -> None:
    """Set this process's CPU threads: ``training.threads``, or the cores divided by ``processes``."""
    torch.set_num_threads(settings.training.threads or max(1, count_usable_cores() // processes))
