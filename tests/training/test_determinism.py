"""``training.deterministic``: the process's environment and torch's mode, before anything is computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentrl.errors import SettingsError
from agentrl.training.engine.determinism import set_determinism
from agentrl.training.settings import TrainingSettings

# What a process that joins a group finds: nothing of CUDA has run before that.
PROGRAM = """
import os, torch
from agentrl.training.engine.determinism import set_determinism
from agentrl.training.settings import TrainingSettings
set_determinism(TrainingSettings(deterministic={wanted}))
child = os.popen("echo $CUBLAS_WORKSPACE_CONFIG").read().strip()
print(torch.are_deterministic_algorithms_enabled(), child or "unset", torch.cuda.is_initialized())
"""


def in_a_process(*, wanted: bool, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", PROGRAM.format(wanted=wanted)]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_cublas_is_told_before_cuda_starts_and_children_inherit_it() -> None:
    assert in_a_process(wanted=True) == "True :4096:8 False"
    assert in_a_process(wanted=True, CUBLAS_WORKSPACE_CONFIG=":16:8") == "True :16:8 False"
    assert in_a_process(wanted=False) == "False unset False"


def test_another_form_of_the_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(SettingsError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0.*set it to :4096:8 or :16:8"):
        set_determinism(TrainingSettings(deterministic=True))
    set_determinism(TrainingSettings(deterministic=False))


@pytest.mark.slow
@pytest.mark.on_device
def test_estimators_kernels_and_attention_repeat_bit_by_bit_on_the_device(device: torch.device) -> None:
    script = Path(__file__).with_name("repeated_on_device.py")
    done = subprocess.run([sys.executable, str(script), device.type], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
