"""``training.deterministic``: the set-up of a process before it computes anything."""

from __future__ import annotations

import os

import torch

from agentrl.errors import SettingsError
from agentrl.training.settings import TrainingSettings

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC = (":4096:8", ":16:8")


def set_determinism(settings: TrainingSettings) -> None:
    """Make torch use deterministic algorithms if the setting is on, before CUDA starts; child processes inherit it.

    Raises SettingsError if the environment gives cuBLAS a workspace that is not deterministic.
    """
    if not settings.deterministic:
        return
    form = os.environ.setdefault(_WORKSPACE, _DETERMINISTIC[0])
    if form not in _DETERMINISTIC:
        raise SettingsError(
            f"training.deterministic=true with {_WORKSPACE}={form} in the environment, which lets cuBLAS give other "
            f"digits every time; valid: {', '.join(_DETERMINISTIC)}, or unset it"
        )
    torch.use_deterministic_algorithms(True)
