"""Deterministic algorithms (``training.deterministic``) and the state of random number generators."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from agentrl.errors import SettingsError
from agentrl.training.settings import TrainingSettings

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC = (":4096:8", ":16:8")


def set_determinism(settings: TrainingSettings) -> None:
    """Make torch use deterministic algorithms if the setting is on. Child processes inherit it.

    Call this before CUDA is initialized. Raises SettingsError if the environment selects a nondeterministic cuBLAS
    workspace.
    """
    if not settings.deterministic:
        return
    form = os.environ.setdefault(_WORKSPACE, _DETERMINISTIC[0])
    if form not in _DETERMINISTIC:
        raise SettingsError(
            f"training.deterministic=true, but {_WORKSPACE}={form} in the environment makes cuBLAS nondeterministic: "
            f"set it to {' or '.join(_DETERMINISTIC)}, or unset it"
        )
    torch.use_deterministic_algorithms(True)


def get_random_state() -> dict[str, Tensor]:
    """Return the state of torch's random number generators by device."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Tensor]) -> None:
    """Restore a :func:`get_random_state` on the available devices."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
