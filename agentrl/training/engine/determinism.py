"""``training.deterministic``: what a process needs before it computes anything."""

from __future__ import annotations

import os

import torch

from agentrl.errors import SettingsError
from agentrl.training.settings import TrainingSettings

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC = (":4096:8", ":16:8")


def set_determinism(settings: TrainingSettings) -> None:
    """Have torch use deterministic algorithms where that is set. To be called before CUDA starts.

    cuBLAS reads its workspace's form when it starts; torch raises at the first product if it is another one. Processes
    that are started from this one inherit it. Raises SettingsError if the environment asks for another form.
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
